import itertools

import pytest
import torch
from conftest import TINY_MODEL, compose, mostly_slow, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from txl import ops
from txl.config import build

VARIANTS = {
    "post_norm": [],
    "pre_norm": ["model.pre_norm=true"],
    "untie_r": ["model.untie_r=true"],
    "clamp_len": ["model.position.clamp_len=5"],
    "d_embed": ["model.d_embed=10"],
    "tie_projs": ["model.d_embed=10", "model.softmax.tie_projs=true"],
    "untied": ["model.tie_weight=false"],
    "odd_heads": ["model.n_head=3", "model.d_head=5"],
    "gelu": ["model.activation=gelu"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_in_segments_equals_reading_whole(variant, tokens):
    """With a memory as long as the text, segment recurrence loses nothing (section 3.2)."""
    model = tiny_model("model.memory.mem_len=24", *VARIANTS[variant])
    whole, _ = model(tokens)
    for length in (1, 4, 7):
        mems, parts = None, []
        for segment in tokens.split(length, dim=1):
            log_probs, mems = model(segment, mems)
            parts.append(log_probs)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-11)


def test_with_same_length_every_segmentation_is_the_same(tokens):
    """Each query sees exactly mem_len keys, wherever the segments end."""
    model = tiny_model("model.same_length=true", "model.memory.mem_len=6")
    results = []
    for length in (24, 1, 5, 11):
        mems, parts = None, []
        for segment in tokens.split(length, dim=1):
            log_probs, mems = model(segment, mems)
            parts.append(log_probs)
        results.append(torch.cat(parts, dim=1))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("span", [1, 3, 6])
def test_with_same_length_a_query_sees_exactly_mem_len_keys(span):
    """Gradients of one layer's output fall on its own place and the mem_len - 1 before it, and on no other."""
    model = tiny_model("model.same_length=true", f"model.memory.mem_len={span}", "model.n_layer=1")
    hidden = torch.randn(1, 9, 16, dtype=torch.float64)
    memory = torch.randn(1, span, 16, dtype=torch.float64)
    context = torch.cat([memory, hidden], dim=1).requires_grad_()
    encoding = model.layers[0].attention.position.encode(9 + span, hidden)
    out = model.layers[0](context[:, span:], context[:, :span], encoding, reach=span - 1)
    for i in range(9):
        (gradient,) = torch.autograd.grad(out[0, i].sum(), context, retain_graph=True)
        touched = gradient[0].abs().sum(-1).nonzero().flatten().tolist()
        assert touched == list(range(i + 1, i + span + 1))


def test_no_gradient_from_a_prediction_to_a_later_token(tokens):
    """Causality, through all layers and the memory."""
    model = tiny_model()
    _, mems = model(tokens[:, :12])
    embedded = model.softmax.embed(tokens[:, 12:]).detach().requires_grad_()
    model.softmax.embed = lambda _: embedded
    log_probs, _ = model(tokens[:, 12:], mems)
    for i in range(12):
        (gradient,) = torch.autograd.grad(log_probs[:, i].square().sum(), embedded, retain_graph=True)
        assert gradient[:, i + 1 :].abs().max() == 0 if i < 11 else True
        assert gradient[:, : i + 1].abs().sum(-1).min() > 0


def test_the_memory_is_detached_and_never_longer_than_mem_len(tokens):
    model = tiny_model("model.memory.mem_len=5")
    mems = None
    for segment in tokens.split(3, dim=1):
        _, mems = model(segment, mems)
        assert len(mems) == 2
        assert all(memory.shape[1] <= 5 and not memory.requires_grad for memory in mems)
    assert mems[0].shape == (2, 5, 16)
    torch.testing.assert_close(mems[0], model.softmax.embed(tokens[:, -5:]), rtol=0, atol=0)


def test_forward_mutates_nothing(tokens):
    model = tiny_model()
    _, mems = model(tokens)
    copies = [memory.clone() for memory in mems]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, _ = model(tokens, mems)
    second, _ = model(tokens, mems)
    assert torch.equal(first, second)
    assert all(map(torch.equal, mems, copies))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_without_memory_a_segment_stands_alone(tokens):
    model = tiny_model("model/memory=none")
    alone, mems = model(tokens)
    assert mems == []
    for carried in (None, [], [torch.randn(2, 3, 16, dtype=torch.float64)] * 2):
        assert torch.equal(model(tokens, carried)[0], alone)


def test_a_presets_mem_len_is_no_memory_where_none_is_chosen():
    for overrides in (["model=enwik8_12l", "model/memory=none"], ["debug=smoke", "experiment=python_docs_no_memory"]):
        with torch.device("meta"):
            model = build(compose(*overrides).model, n_token=50)
        assert model.memory.mem_len is None


def test_same_length_without_memory_is_plain_causal_attention(tokens):
    """The authors' code masks everything there, and yields NaN."""
    with_it = tiny_model("model/memory=none", "model.same_length=true")
    without = tiny_model("model/memory=none")
    assert torch.equal(with_it(tokens)[0], without(tokens)[0])


def test_targets_give_minus_the_log_probability(tokens):
    model = tiny_model()
    log_probs, _ = model(tokens)
    targets = tokens.roll(-1, dims=1)
    nll, _ = model(tokens, None, targets)
    torch.testing.assert_close(nll, -log_probs.gather(2, targets[..., None])[..., 0])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 24, dtype=torch.float64))


def test_activation_checkpointing_changes_no_number(tokens):
    gradients = []
    for flag in ("true", "false"):
        model = tiny_model(f"model.activation_checkpointing={flag}", "model.dropout=0.3", "model.dropatt=0.2").train()
        torch.manual_seed(3)
        nll, mems = model(tokens[:, :12], None, tokens[:, 1:13])
        nll, _ = model(tokens[:, 12:-1], mems, tokens[:, 13:])
        nll.mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("key", ["model.dropout", "model.dropatt"])
def test_dropout_acts_in_training_only(key, tokens):
    model = tiny_model(f"{key}=0.5")
    calm = model(tokens)[0]
    assert torch.equal(model(tokens)[0], calm)
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


def test_one_dropout_mask_falls_on_the_distances_of_all_layers(tokens):
    """The authors drop R once for the whole batch and all layers."""
    model = tiny_model("model.dropout=0.5").train()
    seen = []
    for layer in model.layers:
        layer.attention.position.r_net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(tokens)
    assert seen[0].ndim == 2 and torch.equal(seen[0], seen[1])
    assert 0.3 < (seen[0] == 0).float().mean() < 0.7


def test_u_and_v_are_shared_unless_untied():
    shared, untied = tiny_model(), tiny_model("model.untie_r=true")
    assert shared.layers[0].attention.position.r_w_bias is shared.layers[1].attention.position.r_w_bias
    assert untied.layers[0].attention.position.r_w_bias is not untied.layers[1].attention.position.r_w_bias
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (shared, untied)]
    assert count[1] - count[0] == 2 * 2 * 8  # u and v of one more layer


def test_the_authors_initialisation():
    torch.manual_seed(0)
    cfg = compose("model.d_embed=100", "model.tie_weight=false", "model.n_layer=2")
    model = build(cfg.model, n_token=500)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm.weight" in name else 0.0
        if name.endswith(".bias") or name.endswith("out_bias"):
            assert parameter.abs().max() == 0, name
        else:
            spread = 0.01 if "proj" in name else 0.02
            assert abs(parameter.mean() - centre) < spread / 2, name
            assert abs(parameter.std() - spread) < spread / 4, name
    wide = build(compose("model.init_std=0.1", "model.proj_init_std=0.05", "model.d_embed=64").model, n_token=500)
    assert abs(wide.softmax.weight.std() - 0.1) < 0.01
    assert abs(wide.softmax.emb_proj.std() - 0.05) < 0.01


@pytest.mark.parametrize(
    ("size", "n_token", "count"),
    [("enwik8_12l", 204, 41_055_436), ("enwik8_24l", 204, 277_231_820), ("enwik8_24l", 27, 277_050_395)],
)
def test_parameter_counts_of_the_published_character_models(size, n_token, count):
    with torch.device("meta"):
        model = build(compose(f"model={size}").model, n_token=n_token)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_softmax_is_never_below_float32(precision, tokens):
    model = tiny_model().float()
    dtypes = []
    softmax = torch.softmax
    with torch.autocast("cpu", dtype=precision), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", lambda *a, **k: dtypes.append(softmax(*a, **k).dtype) or softmax(*a, **k))
        log_probs, _ = model(tokens)
    assert dtypes == [torch.float32] * 2
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, model(tokens)[0], rtol=0, atol=0.3)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    mem_len=st.integers(1, 12),
    same_length=st.booleans(),
    clamp_len=st.one_of(st.none(), st.integers(1, 6)),
)
def test_any_segmentation_equals_a_mask_by_hand(lengths, mem_len, same_length, clamp_len):
    """One layer, read in segments, against one query at a time over the keys it may see."""
    options = [f"model.same_length={same_length}", f"model.position.clamp_len={clamp_len or 'null'}"]
    model = tiny_model(f"model.memory.mem_len={mem_len}", "model.n_layer=1", *options)
    text = torch.randint(50, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    mems, parts, starts = None, [], []
    for segment in text.split(lengths, dim=1):
        starts += [sum(part.shape[1] for part in parts)] * segment.shape[1]
        log_probs, mems = model(segment, mems)
        parts.append(log_probs)
    embedded = model.softmax.embed(text)
    for i, log_probs in enumerate(torch.cat(parts, dim=1)[0]):
        first = max(0, i - mem_len + 1) if same_length else max(0, starts[i] - mem_len)
        encoding = model.layers[0].attention.position.encode(i - first + 1, embedded)
        hidden = model.layers[0](embedded[:, i : i + 1], embedded[:, first:i], encoding)
        torch.testing.assert_close(log_probs, model.softmax.log_prob(hidden)[0, 0], rtol=0, atol=1e-11)


def test_the_tile_is_no_part_of_the_result(tokens, monkeypatch):
    model = tiny_model()
    _, mems = model(tokens)
    whole, _ = model(tokens, mems)
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **k: attention(*a, **k, tile=5))
    torch.testing.assert_close(model(tokens, mems)[0], whole, rtol=0, atol=1e-12)


def test_tiny_overfit():
    """A few dozen tokens are learned by heart."""
    torch.manual_seed(0)
    model = build(compose(*TINY_MODEL, "model.d_model=32").model, n_token=50)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(3))
    for _ in range(120):
        nll, mems = model(text[:, :16], None, text[:, 1:17])
        more, _ = model(text[:, 16:-1], mems, text[:, 17:])
        loss = (nll.mean() + more.mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


BORDERS = {0: [3, 4, 11, 16], 1: [8, 21]}  # of each lane: where its documents begin


def document_marks():
    marks = torch.zeros(2, 24, dtype=torch.bool)
    for lane, places in BORDERS.items():
        marks[lane, places] = True
    return marks


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", mostly_slow([7, 1, 24, 4], fast=2))
def test_no_token_attends_across_the_border_of_a_document(variant, length, tokens):
    """Every document is read as if it stood alone, wherever its border falls: at a segment's start, inside, in the memory."""
    model = tiny_model("model.memory.mem_len=24", *VARIANTS[variant])
    mems, parts = None, []
    for segment, starts in zip(tokens.split(length, dim=1), document_marks().split(length, dim=1), strict=True):
        log_probs, mems = model(segment, mems, starts=starts)
        parts.append(log_probs)
    read = torch.cat(parts, dim=1)
    for lane, places in BORDERS.items():
        for start, stop in itertools.pairwise([0, *places, 24]):
            alone, _ = model(tokens[lane : lane + 1, start:stop])
            torch.testing.assert_close(read[lane, start:stop], alone[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("overrides", [["model.same_length=true"], [], ["model/memory=none"]])
def test_without_a_border_the_marks_change_nothing(overrides, tokens):
    memory = [] if "model/memory=none" in overrides else ["model.memory.mem_len=6"]
    model = tiny_model(*overrides, *memory)
    mems = marked_mems = None
    for segment in tokens.split(5, dim=1):
        plain, mems = model(segment, mems)
        marked, marked_mems = model(segment, marked_mems, starts=torch.zeros_like(segment, dtype=torch.bool))
        torch.testing.assert_close(marked, plain, rtol=0, atol=1e-12)
        assert all(map(torch.equal, mems, marked_mems))


def test_memory_of_an_ended_document_is_not_a_number_and_never_used_by_mistake(tokens):
    model = tiny_model()
    _, mems = model(tokens[:, :8], starts=document_marks()[:, :8])
    for memory in mems:
        assert memory[0].isnan().all(dim=1).tolist() == [True] * 4 + [False] * 4
        assert not memory[1].isnan().any()
    assert model(tokens[:, 8:], mems)[0][0].isnan().all()
    nll, mems = model(tokens[:, 8:], mems, tokens[:, 8:], starts=document_marks()[:, 8:])
    assert nll.isfinite().all()
    assert mems[0][0].isnan().any(dim=1).sum() == 16 - 8 and not mems[0][0, -8:].isnan().any()


def test_gradients_stay_inside_a_document():
    """With activation checkpointing, and dropout on the attention weights."""
    model = tiny_model("model.tie_weight=false", "model.activation_checkpointing=true", "model.dropatt=0.1").train()
    tokens, starts = torch.arange(24)[None], torch.zeros(1, 24, dtype=torch.bool)
    starts[0, 10] = True
    _, mems = model(tokens[:, :8], starts=starts[:, :8])
    nll, _ = model(tokens[:, 8:], mems, tokens[:, 8:], starts=starts[:, 8:])
    (gradient,) = torch.autograd.grad(nll[:, 2:].sum(), model.softmax.weight)
    assert gradient[10:24].abs().sum(dim=1).gt(0).all()
    assert not gradient[:10].any()
