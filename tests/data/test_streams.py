import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from txl.data.encoding import Split
from txl.data.streams import Lanes, Prefetched, ScoredLane, ShuffledDocuments, scoring_segments
from txl.data.vocab import Bytes, Words


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


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_prefetched_lanes_are_the_lanes(shuffle_seed):
    """Segment by segment through three passes, and from every place that was saved."""
    split = Split.of("train", TEXT, Bytes(), separator=b"|", resets=True)

    def lanes():
        return Lanes.of(split, batch_size=2, tgt_len=4, shuffle_seed=shuffle_seed)

    def same(one, other):
        equal = [torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "targets", "starts")]
        return all(equal) and one.begins == other.begins

    plain, ahead, states = lanes(), Prefetched(lanes(), pin=False), []
    for _ in range(3 * len(TEXT) // 8):
        assert ahead.state_dict() == plain.state_dict()
        states.append(plain.state_dict())
        assert same(next(ahead), next(plain))
    for state in states:
        plain.load_state_dict(state)
        ahead.load_state_dict(state)
        assert all(same(next(ahead), next(plain)) for _ in range(5))


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


def test_lanes_of_an_evaluation_are_read_side_by_side():
    """The tokens of a lane that is being warmed, or has ended, are read and not scored; zeros stand beyond the text."""
    lanes = [ScoredLane(0, 0, 6), ScoredLane(3, 6, 9)]
    first, second = scoring_segments(np.arange(10), lanes, length=4, borders=np.array([0, 4]))
    assert first.tokens.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]] and first.targets.tolist() == [
        [1, 2, 3, 4],
        [4, 5, 6, 7],
    ]
    assert first.scored.tolist() == [[True] * 4, [False] * 3 + [True]]
    assert first.starts.tolist() == [[True, False, False, False], [False, True, False, False]]
    assert second.tokens.tolist() == [[4, 5], [7, 8]] and second.targets.tolist() == [[5, 6], [8, 9]]
    assert second.scored.all()
    (whole,) = scoring_segments(np.arange(10), [ScoredLane(0, 0, 9), ScoredLane(7, 8, 9)], length=9)
    assert (
        whole.tokens[1].tolist() == [7, 8, 9, 0, 0, 0, 0, 0, 0] and whole.scored[1].sum() == 1 and whole.starts is None
    )


SENTENCES = b"a b c\nb\n\nc a c b\n a\nd e f g h\nlast"


def authors_stream(text, vocab):
    """Inputs and targets as the authors chain sentences: of <S> words <S> all but the last, and all but the first."""
    for line in text.decode().split("\n"):
        sentence = [vocab.words.index(word) for word in ["<S>", *line.split(), "<S>"]]
        yield from itertools.pairwise(sentence)


@pytest.mark.parametrize("tgt_len", [1, 4, 22])
def test_sentences_are_chained_as_the_authors_do(tgt_len):
    vocab = Words(eos="<S>", eos_first=True).fit([SENTENCES])
    split = Split.of("train", SENTENCES, vocab, separator=b"\n")
    lanes = Lanes(split.tokens, batch_size=1, tgt_len=tgt_len)
    expected, found = list(authors_stream(SENTENCES, vocab)), []
    while len(found) < len(expected):
        segment = next(lanes)
        found += zip(segment.tokens[0].tolist(), segment.targets[0].tolist(), strict=True)
    assert found == expected and next(lanes).begins
    assert [vocab.words[token] for token in split.tokens[split.starts]] == ["<S>"] * 7


DOCUMENTS = st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(sum)


@given(DOCUMENTS, st.integers(0, 3), st.integers(0, 3), st.data())
def test_each_pass_is_another_order_of_whole_documents(lengths, seed, epoch, data):
    """Which nothing but seed and pass determine; a document without a token does no harm."""
    n, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
    tokens = np.arange(n, dtype=np.int32)
    shuffled = ShuffledDocuments(tokens, starts, seed=seed)
    assert len(shuffled) == n
    for earlier in data.draw(st.lists(st.integers(0, 3))):  # whatever was read before
        shuffled.shuffle(earlier)
    shuffled.shuffle(epoch)
    whole = shuffled[0:n]
    documents = [document.tolist() for document in np.split(whole, shuffled.starts[1:])]
    assert sorted(filter(None, documents)) == [part.tolist() for part in np.split(tokens, starts[1:]) if len(part)]
    start, stop = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 3))
    assert shuffled[start:stop].tolist() == whole[start:stop].tolist()
    other = ShuffledDocuments(tokens, starts, seed=seed)
    other.shuffle(epoch)
    assert np.array_equal(other[0:n], whole)


def test_passes_and_seeds_differ():
    tokens, orders = np.arange(40), set()
    for seed, epoch in itertools.product(range(3), range(3)):
        shuffled = ShuffledDocuments(tokens, np.arange(0, 40, 2), seed=seed)
        shuffled.shuffle(epoch)
        orders.add(tuple(shuffled[0:40].tolist()))
    assert len(orders) == 9


TEXT = b"one|two and|three, the longest|||four|five|6|seven|8|nine|ten|eleven|"


def lanes_of(batch_size=2, tgt_len=5, seed=3, resets=True):
    split = Split.of("train", TEXT, Bytes(), separator=b"|", resets=resets)
    return Lanes.of(split, batch_size=batch_size, tgt_len=tgt_len, shuffle_seed=seed)


def rows(segment):
    parts = (segment.tokens, segment.targets, segment.starts)
    return [segment.begins, *(None if part is None else part.tolist() for part in parts)]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("resets", [False, True])
def test_shuffled_lanes_go_on_from_any_place_of_any_pass(seed, resets):
    lanes = lanes_of(seed=seed, resets=resets)
    for _ in range(30):
        state = lanes.state_dict()
        expected = [rows(segment) for segment in itertools.islice(lanes, 10)]
        for other in (lanes_of(seed=seed, resets=resets), lanes):
            other.load_state_dict(state)
            assert [rows(segment) for segment in itertools.islice(other, 10)] == expected
        lanes.load_state_dict(state)
        next(lanes)
    assert lanes.state_dict()["epoch"] >= 3


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_first_tokens_of_documents_are_marked(batch_size, seed):
    """A token is marked where a separator stands before it, or nothing: also at the borders of segments and lanes."""
    lanes, n = lanes_of(batch_size=batch_size, seed=seed), len(TEXT)
    for _ in range(40):
        whole, place = np.array(lanes.tokens[0:n]), lanes.position
        segment = next(lanes)
        marks = by_hand(whole, [lane * lanes.lane_len + place for lane in range(batch_size)], segment.tokens.shape[1])
        assert segment.starts.tolist() == marks
    assert next(lanes_of(resets=False)).starts is None


def by_hand(whole, places, length):
    return [
        [place == 0 or whole[min(place, len(whole)) - 1] == ord("|") for place in range(start, start + length)]
        for start in places
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("tgt_len", [1, 4, 50])
def test_the_first_tokens_of_scored_documents_are_marked(batch_size, tgt_len):
    split = Split.of("test", TEXT, Bytes(), separator=b"|", resets=True)
    n_target, offset = len(TEXT) - 1, 0
    lane_len = -(-n_target // batch_size)
    lanes = [ScoredLane(start, start, min(start + lane_len, n_target)) for start in range(0, n_target, lane_len)]
    for segment in scoring_segments(split.tokens, lanes, length=tgt_len, borders=split.borders):
        length = segment.scored.shape[1]
        marks = by_hand(split.tokens, [lane.begin + offset for lane in lanes], length)
        for found, expected, scored in zip(segment.starts.tolist(), marks, segment.scored.tolist(), strict=True):
            assert list(itertools.compress(found, scored)) == list(itertools.compress(expected, scored))
        offset += length
    plain = Split.of("test", TEXT, Bytes(), separator=b"|")
    assert next(scoring_segments(plain.tokens, lanes, length=4, borders=plain.borders)).starts is None
