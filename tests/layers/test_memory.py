"""The compressive memory against row-by-row computation; what each memory keeps is in tests/test_model.py."""

import math

import pytest
import torch
from conftest import TINY_MODEL, compose, tiny_model

from txl.config import build, check

SMALL = ["model/memory=compressive", "model.memory.mem_len=6", "model.memory.compressed_len=4", "model.memory.rate=3"]
KINDS = ["convolution", "mean", "max"]


def small(kind, *overrides):
    return tiny_model(*SMALL, f"model.memory.compression={kind}", *overrides)


def compressed(model, kind, layer, rows):
    """Group after group of three rows."""
    made = []
    for group in rows.split(3, dim=1):
        if kind == "convolution":
            weight, bias = model.memory.convolutions[layer].weight, model.memory.convolutions[layer].bias
            made.append(bias + sum(group[:, place] @ weight[:, :, place].T for place in range(3)))
        else:
            made.append(group.mean(dim=1) if kind == "mean" else group.amax(dim=1))
    return torch.stack(made, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_the_memory_is_compressed_group_by_group(kind, tokens):
    """The first layer's inputs are the embeddings: what is kept follows from all tokens read so far."""
    model, mems = small(kind), None
    for read in (6, 12, 18, 24):
        _, mems = model(tokens[:, read - 6 : read], mems)
        rows = model.softmax.embed(tokens[:, :read])
        coarse = [compressed(model, kind, 0, rows[:, : read - 6])[:, -4:]] if read > 6 else []
        torch.testing.assert_close(mems[0], torch.cat([*coarse, rows[:, read - 6 :]], dim=1), rtol=0, atol=1e-12)
        assert not any(memory.requires_grad for memory in mems)


def test_attention_reaches_memory_and_coarse_rows(tokens):
    """A token beyond the recent memory matters, through its coarse row; one that has left that too does not."""
    model = small("mean", "model.n_layer=1")

    def last(changed):
        text, mems = tokens.clone(), None
        if changed is not None:
            text[:, changed] = (text[:, changed] + 1) % 50
        for segment in text.split(6, dim=1):
            log_probs, mems = model(segment, mems)
        return log_probs[:, -1]

    told = [not torch.equal(last(place), last(None)) for place in range(24)]
    # one layer: the segment of 6, a memory of 6, and 4 coarse rows of 3 before them, which are there for all
    assert told == [True] * 24
    model.memory.compressed_len = 2
    told = [not torch.equal(last(place), last(None)) for place in range(24)]
    assert told == [False] * 6 + [True] * 18


@pytest.mark.parametrize("norm", ["true", "false"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reconstruction_loss_is_the_papers(kind, norm, tokens):
    """sum over layers of mean((A(h, old) - A(h, f(old)))^2), query by query."""
    model, mems = small(kind, f"model.pre_norm={norm}"), None
    for segment in tokens[:, :12].split(6, dim=1):
        _, mems = model(segment, mems)
    assert [memory.shape[1] for memory in mems] == [8, 8]
    _, memories, inputs, _ = model.states(tokens[:, 12:18], mems)
    found = model.memory.reconstruction(model.layers, memories, inputs)
    expected = 0.0
    for index, layer in enumerate(model.layers):
        old = memories[index][:, 2:]  # 2 coarse rows, then the 6 that leave
        layer_norm = layer.attention_norm if model.layers[0].pre_norm else lambda rows: rows
        q = layer.attention.queries(layer_norm(inputs[index]))
        results = []
        for rows in (old, compressed(model, kind, index, old)):
            k, v = layer.attention.keys_values(layer_norm(rows))
            weights = torch.zeros(2, 2, 6, rows.shape[1], dtype=torch.float64)
            for i in range(6):
                for j in range(rows.shape[1]):
                    weights[:, :, i, j] = (q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(8)
            results.append(weights.softmax(-1) @ v)
        expected += (results[0] - results[1]).square().mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found > 0


def test_the_loss_teaches_the_convolution_and_nothing_else(tokens):
    model, mems = small("convolution").train(), None
    for segment in tokens[:, :12].split(6, dim=1):
        _, mems = model(segment, mems)
    _, _, loss = model(tokens[:, 12:18], mems, tokens[:, 13:19], with_auxiliary=True)
    loss.backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {f"memory.convolutions.{layer}.{kind}" for layer in range(2) for kind in ("weight", "bias")}
    nll, _ = model(tokens[:, 12:18], mems, tokens[:, 13:19])
    model.zero_grad()
    nll.mean().backward()
    assert all(parameter.grad is None for parameter in model.memory.parameters())


def test_before_anything_leaves_every_parameter_has_a_gradient(tokens):
    """Processes that exchange gradients wait for all of them."""
    model = small("convolution").train()
    nll, _, loss = model(tokens[:, :6], None, tokens[:, 1:7], with_auxiliary=True)
    (nll.mean() + loss).backward()
    assert loss == 0 and all(parameter.grad is not None for parameter in model.parameters())


def test_the_weight_of_the_loss_is_an_option(tokens):
    def loss(weight):
        model, mems = small("convolution", f"model.memory.reconstruction={weight}"), None
        for segment in tokens[:, :12].split(6, dim=1):
            _, mems = model(segment, mems)
        return model(tokens[:, 12:18], mems, tokens[:, 13:19], with_auxiliary=True)[2], model.memory.learns

    (once, learns), (twice, _), (never, off) = loss(1.0), loss(2.0), loss(0.0)
    assert twice == 2 * once > 0 and never == 0 and learns and not off


def test_the_convolution_begins_as_the_mean():
    torch.manual_seed(0)
    cfg = compose(*TINY_MODEL, *SMALL, "model.init_std=0.0")
    memory = build(cfg.model, n_token=50).memory
    rows = torch.randn(2, 6, 16)
    torch.testing.assert_close(memory.compress(0, rows), rows.unflatten(1, (2, 3)).mean(dim=2))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.memory.rate=0"], "model.memory.rate"),
        (["model.memory.compressed_len=0"], "model.memory.compressed_len"),
        (["model.memory.mem_len=0"], "model.memory.mem_len"),
        (["model.memory.reconstruction=-1"], "model.memory.reconstruction"),
        (["model.same_length=true"], "model.same_length"),
    ],
)
def test_what_is_refused_is_named(overrides, key):
    with pytest.raises(ValueError, match=f"^{key}: "):
        build(compose(*TINY_MODEL, *SMALL, *overrides).model, n_token=50)


def test_another_compression_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^model\.memory\.compression: must be 'convolution' or 'mean' or 'max'"):
        check(compose(*TINY_MODEL, *SMALL, "model.memory.compression=sum"))


def test_documents_are_refused_in_words(tokens):
    with pytest.raises(ValueError, match=r"^data\.reset_at_document: "):
        small("mean")(tokens[:, :6], starts=torch.zeros(2, 6, dtype=torch.bool))
