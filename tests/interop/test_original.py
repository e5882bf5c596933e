"""Numbers computed once with the authors' own code, in float64: tests/golden/README.md says what each file holds."""

import copy

import pytest
import torch
from golden import part, read

from txl.interop import from_original, to_original

MODELS = [
    "xl_post_norm",
    "xl_pre_norm",
    "xl_same_length_clamp",
    "xl_long_memory_short_last",
    "xl_no_memory",
    "xl_d_embed",
    "xl_adaptive",
    "xl_adaptive_div2",
    "shaw",
    "absolute",
    "absolute_per_layer",
]


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
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, own in zip(gradients.parameters(), model.parameters(), strict=True):
            parameter.copy_(own.grad)
    theirs, _ = to_original(gradients)
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
    unknown = ("batch", "segments") if "r_emb" in weights else ("batch", "segments", "tgt_len")
    given = {key: value for key, value in meta["config"].items() if key not in unknown}
    if given.get("tie_projs") is True:
        given["tie_projs"] = [False] + [True] * len(given["cutoffs"])
    assert given.items() <= flags.items()
    again, flags_again = to_original(from_original(state, flags))
    assert flags_again == flags
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_clamped_distances_of_attn_type_1_read_the_last_row_that_is_left():
    """The authors' code cuts the tables to the rows of the clamp_len nearest distances, and repeats the farthest of them."""
    tensors, meta = read("shaw")
    weights, tokens = part(tensors, "weight."), tensors["tokens"]
    clamped = from_original(weights, {**meta["config"], "clamp_len": 3})
    repeated = {name: weights[name].clone() for name in ("r_emb", "r_bias")}  # [layer, row, ...], the nearest row last
    for table in repeated.values():
        table[:, :-3] = table[:, -3:-2]
    expected = from_original({**weights, **repeated}, meta["config"])
    for model in (clamped, expected):
        model.double()
    torch.testing.assert_close(clamped(tokens)[0], expected(tokens)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(clamped(tokens)[0], from_original(weights, meta["config"]).double()(tokens)[0])
    assert to_original(clamped)[1]["clamp_len"] == 3


def with_flags(**changes):
    tensors, meta = read("xl_post_norm")
    return part(tensors, "weight."), {**meta["config"], **changes}


@pytest.mark.parametrize("given", ["word_emb.emb_layers.0.weight", "crit.out_layers.0.weight"])
def test_tied_weights_may_stand_under_either_name(given):
    weights, flags = with_flags()
    both, _ = to_original(from_original(weights, flags))
    one = {name: tensor for name, tensor in weights.items() if name == given or "emb_layers" not in name}
    one = {name: tensor for name, tensor in one.items() if name == given or name != "crit.out_layers.0.weight"}
    assert len(one) == len(weights) - 1
    state, _ = to_original(from_original(one, flags))
    assert all(torch.equal(state[name], tensor) for name, tensor in both.items())


def test_untied_weights_and_biases_go_there_and_back():
    weights, flags = with_flags(tie_weight=False, untie_r=True, mem_len=0, dropout=0.1, d_embed=8)
    generator = torch.Generator().manual_seed(0)
    weights["crit.out_layers.0.weight"] = torch.randn(29, 8, generator=generator)
    weights["word_emb.emb_layers.0.weight"] = torch.randn(29, 8, generator=generator)
    weights["word_emb.emb_projs.0"] = torch.randn(12, 8, generator=generator)
    weights["crit.out_projs.0"] = torch.randn(12, 8, generator=generator)
    for name in ("r_w_bias", "r_r_bias"):
        shared = weights.pop(name)
        weights |= {f"layers.{layer}.dec_attn.{name}": shared + layer for layer in range(2)}
    weights["pos_emb.inv_freq"] = torch.zeros(6)
    model = from_original(weights, flags)
    assert model.dropout.p == 0.1 and not model.training
    del weights["pos_emb.inv_freq"]
    state, back = to_original(model)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert back["untie_r"] is True and back["tie_weight"] is False and back["mem_len"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type": 4}, "attn_type=4 is not supported"),
        ({"attn_type": 1, "tgt_len": None}, "tgt_len missing"),
        ({"attn_type": 1}, r"r_bias, r_emb missing"),
        ({"attn_type": 2, "pre_lnorm": True}, "pre_lnorm with attn_type 2"),
        ({"attn_type": 2, "clamp_len": 4}, "clamp_len with attn_type 2"),
        ({"cutoffs": [10, 20]}, r"crit\.cluster_bias, crit\.cluster_weight missing"),
        ({"cutoffs": [10, 29]}, r"model\.softmax\.cutoffs: 29 "),
        ({"cutoffs": [10, 20], "tie_projs": [True] * 4}, r"model\.softmax\.tie_projs: "),
        ({"div_val": 2}, "div_val=2 is not supported"),
        ({"d_model": None}, "flags: d_model missing"),
        ({"d_inner": 21}, r"CoreNet.0.weight has shape \(20, 12\), the flags ask for \(21, 12\)"),
        ({"n_layer": 3}, r"state_dict: layers\.2\.\S+, .* missing"),
        ({"n_layer": 1}, "not understood"),
        ({"n_layer": 10**9}, "not those of 1000000000 layers"),
        ({"n_head": "3"}, "flags: n_head must be a whole number or null, got '3'"),
        ({"cutoffs": 5}, "flags: cutoffs must be a list, each a whole number or null, got 5"),
        ({"d_model": 13}, "must be even"),
    ],
)
def test_what_cannot_be_represented_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        from_original(*with_flags(**changes))


ADAPTIVE_TIES = {
    "xl_adaptive": [
        ["word_emb.emb_layers.0.weight", "crit.out_layers.0.weight"],
        ["word_emb.emb_projs.0", "crit.out_projs.1", "crit.out_projs.2"],
    ],
    "xl_adaptive_div2": [
        *([f"word_emb.emb_layers.{index}.weight", f"crit.out_layers.{index}.weight"] for index in range(3)),
        *([f"word_emb.emb_projs.{index}", f"crit.out_projs.{index}"] for index in (1, 2)),
    ],
}


@pytest.mark.parametrize("name", ADAPTIVE_TIES)
@pytest.mark.parametrize("which", [0, -1])
def test_tied_clusters_may_stand_under_one_name_or_all_and_must_agree(name, which):
    tensors, meta = read(name)
    weights = part(tensors, "weight.")
    dropped = {key for tied in ADAPTIVE_TIES[name] for key in tied if key != tied[which]}
    one = {key: tensor for key, tensor in weights.items() if key not in dropped}
    state, _ = to_original(from_original(one, meta["config"]))
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)
    for tied in ADAPTIVE_TIES[name]:
        with pytest.raises(ValueError, match="are tied by the flags, but differ"):
            from_original({**weights, tied[which]: weights[tied[which]] + 1}, meta["config"])


@pytest.mark.parametrize("name", ADAPTIVE_TIES)
@pytest.mark.parametrize("tie_projs", [False, [False], [True, False, True]])
def test_untied_clusters_go_there_and_back(name, tie_projs):
    tensors, meta = read(name)
    flags = {**meta["config"], "tie_weight": False, "tie_projs": tie_projs}
    weights = {key: torch.randn_like(tensor) for key, tensor in part(tensors, "weight.").items()}
    if tie_projs == [True, False, True]:
        for index in (0, 2):
            weights[f"crit.out_projs.{index}"] = weights[f"word_emb.emb_projs.{index if 'div2' in name else 0}"]
    state, back = to_original(from_original(weights, flags))
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)
    assert back["tie_projs"] == [tie_projs == [True, False, True], False, tie_projs == [True, False, True]]
    assert back["tie_weight"] is False


def test_weights_tied_by_the_flags_but_different_are_refused():
    weights, flags = with_flags()
    weights["crit.out_layers.0.weight"] = weights["crit.out_layers.0.weight"] + 1
    with pytest.raises(ValueError, match="are tied by the flags, but differ"):
        from_original(weights, flags)
