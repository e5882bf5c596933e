import math

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from txl import ops


def test_relative_shift_equals_a_double_loop():
    """Key j of query i lies m + i - j behind it; column c of the scores belongs to the distance J - 1 - c."""
    for i_len, j_len in [(1, 1), (1, 6), (3, 5), (4, 4), (5, 12)]:
        scores = torch.randn(2, i_len, j_len + 1)
        shifted = ops.relative_shift(scores)
        assert shifted.shape == (2, i_len, j_len)
        for i in range(i_len):
            for j in range(j_len - i_len + i + 1):  # the keys that the causal mask leaves
                distance = (j_len - i_len + i) - j
                assert torch.equal(shifted[:, i, j], scores[:, i, j_len - 1 - distance])


def test_relative_shift_moves_no_element():
    scores = torch.randn(2, 3, 6)
    assert ops.relative_shift(scores).untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()


def test_sinusoids_by_hand():
    table = ops.sinusoids(torch.tensor([0.0, 3.0], dtype=torch.float64), 4)
    expected = [math.sin(3), math.sin(3 / 100), math.cos(3), math.cos(3 / 100)]
    torch.testing.assert_close(table[0], torch.tensor([0, 0, 1, 1], dtype=torch.float64))
    torch.testing.assert_close(table[1], torch.tensor(expected, dtype=torch.float64))


def test_distances_are_told_apart_in_bfloat16():
    """Built in float64 and rounded once: the cosine of distance 511 is as right as bfloat16 allows."""
    exact = ops.distance_encoding(512, 8, None, torch.float64, torch.device("cpu"))
    rounded = ops.distance_encoding(512, 8, None, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(rounded, exact.bfloat16())
    assert exact.shape == (513, 8)


@pytest.mark.parametrize("n_key", [1, 2, 3, 7, 8, 9, 100])
def test_the_last_row_but_one_is_always_distance_zero(n_key):
    table = ops.distance_encoding(n_key, 8, None, torch.float64, torch.device("cpu"))
    expected = ops.sinusoids(torch.arange(n_key - 1, -2, -1, dtype=torch.float64), 8)
    assert torch.equal(table, expected)


def test_clamped_distances_are_all_alike():
    clamped = ops.distance_encoding(10, 8, 4, torch.float64, torch.device("cpu"))
    free = ops.distance_encoding(10, 8, None, torch.float64, torch.device("cpu"))
    assert torch.equal(clamped[:6], free[5].expand(6, 8))
    assert torch.equal(clamped[5:], free[5:])


@pytest.mark.parametrize("span", [None, 1, 4, 9])
def test_hidden_keys_by_hand(span):
    hidden = ops.hidden_keys(range(5, 8), range(2, 8), span)
    for row, query in enumerate(range(5, 8)):
        for column, key in enumerate(range(2, 8)):
            seen = key <= query and (span is None or query - key < span)
            assert hidden[row, column] == (not seen)


@pytest.mark.parametrize("span", [None, 1, 5, 40])
@pytest.mark.parametrize(("i_len", "memory"), [(1, 0), (1, 7), (7, 3), (13, 0), (13, 30)])
def test_attention_by_tiles_equals_the_plain_form(i_len, memory, span):
    """Against softmax over all keys at once, with the bias read entry by entry."""
    h, b, d, j_len = 2, 3, 4, memory + i_len
    torch.manual_seed(0)
    q, k, v = (torch.randn(h, b, n, d, dtype=torch.float64) for n in (i_len, j_len, j_len))
    table = torch.randn(h, b, i_len, j_len, dtype=torch.float64)
    scores = torch.einsum("hbid,hbjd->hbij", q, k) + table
    for i in range(i_len):
        for j in range(j_len):
            distance = memory + i - j
            if distance < 0 or (span is not None and distance >= span):
                scores[:, :, i, j] = -torch.inf
    plain = scores.softmax(-1) @ v

    def bias(queries, keys):
        return table[:, :, queries.start : queries.stop, keys.start : keys.stop]

    for tile in (1, 4, 128):
        tiled = ops.attention(q, k, v, bias, span=span, tile=tile)
        torch.testing.assert_close(tiled, plain, rtol=0, atol=1e-12)


def test_attention_dropout_falls_on_the_weights():
    """With one key in sight its weight is 1: dropped to 0 or scaled to 1 / (1 - p)."""
    ones = torch.ones(1, 1, 400, 1)
    out = ops.attention(ones, ones, ones, lambda q, k: torch.zeros(1, 1, len(q), len(k)), span=1, dropatt=0.5)
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert 100 < (out == 0).sum() < 300


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
    monkeypatch.setattr(ops, "KEPT", 2**28 if kept else 0)
    parts, targets = output_layer(n=n)
    nll, expected = ops.linear_nll(*parts, targets, chunk=chunk), plain_nll(*parts, targets)
    torch.testing.assert_close(nll, expected, rtol=0, atol=1e-12)
    scale = torch.randn(n, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * scale).sum(), parts, retain_graph=True) for x in (nll, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)
    again = torch.autograd.grad((nll * scale).sum(), parts)  # a backward pass leaves what was kept as it was
    assert all(map(torch.equal, ours, again))


def test_the_chunk_follows_from_the_sizes(monkeypatch):
    monkeypatch.setattr(ops, "PLAIN", 100)
    monkeypatch.setattr(ops, "CHUNK", 7 * 13)
    seen = []
    forward = ops._LinearNLL.apply
    monkeypatch.setattr(ops._LinearNLL, "apply", lambda *given: seen.append(given[4:]) or forward(*given))
    parts, targets = output_layer()
    torch.testing.assert_close(ops.linear_nll(*parts, targets), plain_nll(*parts, targets))
    with torch.no_grad():
        ops.linear_nll(*parts, targets)
    monkeypatch.setattr(ops, "KEPT", 349)
    ops.linear_nll(*parts, targets)
    monkeypatch.setattr(ops, "PLAIN", 350)
    ops.linear_nll(*parts, targets)
    assert seen == [(13, True), (13, False), (13, False)]


@pytest.mark.parametrize("kept", [True, False])
def test_the_loss_never_holds_tokens_times_vocabulary_twice(kept, monkeypatch):
    """Of all that a forward and a backward pass allocate beyond their inputs; torch's own takes it three times."""
    monkeypatch.setattr(ops, "KEPT", 2**28 if kept else 0)
    (hidden, weight, bias), targets = output_layer(n=256, v=4000, d=4, dtype=torch.float32)

    def peak(nll):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            nll().sum().backward()
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = [0]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held.append(held[-1] + event.nbytes())
        return max(held) / (4 * 256 * 4000)

    assert peak(lambda: plain_nll(hidden, weight, bias, targets)) > 2.9
    assert peak(lambda: ops.linear_nll(hidden, weight, bias, targets, chunk=200)) < (1.3 if kept else 0.3)


def test_only_the_gradients_that_are_wanted_are_made():
    parts, targets = output_layer()
    for wanted in range(3):
        given = [part.detach().requires_grad_(index == wanted) for index, part in enumerate(parts)]
        nll, expected = ops.linear_nll(*given, targets, chunk=13), plain_nll(*given, targets)
        assert nll.grad_fn.needs_input_grad[:3] == tuple(index == wanted for index in range(3))
        made = ops._LinearNLL.backward(nll.grad_fn, torch.ones(7, dtype=torch.float64))
        assert [gradient is not None for gradient in made[:3]] == [index == wanted for index in range(3)]
        (right,) = torch.autograd.grad(expected.sum(), given[wanted])
        torch.testing.assert_close(made[wanted], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 13])
def test_the_loss_of_inputs_that_are_not_contiguous(chunk):
    (hidden, weight, bias), targets = output_layer()
    parts = [hidden.t().contiguous().t(), weight.t().contiguous().t(), bias[:, None].expand(50, 2)[:, 0]]
    strided = torch.stack([targets, targets], dim=1).int()[:, 0]
    assert not parts[0].is_contiguous() and not parts[1].is_contiguous() and not strided.is_contiguous()
    ours = ops.linear_nll(*parts, strided, chunk=chunk)
    expected = plain_nll(hidden, weight, bias, targets)
    for gradient, right in zip(
        *(torch.autograd.grad(x.sum(), [hidden, weight, bias]) for x in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_shared_with_the_embedding_gets_both_gradients(kept, monkeypatch):
    monkeypatch.setattr(ops, "KEPT", 2**28 if kept else 0)
    (_, weight, bias), targets = output_layer()
    hidden = F.embedding(targets.flip(0), weight).tanh()
    ours, expected = ops.linear_nll(hidden, weight, bias, targets, chunk=13), plain_nll(hidden, weight, bias, targets)
    (gradient,), (right,) = (torch.autograd.grad(x.sum(), weight, retain_graph=True) for x in (ours, expected))
    torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 13])
def test_under_autocast_products_are_taken_in_its_type_and_losses_in_float32(dtype, chunk):
    parts, targets = output_layer(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        logits = F.linear(*parts)
        nll = ops.linear_nll(*parts, targets, chunk=chunk)
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
        assert ops.linear_nll(*parts, targets, chunk=chunk).dtype == torch.promote_types(dtype, torch.float32)
    with torch.inference_mode():
        assert ops.linear_nll(*parts, targets, chunk=13).isfinite().all()
        inside = [part.clone() for part in parts]
        assert ops.linear_nll(*inside, targets, chunk=13).isfinite().all()


def test_a_target_beyond_the_vocabulary_is_no_silent_zero():
    parts, _ = output_layer(n=2)
    for targets in ([3, 50], [3, -1], [3, -100]):
        nll = ops.linear_nll(*parts, torch.tensor(targets), chunk=13)
        assert nll.isnan().tolist() == [False, True]
        with pytest.raises(RuntimeError, match="out of bounds"):
            ops.linear_nll(*parts, torch.tensor(targets))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 13])
def test_the_loss_compiles_without_a_break(chunk):
    parts, targets = output_layer()
    compiled = torch.compile(lambda *given: ops.linear_nll(*given, chunk=chunk).sum(), fullgraph=True)
    ours, theirs = (
        torch.autograd.grad(x, parts) for x in (compiled(*parts, targets), plain_nll(*parts, targets).sum())
    )
    for gradient, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, right)
