"""Numbers computed once with the authors' own code, in float64: tests/golden/README.md says what each file holds."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from txl.interop import from_original, to_original
from txl.interop.original import _correspondence

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = [
    "xl_post_norm",
    "xl_pre_norm",
    "xl_same_length_clamp",
    "xl_long_memory_short_last",
    "xl_no_memory",
    "xl_d_embed",
]


def read(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        meta = {key: value for key, value in file.metadata().items() if key != "note"}
    return tensors, {key: json.loads(value) for key, value in meta.items()}


def part(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", MODELS)
def test_golden_nll_mems_and_gradients(name):
    tensors, meta = read(name)
    model = from_original(part(tensors, "weight."), meta["config"]).double()
    inputs, targets = tensors["tokens"][:, :-1], tensors["tokens"][:, 1:]
    mems, start = None, 0
    for index, length in enumerate(meta["config"]["segments"]):
        segment = slice(start, start + length)
        nll, mems = model(inputs[:, segment], mems, targets[:, segment])
        torch.testing.assert_close(nll, tensors[f"segment{index}.nll"], rtol=0, atol=1e-10)
        start += length
    for layer, memory in enumerate(mems or []):
        torch.testing.assert_close(memory, tensors[f"mems.{layer}"], rtol=0, atol=1e-10)
    assert len(mems) == (model.memory.mem_len is not None) * meta["config"]["n_layer"]
    nll.mean().backward()
    expected = part(tensors, "grad.")
    theirs = {key: torch.cat([ours.grad for ours in parts]) for key, parts in _correspondence(model).items()}
    assert expected.keys() <= theirs.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            theirs[key], gradient, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_to_original_undoes_from_original(name):
    tensors, meta = read(name)
    weights = part(tensors, "weight.")
    state, flags = to_original(from_original(weights, meta["config"]))
    assert state.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(state[key], tensor), key
    given = {key: value for key, value in meta["config"].items() if key not in ("batch", "segments", "tgt_len")}
    assert given.items() <= flags.items()
    again, flags_again = to_original(from_original(state, flags))
    assert flags_again == flags
    assert all(torch.equal(again[key], state[key]) for key in state)
