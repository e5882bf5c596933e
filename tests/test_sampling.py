"""How tokens are drawn, and where their text ends."""

import math
import re

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from txl import generation
from txl.generation import Sampling, Until, pieces, sample_seed

LOG_PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()


def frequencies(n=4000, **settings):
    sampling, generator = Sampling(**settings), torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(n):
        counts[sampling.draw(LOG_PROBS, generator)] += 1
    return (counts / n).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 99}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_sampling_draws_from_the_distribution_it_names(settings, expected):
    found = frequencies(**settings)
    assert found == pytest.approx(expected, abs=0.03)
    assert [one == 0 for one in found] == [one == 0 for one in expected]


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_temperature_below_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature: must be at least 0"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1.01, math.nan])
def test_top_p_outside_its_range_is_refused(top_p):
    with pytest.raises(ValueError, match=r"top_p: must lie in \(0, 1\]"):
        Sampling(top_p=top_p)


@pytest.mark.parametrize("top_k", [0, -3])
def test_top_k_below_one_is_refused(top_k):
    with pytest.raises(ValueError, match="top_k: must be at least 1"):
        Sampling(top_k=top_k)


SCRAPS = st.text("ab.", max_size=4).map(str.encode)  # few letters, so that stop texts overlap


@given(st.lists(SCRAPS), st.lists(SCRAPS.filter(len), max_size=3))
def test_until_ends_before_the_first_stop_text_to_begin(pieces, stops):
    """However the text is cut into pieces; stop texts that overlap, or hold one another, too."""
    whole, until = b"".join(pieces), Until(stops)
    expected = re.split(b"|".join(map(re.escape, stops)), whole)[0] if stops else whole
    fed = b"".join(map(until.feed, pieces))
    assert expected.startswith(fed) and fed + until.finish() == expected
    assert until.feed(b"more") == b"" == until.finish()


def test_until_holds_back_no_more_than_it_must():
    until = Until([b"bx"])
    assert [until.feed(piece) for piece in (b"a", b"b", b"c", b"d")] == [b"a", b"", b"bc", b"d"]
    until = Until([b"abcd", b"bc"])
    assert [until.feed(piece) for piece in (b"xa", b"b", b"c", b"d")] == [b"x", b"", b"", b""] and until.ended
    until = Until([b"abcd", b"bc"])
    assert until.feed(b"xabc") == b"x" and until.finish() == b"a"
    until = Until([b"abcd", b"bc"])
    assert [until.feed(piece) for piece in (b"xab", b"cy")] == [b"x", b"a"] and until.ended


def test_pieces_of_several_texts_end_one_by_one():
    """Each before its stop text or with the last token, and nothing is made after all have ended."""

    class Fixed(generation.Texts):
        def __init__(self, rows):
            self.rows, self.place = torch.tensor(rows), 0

        @property
        def log_probs(self):
            return torch.nn.functional.one_hot(self.rows[:, self.place], 128).double().log()

        def extend(self, rows):
            assert rows == self.rows[:, self.place, None].tolist()
            self.place += 1

    def texts_of(*rows, stop, tokens=6):
        texts, found, ended = Fixed([list(row) for row in rows]), [b""] * len(rows), []
        seeds, stops = [sample_seed(0, 0)] * len(rows), [stop] if stop else []
        made = pieces(texts, Sampling(max_new_tokens=tokens), seeds, decode=bytes, stops=stops)
        for row, piece, _ in made:
            found[row] += piece or b""
            ended += [row] * (piece is None)
        return found, ended, texts.place

    assert texts_of(b"abXcde", b"aXbcde", b"abcdeX", stop=b"X") == ([b"ab", b"a", b"abcde"], [1, 0, 2], 5)
    assert texts_of(b"aXbcde", b"abXcde", stop=b"X") == ([b"a", b"ab"], [0, 1], 2)
    assert texts_of(b"abcdef", b"abcdeX", stop=b"XY") == ([b"abcdef", b"abcdeX"], [0, 1], 5)
    assert texts_of(b"abcdef", stop=None, tokens=3) == ([b"abc"], [0], 2)


def test_each_byte_has_the_nll_of_its_token():
    """The model's own, whatever the temperature; also where text was held back, as it may have begun a stop text."""
    texts = generation.Reader(tiny_model(), context=8).begin([torch.tensor([1])])
    spelled, drawn = {}, []

    def decode(tokens):
        drawn.append(-float(texts.log_probs[0, tokens[0]]))
        spelled[tokens[0]] = b"ab" * (1 + len(spelled) % 2)
        return spelled[tokens[0]]

    made = list(pieces(texts, Sampling(max_new_tokens=9), [sample_seed(0, 0)], decode=decode, stops=[b"abx", b"bax"]))
    text = b"".join(piece for _, piece, _ in made if piece is not None)
    losses = [loss for _, piece, part in made for loss in part]
    assert all(len(part) == len(piece or b"") for _, piece, part in made) and len(losses) == len(text) > 18
    assert sorted(set(losses)) == sorted(set(drawn)) and losses[0] == losses[1] == drawn[0] and losses[-1] == drawn[-1]
