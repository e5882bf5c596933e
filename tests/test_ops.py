import math
from functools import partial

import pytest
import torch
from conftest import held_at_most
from torch.nn import functional as F

from txl import ops, tiles


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


@pytest.mark.parametrize("reach", [None, 0, 3, 8])
@pytest.mark.parametrize("stair", [1, 2, 5])
def test_hidden_keys_by_hand(reach, stair):
    hidden = ops.hidden_keys(range(3, 9), range(2, 12), memory=4, reach=reach, stair=stair)
    for row, query in enumerate(range(3, 9)):
        for column, key in enumerate(range(2, 12)):
            oldest = -math.inf if reach is None else query // stair * stair - reach
            assert hidden[row, column] == (not oldest <= key - 4 <= query)


def parts_of_attention(i_len, memory, b=1, h=2, d=4, dtype=torch.float64):
    """Query, key, value, by_distance and r, which want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(h, b, i_len, d), (h, b, memory + i_len, d), (h, b, memory + i_len, d), (h, b, i_len, d)]
    parts = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parts.append(torch.randn(h, memory + i_len + 1, d, generator=generator, dtype=torch.float64))
    parts[0], parts[3] = parts[0] / 2, parts[3] / 2
    return [part.to(dtype).requires_grad_() for part in parts]


def plain_attention(query, key, value, by_distance=None, r=None, *, reach=None, stair=1, documents=None, factor=None):
    """The slow twin: all queries and keys at once, each r looked up by its distance."""
    i_len, j_len = query.shape[2], key.shape[2]
    memory = j_len - i_len
    scores = torch.einsum("hbid,hbjd->hbij", query, key)
    if r is not None:
        distance = memory + torch.arange(i_len)[:, None] - torch.arange(j_len)[None, :]
        row = (j_len - 1 - distance).clamp(max=j_len)
        scores = scores + torch.einsum("hbid,hijd->hbij", by_distance, r[:, row])
    hidden = ops.hidden_keys(range(i_len), range(j_len), memory=memory, reach=reach, stair=stair)
    if documents is not None:
        hidden = hidden | (documents[:, memory:, None] != documents[:, None, :])
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights if factor is None else weights * factor) @ value


def equal_with_gradients(ours, expected, parts, scale=None, **tolerance):
    """Results and the gradients of all parts, under random weights in the loss."""
    scale = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(ours.dtype)
    torch.testing.assert_close(ours, expected, **tolerance)
    found, right = (
        torch.autograd.grad((x * scale.to(x.dtype)).sum(), parts, retain_graph=True) for x in (ours, expected)
    )
    for gradient, expected_gradient in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, **tolerance)


EXACT = dict(rtol=1e-12, atol=1e-12)
RAGGED = [(1, 0), (1, 3), (1, 500), (7, 0), (7, 3), (7, 500), (129, 0), (129, 3), (129, 500)]
WINDOWS = {
    "causal": {},
    "same_length": {"reach": 40},
    "itself": {"reach": 0},
    "stair": {"reach": 6, "stair": 5},
    "wide_stair": {"reach": 300, "stair": 16},
    "no_memory": {"reach": 0, "stair": 7},
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("i_len", "memory"), RAGGED)
def test_attention_by_tiles_equals_the_plain_form(i_len, memory, window, keep):
    """Result and every gradient, with the weights kept or computed again, for tiles that do not divide the segment."""
    parts = parts_of_attention(i_len, memory)
    expected = plain_attention(*parts, **WINDOWS[window])
    for tile in (None, 13, 128):
        ours = ops.attention(*parts, **WINDOWS[window], keep=keep, tile=tile)
        equal_with_gradients(ours, expected, parts, **EXACT)


@pytest.mark.parametrize("keep", [True, False])
def test_attention_without_gradient_or_distances_or_for_many_documents(keep):
    parts = parts_of_attention(23, 11, b=3, h=3)
    with torch.no_grad():
        torch.testing.assert_close(ops.attention(*parts), plain_attention(*parts), **EXACT)
    equal_with_gradients(ops.attention(*parts[:3], keep=keep), plain_attention(*parts[:3]), parts[:3], **EXACT)
    documents = torch.tensor([[0] * 30 + [1] * 4, [-1] * 5 + [0] * 29, [0] * 12 + [1] * 2 + [2] * 20])
    for window in ({}, {"reach": 8}):
        ours = ops.attention(*parts, **window, documents=documents, keep=keep, tile=5)
        equal_with_gradients(ours, plain_attention(*parts, **window, documents=documents), parts, **EXACT)


@pytest.mark.parametrize("memory", [0, 3, 500])
@pytest.mark.parametrize("reach", [None, 0, 2, 40])
def test_attention_of_one_query_equals_the_plain_form(memory, reach):
    """Without gradients it goes its own way, also through buffers of which keys and values are slices."""
    parts = [part.detach() for part in parts_of_attention(1, memory, b=3)]
    documents = torch.randint(-1, 2, (3, memory + 1), generator=torch.Generator().manual_seed(1))
    parts[1:3] = [F.pad(part, (0, 0, 2, 3))[:, :, 2:-3] for part in parts[1:3]]
    with torch.no_grad():
        for given in (parts, parts[:3]):
            for numbers in (None, documents):
                ours = ops.attention(*given, reach=reach, documents=numbers)
                torch.testing.assert_close(ours, plain_attention(*given, reach=reach, documents=numbers), **EXACT)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("i_len", "memory"), [(129, 500), (200, 200)])
def test_attention_in_float32(i_len, memory, keep):
    """As near to the plain form in float64 as two parts in a million of the largest entry."""
    for window in WINDOWS.values():
        parts = parts_of_attention(i_len, memory, b=2, dtype=torch.float32)
        exact = [part.detach().double().requires_grad_() for part in parts]
        scale = torch.randn(2, 2, i_len, 4, generator=torch.Generator().manual_seed(3))
        ours, expected = ops.attention(*parts, **window, keep=keep), plain_attention(*exact, **window)
        found = [ours, *torch.autograd.grad((ours * scale).sum(), parts)]
        right = [expected, *torch.autograd.grad((expected * scale).sum(), exact)]
        for one, other in zip(found, right, strict=True):
            assert (one - other).abs().max() <= 2e-6 * other.abs().max()


def test_attention_under_autocast_takes_products_in_its_type_and_the_softmax_in_float32():
    parts = parts_of_attention(129, 60, dtype=torch.float32)
    expected = plain_attention(*parts)
    for keep in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            ours = ops.attention(*parts, keep=keep)
        assert ours.dtype == torch.bfloat16 and all(x.dtype != torch.float32 for x in ours.grad_fn.saved_tensors[:5])
        equal_with_gradients(ours.float(), expected, parts, rtol=0.1, atol=0.1)


def test_kept_and_recomputed_attention_drop_the_same_weights():
    parts = parts_of_attention(70, 60, b=2)
    results = []
    for keep in (True, False):
        torch.manual_seed(5)
        ours = ops.attention(*parts, dropatt=0.3, keep=keep, tile=16)
        results.append([ours, *torch.autograd.grad(ours.square().sum(), parts)])
    for kept, again in zip(*results, strict=True):
        torch.testing.assert_close(kept, again, **EXACT)
    assert not torch.equal(results[0][0], ops.attention(*parts, dropatt=0.3))


@pytest.mark.parametrize("keep", [True, False])
def test_dropped_attention_equals_the_plain_form_with_the_same_weights_dropped(keep):
    """The factors are read off the result itself: values that are unit vectors show the weights."""
    query, key, _, by_distance, r = parts_of_attention(9, 4)
    unit = torch.eye(13, dtype=torch.float64).expand(2, 1, 13, 13)
    query, key, by_distance, r = (F.pad(x, (0, 9)).detach().requires_grad_() for x in (query, key, by_distance, r))
    parts = [query, key, unit.clone().requires_grad_(), by_distance, r]
    ours = ops.attention(*parts, dropatt=0.4, keep=keep, tile=4)
    factor = (ours != 0).double() / 0.6
    assert 20 < (factor == 0).sum() - 2 * 36 < 160
    equal_with_gradients(ours, plain_attention(*parts, factor=factor), parts, **EXACT)


def test_attention_dropout_falls_on_the_weights():
    """With one key in sight its weight is 1: dropped to 0 or scaled to 1 / (1 - p)."""
    ones = torch.ones(1, 1, 400, 1)
    out = ops.attention(ones, ones, ones, reach=0, dropatt=0.5)
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert 100 < (out == 0).sum() < 300


def backward_through(parts, keep):
    ops.attention(*parts, keep=keep, tile=16).sum().backward()


def test_recomputed_attention_holds_nothing_of_queries_times_keys():
    """Twice the segment, twice the memory; the form that keeps the weights takes four times as much."""
    peaks = {}
    for keep in (True, False):
        for length in (512, 1024):
            parts = parts_of_attention(length, length, dtype=torch.float32)
            peaks[keep, length] = held_at_most(partial(backward_through, parts, keep))
    assert peaks[False, 1024] / peaks[False, 512] < 2.2
    assert peaks[True, 1024] / peaks[True, 512] > 3


def test_the_form_follows_from_the_sizes(monkeypatch):
    parts = parts_of_attention(20, 12)
    assert tiles.Tiles(*parts, None, None, 1, 0.0, 20).size == 2 * 20 * 32

    def kept():
        return len(ops.attention(*parts, tile=20).grad_fn.saved_tensors) > 6

    monkeypatch.setattr(tiles, "KEPT_SCORES", 2 * 20 * 32)
    assert kept()
    monkeypatch.setattr(tiles, "KEPT_SCORES", 2 * 20 * 32 - 1)
    assert not kept()


def test_tiles_touch_the_keys_in_their_window_only():
    """With same_length the scores grow with the window, not with the memory."""

    def size(memory):
        query, key = torch.empty(1, 1, 256, 4), torch.empty(1, 1, memory + 256, 4)
        return tiles.Tiles(query, key, key, None, None, None, 99, 1, 0.0, 64).size

    assert size(5000) == size(100) == 4 * 64 * (64 + 99)
