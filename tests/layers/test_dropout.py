"""The dropouts of the Penn Treebank literature: what each of them drops, and that nothing is dropped in evaluation."""

import pytest
import torch
from conftest import TINY_MODEL, compose, tiny_model
from torch.nn import functional as F

from txl.config import build
from txl.layers.dropout import WeightDropLinear, variational_dropout, word_dropout
from txl.layers.feedforward import FeedForward

KEYS = ["model.dropout", "model.dropatt", "model.dropoute", "model.dropouti", "model.dropouto", "model.wdrop"]


@pytest.mark.parametrize("key", KEYS)
def test_each_acts_in_training_alone(key, tokens):
    model, calm = tiny_model(f"{key}=0.5"), tiny_model()
    assert torch.equal(model(tokens)[0], calm(tokens)[0])
    model.train()
    first, second = model(tokens)[0], model(tokens)[0]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_its_range_is_refused(key, rate):
    with pytest.raises(ValueError, match=rf"^{key}: must lie in \[0, 1\)"):
        build(compose(*TINY_MODEL, f"{key}={rate}").model, n_token=50)


def test_a_dropped_word_is_dropped_wherever_it_stands():
    tokens = torch.randint(20, (4, 50), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    factor = word_dropout(torch.ones(4, 50, 3), tokens, 20, 0.3)
    by_word = {}
    for token, row in zip(tokens.flatten().tolist(), factor.flatten(0, 1), strict=True):
        assert row.unique().numel() == 1 and torch.equal(by_word.setdefault(token, row), row)
    values = torch.stack(list(by_word.values()))[:, 0]
    assert {round(value, 4) for value in values.tolist()} == {0.0, round(1 / 0.7, 4)}
    means = [word_dropout(torch.ones(1, 20, 1), torch.arange(20)[None], 20, 0.3).mean() for _ in range(300)]
    assert torch.stack(means).mean() == pytest.approx(1.0, abs=0.05)


def test_variational_dropout_drops_the_same_components_of_all_tokens():
    torch.manual_seed(0)
    factor = variational_dropout(torch.ones(3, 40, 100), 0.4)
    assert torch.equal(factor, factor[:, :1].expand_as(factor)) and not torch.equal(factor[0], factor[1])
    assert {round(value, 4) for value in factor.unique().tolist()} == {0.0, round(1 / 0.6, 4)}
    assert factor.mean() == pytest.approx(1.0, abs=0.15)


def test_input_and_output_take_the_variational_dropout_in_place_of_the_ordinary(tokens, monkeypatch):
    """With it on, ordinary dropout falls on neither; without, it falls on both, and on the encoding."""
    model = tiny_model("model.dropout=0.5", "model.dropouti=0.0", "model.dropouto=0.0").train()
    calls = []
    monkeypatch.setattr(model.dropout, "forward", lambda rows: (calls.append(rows.shape), rows)[1])
    _, _, inputs, _ = model.states(tokens)
    assert torch.equal(inputs[0], model.softmax.embed(tokens)) and len(calls) == 1  # the encoding's
    model.dropouti, model.dropouto = 0.5, 0.5
    _, _, inputs, _ = model.states(tokens)
    factor = inputs[0] / model.softmax.embed(tokens)
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    assert (factor == 0).any() and len(calls) == 2


def test_weights_are_dropped_for_memory_and_segment_alike(tokens):
    """One mask for a whole segment: with the memory read as part of the segment, the keys are the same."""
    model = tiny_model("model.wdrop=0.5", "model.n_layer=1").train()
    layer = model.layers[0]
    assert {type(module).__name__ for module in layer.modules() if isinstance(module, torch.nn.Linear)} == {
        "WeightDropLinear",
        "Linear",  # of the distances
    }
    seen = []
    project = layer.attention.kv_net.forward
    layer.attention.kv_net.forward = lambda rows: (seen.append(rows.shape), project(rows))[1]
    _, mems = model(tokens[:, :12])
    model(tokens[:, 12:], mems)
    assert seen == [(2, 12, 16), (2, 24, 16)]


def test_dropped_weights_are_those_of_dropconnect():
    torch.manual_seed(0)
    linear, rows = WeightDropLinear(6, 5, bias=True, wdrop=0.5), torch.randn(3, 6)
    torch.manual_seed(1)
    found = linear(rows)
    torch.manual_seed(1)
    factor = F.dropout(torch.ones(5, 6), 0.5)
    torch.testing.assert_close(found, rows @ (linear.weight * factor).T + linear.bias)
    assert torch.equal(linear.eval()(rows), F.linear(rows, linear.weight, linear.bias))


def test_swiglu_gates_its_values():
    torch.manual_seed(0)
    network, rows = FeedForward(d_model=4, d_inner=6, dropout=0.0, activation="swiglu"), torch.randn(2, 3, 4)
    made = rows @ network.inner.weight.T + network.inner.bias
    gate, value = made[..., :6], made[..., 6:]
    expected = (gate / (1 + (-gate).exp()) * value) @ network.outer.weight.T + network.outer.bias
    torch.testing.assert_close(network(rows), expected)
    assert network.inner.weight.shape == (12, 4)
