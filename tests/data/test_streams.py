import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from txl.data.streams import Lanes, scoring_segments


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 60))
def test_lanes_are_contiguous_and_read_in_order(batch_size, tgt_len, extra):
    tokens = np.arange(batch_size * tgt_len + 1 + extra, dtype=np.int32)
    lanes = Lanes(tokens, batch_size=batch_size, tgt_len=tgt_len)
    lane_len = (len(tokens) - 1) // batch_size
    segments, seen = [next(lanes)], 0
    while not (following := next(lanes)).begins:
        segments.append(following)
    assert segments[0].begins and not any(segment.begins for segment in segments[1:])
    assert all(segment.tokens.shape[1] == tgt_len for segment in segments[:-1])
    inputs = torch.cat([segment.tokens for segment in segments], dim=1)
    targets = torch.cat([segment.targets for segment in segments], dim=1)
    for lane in range(batch_size):
        expected = tokens[lane * lane_len : (lane + 1) * lane_len + 1].tolist()
        assert inputs[lane].tolist() == expected[:-1]
        assert targets[lane].tolist() == expected[1:]
        seen += len(targets[lane])
    assert len(tokens) - 1 - seen < batch_size
    assert torch.equal(following.tokens, segments[0].tokens)


def test_the_position_can_be_saved_and_set():
    tokens = np.arange(100)
    lanes = Lanes(tokens, batch_size=3, tgt_len=5)
    for _ in range(15):
        state = lanes.state_dict()
        expected = [segment.tokens for segment in itertools.islice(lanes, 8)]
        other = Lanes(tokens, batch_size=3, tgt_len=5)
        other.load_state_dict(state)
        assert all(map(torch.equal, [segment.tokens for segment in itertools.islice(other, 8)], expected))
        lanes.load_state_dict(state)
        next(lanes)


def test_a_position_in_other_lanes_is_refused():
    state = Lanes(np.arange(100), batch_size=3, tgt_len=5).state_dict()
    with pytest.raises(ValueError, match="resume: batch_size or data changed"):
        Lanes(np.arange(100), batch_size=4, tgt_len=5).load_state_dict(state)


@pytest.mark.parametrize("n_token", [0, 1, 2, 3, 11, 12])
def test_a_split_too_short_for_one_segment_a_lane_is_refused(n_token):
    """The authors' code loops for ever there."""
    with pytest.raises(ValueError, match=rf"{n_token} tokens .*batch_size=3 .*tgt_len=4; that takes at least 13"):
        Lanes(np.arange(n_token), batch_size=3, tgt_len=4)
    assert next(Lanes(np.arange(13), batch_size=3, tgt_len=4)).tokens.shape == (3, 4)


@given(st.integers(2, 70), st.integers(1, 12), st.integers(1, 20))
def test_every_token_but_the_first_is_scored_exactly_once(n_token, batch_size, tgt_len):
    tokens = np.arange(n_token, dtype=np.uint8)
    scored = []
    for segment in scoring_segments(tokens, batch_size=batch_size, tgt_len=tgt_len):
        pairs = zip(segment.tokens[segment.scored].tolist(), segment.targets[segment.scored].tolist(), strict=True)
        for before, target in pairs:
            assert target == before + 1
            scored.append(target)
    assert sorted(scored) == list(range(1, n_token))
