import math

import pytest
import torch

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
