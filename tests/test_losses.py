import pytest
import torch
from conftest import held_at_most
from torch.nn import functional as F

from txl import losses


def output_layer(n=7, v=50, d=6, dtype=torch.float64):
    """Hidden states, table and biases, which want gradients, and targets among which are the first and the last word."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in [(n, d), (v, d), (v,)]
    ]
    targets = torch.randint(v, (n,), generator=generator)
    targets[:2] = torch.tensor([0, v - 1])[:n]
    return [part.requires_grad_() for part in parts], targets


def plain_nll(hidden, weight, bias, targets):
    """The slow twin: all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight, bias).to(bias.dtype), targets, reduction="none")


@pytest.mark.parametrize("n", [7, 0])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 13, 49, 50, 99])
def test_the_loss_by_chunks_is_the_plain_one(n, kept, chunk, monkeypatch):
    """With logits kept or computed again, for chunks that do not divide the vocabulary: losses and gradients."""
    monkeypatch.setattr(losses, "KEPT", 2**28 if kept else 0)
    parts, targets = output_layer(n=n)
    nll, expected = losses.linear_nll(*parts, targets, chunk=chunk), plain_nll(*parts, targets)
    torch.testing.assert_close(nll, expected, rtol=0, atol=1e-12)
    scale = torch.randn(n, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * scale).sum(), parts, retain_graph=True) for x in (nll, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)
    again = torch.autograd.grad((nll * scale).sum(), parts)  # a backward pass leaves what was kept as it was
    assert all(map(torch.equal, ours, again))


def test_the_chunk_follows_from_the_sizes(monkeypatch):
    monkeypatch.setattr(losses, "PLAIN", 100)
    monkeypatch.setattr(losses, "CHUNK", 7 * 13)
    seen = []
    forward = losses._LinearNLL.apply
    monkeypatch.setattr(losses._LinearNLL, "apply", lambda *given: seen.append(given[4:]) or forward(*given))
    parts, targets = output_layer()
    torch.testing.assert_close(losses.linear_nll(*parts, targets), plain_nll(*parts, targets))
    with torch.no_grad():
        losses.linear_nll(*parts, targets)
    monkeypatch.setattr(losses, "KEPT", 349)
    losses.linear_nll(*parts, targets)
    monkeypatch.setattr(losses, "PLAIN", 350)
    losses.linear_nll(*parts, targets)
    assert seen == [(13, True), (13, False), (13, False)]


@pytest.mark.parametrize("kept", [True, False])
def test_the_loss_never_holds_tokens_times_vocabulary_twice(kept, monkeypatch):
    """Of all that a forward and a backward pass allocate beyond their inputs; torch's own takes it three times."""
    monkeypatch.setattr(losses, "KEPT", 2**28 if kept else 0)
    (hidden, weight, bias), targets = output_layer(n=256, v=4000, d=4, dtype=torch.float32)

    def peak(nll):
        return held_at_most(lambda: nll().sum().backward()) / (4 * 256 * 4000)

    assert peak(lambda: plain_nll(hidden, weight, bias, targets)) > 2.9
    assert peak(lambda: losses.linear_nll(hidden, weight, bias, targets, chunk=200)) < (1.3 if kept else 0.3)


def test_only_the_gradients_that_are_wanted_are_made():
    parts, targets = output_layer()
    for wanted in range(3):
        given = [part.detach().requires_grad_(index == wanted) for index, part in enumerate(parts)]
        nll, expected = losses.linear_nll(*given, targets, chunk=13), plain_nll(*given, targets)
        assert nll.grad_fn.needs_input_grad[:3] == tuple(index == wanted for index in range(3))
        made = losses._LinearNLL.backward(nll.grad_fn, torch.ones(7, dtype=torch.float64))
        assert [gradient is not None for gradient in made[:3]] == [index == wanted for index in range(3)]
        (right,) = torch.autograd.grad(expected.sum(), given[wanted])
        torch.testing.assert_close(made[wanted], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 13])
def test_the_loss_of_inputs_that_are_not_contiguous(chunk):
    (hidden, weight, bias), targets = output_layer()
    parts = [hidden.t().contiguous().t(), weight.t().contiguous().t(), bias[:, None].expand(50, 2)[:, 0]]
    strided = torch.stack([targets, targets], dim=1).int()[:, 0]
    assert not parts[0].is_contiguous() and not parts[1].is_contiguous() and not strided.is_contiguous()
    ours = losses.linear_nll(*parts, strided, chunk=chunk)
    expected = plain_nll(hidden, weight, bias, targets)
    for gradient, right in zip(
        *(torch.autograd.grad(x.sum(), [hidden, weight, bias]) for x in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_shared_with_the_embedding_gets_both_gradients(kept, monkeypatch):
    monkeypatch.setattr(losses, "KEPT", 2**28 if kept else 0)
    (_, weight, bias), targets = output_layer()
    hidden = F.embedding(targets.flip(0), weight).tanh()
    ours, expected = (
        losses.linear_nll(hidden, weight, bias, targets, chunk=13),
        plain_nll(hidden, weight, bias, targets),
    )
    (gradient,), (right,) = (torch.autograd.grad(x.sum(), weight, retain_graph=True) for x in (ours, expected))
    torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 13])
def test_under_autocast_products_are_taken_in_its_type_and_losses_in_float32(dtype, chunk):
    parts, targets = output_layer(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        logits = F.linear(*parts)
        nll = losses.linear_nll(*parts, targets, chunk=chunk)
    assert logits.dtype == dtype and nll.dtype == torch.float32
    if chunk is not None:  # the backward pass, which no autocast covers, has its type from what was kept
        assert all(kept.dtype == dtype for kept in nll.grad_fn.saved_tensors[:3])
    expected = F.cross_entropy(logits.float(), targets, reduction="none")
    torch.testing.assert_close(nll, expected)
    ours, theirs = (torch.autograd.grad(x.sum(), parts) for x in (nll, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_float32_at_the_least(dtype):
    parts, targets = output_layer(dtype=dtype)
    for chunk in (None, 13):
        assert losses.linear_nll(*parts, targets, chunk=chunk).dtype == torch.promote_types(dtype, torch.float32)
    with torch.inference_mode():
        assert losses.linear_nll(*parts, targets, chunk=13).isfinite().all()
        inside = [part.clone() for part in parts]
        assert losses.linear_nll(*inside, targets, chunk=13).isfinite().all()


def test_a_target_beyond_the_vocabulary_is_no_silent_zero():
    parts, _ = output_layer(n=2)
    for targets in ([3, 50], [3, -1], [3, -100]):
        nll = losses.linear_nll(*parts, torch.tensor(targets), chunk=13)
        assert nll.isnan().tolist() == [False, True]
        with pytest.raises(RuntimeError, match="out of bounds"):
            losses.linear_nll(*parts, torch.tensor(targets))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 13])
def test_the_loss_compiles_without_a_break(chunk):
    parts, targets = output_layer()
    compiled = torch.compile(lambda *given: losses.linear_nll(*given, chunk=chunk).sum(), fullgraph=True)
    ours, theirs = (
        torch.autograd.grad(x, parts) for x in (compiled(*parts, targets), plain_nll(*parts, targets).sum())
    )
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right)
