"""Every scheme against its equation, computed key by key; and what a memory does with it."""

import math

import pytest
import torch
from conftest import TINY_MODEL, compose, tiny_model

from txl import ops
from txl.config import build, check
from txl.layers.position import ALiBiPosition, alibi_slopes

BY_DISTANCE = ["relative", "shaw", "rotary", "alibi"]
SCHEMES = [*BY_DISTANCE, "absolute", "absolute_per_layer"]


def model_with(position, *overrides, **kwargs):
    rows = ["model.position.max_klen=11"] if position in ("shaw", "absolute_per_layer") else []
    return tiny_model(f"model/position={position}", *rows, *overrides, **kwargs)


def sinusoid(place, width):
    frequencies = [10000 ** (-2 * k / width) for k in range(width // 2)]
    return torch.tensor([f(place * w) for f in (math.sin, math.cos) for w in frequencies], dtype=torch.float64)


def turn(row, place):
    """The pairs (c, c + width / 2), each turned by its own angle."""
    half, turned = len(row) // 2, row.clone()
    for c in range(half):
        angle = place * 10000 ** (-c / half)
        turned[c] = math.cos(angle) * row[c] - math.sin(angle) * row[c + half]
        turned[c + half] = math.sin(angle) * row[c] + math.cos(angle) * row[c + half]
    return turned


def slow_logit(name, scheme, head, q, k, i, j, memory):
    """The equation in the docstring of the scheme, for one query and one key."""
    distance = memory + i - j
    if name == "relative":
        r = (scheme.r_net.weight @ sinusoid(min(distance, scheme.clamp_len or distance), 16)).view(2, 8)[head]
        return (q + scheme.r_w_bias[head]) @ k + (q + scheme.r_r_bias[head]) @ r
    if name == "shaw":
        row = 10 - min(distance, 10, scheme.clamp_len or 10)
        return (q + scheme.r_w_bias[head]) @ k + q @ scheme.r_emb[row, head] + scheme.r_bias[row, head]
    if name == "rotary":
        return turn(q, memory + i) @ turn(k, j)
    if name == "alibi":
        return q @ k - math.sqrt(8) * 2 ** (-8 * (head + 1) / 2) * min(distance, scheme.clamp_len or distance)
    return q @ k


@pytest.mark.parametrize("clamp", [None, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_attention_is_the_schemes_equation(name, clamp):
    if clamp and name not in ("relative", "shaw", "alibi"):
        with pytest.raises(ValueError, match="clamp_len"):
            check(compose(f"model/position={name}", f"+model.position.clamp_len={clamp}"))
        return
    model = model_with(name, *([f"model.position.clamp_len={clamp}"] if clamp else []))
    attention, scheme = model.layers[0].attention, model.position
    rows, memory, n = torch.randn(1, 12, 16, dtype=torch.float64), 7, 5
    r = scheme.project(scheme.encode(12, rows))
    found = attention(rows[:, memory:], attention.keys_values(rows), r)
    q, (k, v) = attention.queries(rows[:, memory:]), attention.keys_values(rows)
    expected = torch.zeros(n, 16, dtype=torch.float64)
    for head in range(2):
        for i in range(n):
            seen = range(memory + i + 1)
            pairs = [slow_logit(name, scheme, head, q[head, 0, i], k[head, 0, j], i, j, memory) for j in seen]
            weights = (torch.stack(pairs) / math.sqrt(8)).softmax(0)
            expected[i, head * 8 : head * 8 + 8] = sum(weight * v[head, 0, j] for j, weight in enumerate(weights))
    torch.testing.assert_close(found[0], expected @ attention.o_net.weight.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_terms_add_up_to_the_logits(name):
    model = model_with(name)
    attention, scheme = model.layers[0].attention, model.position
    rows = torch.randn(2, 12, 16, dtype=torch.float64)
    r = scheme.project(scheme.encode(12, rows))
    q, (k, v) = attention.queries(rows[:, 7:]), attention.keys_values(rows)
    terms = scheme.terms(q, k, r)
    names = {"relative": "abcd", "shaw": "abcd", "alibi": "ad"}
    assert "".join(terms) == names.get(name, "a")
    hidden = ops.hidden_keys(range(5), range(12), memory=7, reach=None)
    weights = sum(terms.values()).masked_fill(hidden, -math.inf).softmax(-1)
    attended = (weights @ v).permute(1, 2, 0, 3).flatten(2)
    found = attention(rows[:, 7:], attention.keys_values(rows), r)
    torch.testing.assert_close(found, attention.o_net(attended), rtol=0, atol=1e-11)


@pytest.mark.parametrize("norm", ["false", "true"])
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_reading_in_segments_equals_reading_whole(name, norm, tokens):
    model = model_with(name, f"model.pre_norm={norm}", "model.memory.mem_len=24")
    assert model.keys_last
    whole, _ = model(tokens)
    for length in (1, 4, 7):
        mems, parts = None, []
        for segment in tokens.split(length, dim=1):
            log_probs, mems = model(segment, mems)
            parts.append(log_probs)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_a_document_is_read_as_if_alone(name, tokens):
    model = model_with(name, "model.memory.mem_len=24")
    starts = torch.zeros(2, 24, dtype=torch.bool)
    starts[:, 9] = True
    mems, parts = None, []
    for segment, marks in zip(tokens.split(6, dim=1), starts.split(6, dim=1), strict=True):
        log_probs, mems = model(segment, mems, starts=marks)
        parts.append(log_probs)
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, 9:], model(tokens[:, 9:])[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("memory", ["segment", "compressive"])
@pytest.mark.parametrize("name", SCHEMES)
def test_nobodys_memory_is_changed_in_place(name, memory, tokens):
    model = model_with(name, f"model/memory={memory}")
    mems = None
    for segment in tokens.split(8, dim=1):
        before = None if mems is None else [one.clone() for one in mems]
        kept = mems
        _, mems = model(segment, mems)
        assert kept is None or all(map(torch.equal, kept, before))


def keys_of(model, monkeypatch, tokens, mems):
    """The rows of memory and segment that the first layer projects to keys and values."""
    attention, seen = model.layers[0].attention, []
    project = type(attention).keys_values
    monkeypatch.setattr(attention, "keys_values", lambda rows: (seen.append(rows.clone()), project(attention, rows))[1])
    model(tokens, mems)
    return torch.cat(seen, dim=1)


def test_absolute_positions_are_added_once_and_stay_in_the_memory(tokens, monkeypatch):
    """What is kept holds the place in its own segment, whole or not; it is not added again, nor moved."""
    model = model_with("absolute")
    places = torch.stack([sinusoid(5 - i, 16) for i in range(6)])
    first, second = (model.softmax.embed(tokens[:, part]) + places for part in (slice(0, 6), slice(6, 12)))
    _, mems = model(tokens[:, :6])
    torch.testing.assert_close(mems[0], first, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        keys_of(model, monkeypatch, tokens[:, 6:12], mems), torch.cat([first, second], dim=1), rtol=0, atol=1e-12
    )


def test_a_layers_vectors_are_added_to_each_row_once_for_the_place_that_it_has_now(tokens, monkeypatch):
    model = model_with("absolute_per_layer")
    table, embed = model.position.r_emb, model.softmax.embed
    mems = None
    for segment in tokens.split(6, dim=1)[:3]:
        _, mems = model(segment, mems)
    torch.testing.assert_close(mems[0], embed(tokens[:, 2:18]), rtol=0, atol=1e-12)  # without any of them
    row = [table[10 - min(21 - j, 10)] for j in range(22)]  # 16 of memory, 6 of segment; 11 vectors
    expected = embed(tokens[:, 2:24]) + torch.stack(row)
    torch.testing.assert_close(keys_of(model, monkeypatch, tokens[:, 18:], mems), expected, rtol=0, atol=1e-12)


def test_absolute_schemes_depend_on_where_segments_begin(tokens):
    for name in ("absolute", "absolute_per_layer"):
        model = model_with(name, "model.memory.mem_len=24")
        assert not model.keys_last
        _, mems = model(tokens[:, :12])
        assert not torch.allclose(model(tokens[:, 12:], mems)[0], model(tokens)[0][:, 12:])


def test_slopes_are_those_of_the_paper():
    assert alibi_slopes(8) == [2.0**-head for head in range(1, 9)]
    assert alibi_slopes(2) == [2.0**-4, 2.0**-8]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]  # two heads', then the first of four heads'
    assert len({*alibi_slopes(12)}) == 12


def test_a_vector_of_its_own_for_no_more_than_max_klen_distances(tokens):
    """Two texts that differ in places alone: beyond the table every distance is the last one's."""
    model = model_with("shaw", "model.memory.mem_len=24")
    project = model.position.project
    r = project(model.position.encode(20, torch.zeros(1)))
    assert torch.equal(r[:, 0], r[:, 9]) and not torch.equal(r[:, 9], r[:, 10])
    model.position.clamp_len = 3
    r = project(model.position.encode(20, torch.zeros(1)))
    assert torch.equal(r[:, 0], r[:, 16]) and not torch.equal(r[:, 16], r[:, 17])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model/position=shaw", "model.position.max_klen=0"], "model.position.max_klen"),
        (["model/position=absolute_per_layer", "model.position.max_klen=0"], "model.position.max_klen"),
        (["model/position=shaw", "model.position.clamp_len=0"], "model.position.clamp_len"),
        (["model/position=alibi", "model.position.clamp_len=0"], "model.position.clamp_len"),
        (["model/position=rotary", "model.d_head=7"], "model.d_head"),
        (["model/position=absolute", "model.d_model=15"], "model.d_model"),
        *[([f"model/position={name}", "model.untie_r=true"], "model.untie_r") for name in SCHEMES[1:]],
    ],
)
def test_what_a_scheme_refuses_is_named(overrides, key):
    with pytest.raises(ValueError, match=f"^{key}: "):
        build(compose(*TINY_MODEL, *overrides).model, n_token=50)


def test_every_scheme_learns_to_copy(tokens):
    """Absolute positions and a memory once stood still in other code; a few updates must lower the loss for each."""
    for name in SCHEMES:
        torch.manual_seed(0)
        model = build(compose(*TINY_MODEL, f"model/position={name}", "model.memory.mem_len=8").model, n_token=50)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(60):
            _, mems = model(tokens[:, :8])
            nll, _ = model(tokens[:, 8:16], mems, tokens[:, 9:17])
            optimizer.zero_grad()
            nll.mean().backward()
            optimizer.step()
            losses.append(nll.mean().item())
        assert losses[-1] < 0.3 < losses[0], (name, losses[-1])


def test_distances_of_alibi_survive_half_precision():
    scheme = ALiBiPosition(n_head=2, d_head=8, d_model=16)
    assert torch.equal(
        scheme.encode(200, torch.zeros(1, dtype=torch.bfloat16))[:, 0].float(), torch.arange(199.0, -2, -1)
    )
