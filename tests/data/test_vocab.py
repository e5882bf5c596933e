import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scraps import NASTY, SCRAPPY, SCRAPS, TRAINING, learned_bpe, split_in_pieces

from txl.data.vocab import BPE, Bytes, Characters, Words, fingerprint, from_state


@pytest.fixture(scope="module")
def bpe():
    return learned_bpe()


def learned(kind, bpe, text):
    return bpe if kind is BPE else kind().fit([text + b"x"])


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("kind", [Bytes, Characters, BPE])
def test_encode_then_decode_gives_the_text_back(kind, text, bpe):
    vocab = learned(kind, bpe, text)
    tokens = vocab.encode(text)
    assert vocab.decode(tokens) == text
    assert vocab.sizes(text).tolist() == [len(vocab.decode([token])) for token in tokens]
    assert vocab.unknown(text) == []


@pytest.mark.parametrize("kind", [Bytes, Characters, BPE])
@given(text=st.binary(max_size=60) | SCRAPPY, size=st.integers(1, 9))
def test_the_text_comes_back_whatever_the_pieces(kind, text, size, bpe):
    vocab = learned(kind, bpe, text)
    split = split_in_pieces(text, vocab, size)
    assert vocab.decode(split.tokens) == text
    if kind is not BPE:  # whose tokens are those of the whole text where a piece ends between two ASCII words
        assert split.tokens.tolist() == vocab.encode(text).tolist()
        pieces = [text[start : start + size] for start in range(0, len(text), size)] if kind is Bytes else [text]
        assert kind().fit([*pieces, b"x"]).state() == vocab.state()


@given(
    words=st.lists(st.sampled_from(["the", "cat", "a1", "new york", "12", "Dog"]), min_size=1), size=st.integers(1, 12)
)
def test_bpe_of_ascii_words_is_the_same_whatever_the_pieces(words, size, bpe):
    text = " ".join(words).encode()
    assert split_in_pieces(text, bpe, size).tokens.tolist() == bpe.encode(text).tolist()


def every_vocabulary(bpe):
    yield from (Bytes(), Bytes(newlines=False), Characters().fit(SCRAPS), bpe)
    for options in ({}, {"eos": None}, {"eos_first": True}, {"lower_case": True}):
        yield Words(**options).fit([b"a b B <unk>"])


@given(text=SCRAPPY, separator=st.sampled_from([None, b"\n", b"a", b" B"]), size=st.integers(1, 9), data=st.data())
def test_bytes_of_tokens_add_up(text, separator, size, data, bpe):
    """Also where newlines are no token; a text that has no token at all is nobody's."""
    for vocab in every_vocabulary(bpe):
        split = split_in_pieces(text, vocab, size, separator=separator)
        n = len(split.tokens)
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        dropped = text.count(b"\n") if vocab.state().get("newlines") is False else 0
        assert split.count_bytes(0, n) == (len(text) - dropped if n else 0)
        assert sum(split.count_bytes(*pair) for pair in ((0, start), (start, stop), (stop, n))) == split.count_bytes(
            0, n
        )
        assert split.count_bytes(start, stop) >= 0
        assert len(vocab.sizes(text)) == len(vocab.encode(text))


def test_bytes_are_counted_token_by_token(bpe):
    text = TRAINING + "naïve ".encode()
    for vocab in (Characters().fit([text]), bpe):
        split = split_in_pieces(text, vocab, 50)
        for start in range(0, len(split.tokens) - 3, 7):
            assert split.count_bytes(start, start + 3) == len(vocab.decode(split.tokens[start : start + 3]))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_characters_lose_nothing_but_the_unknown(training, text):
    vocab = Characters().fit([training + b"x"])
    tokens = vocab.encode(text)
    assert ((tokens >= 0) & (tokens < vocab.n_token)).all()
    unknown = vocab.unknown(text)
    assert (0 in tokens) == bool(unknown)
    if not unknown:
        assert vocab.decode(tokens) == text


def test_unknown_characters_are_one_token():
    vocab = Characters().fit([b"abc"])
    assert vocab.n_token == 4
    assert vocab.encode(b"abzc").tolist() == [1, 2, 0, 3]
    assert vocab.decode([1, 0]) == "a\ufffd".encode()
    assert vocab.unknown("zéa".encode()) == ["z", "é"]


def test_every_byte_is_a_token():
    everything = bytes(range(256))
    assert Bytes().encode(everything).tolist() == list(range(256))
    assert Bytes().n_token == 256
    assert Bytes().decode(np.arange(256)) == everything


def test_only_the_bytes_seen():
    vocab = Bytes(only_seen=True).fit([b"ca\n", b"ab"])
    assert (vocab.n_token, vocab.encode(b"abc\n").tolist(), vocab.decode([1, 0])) == (4, [1, 2, 3, 0], b"a\n")
    with pytest.raises(ValueError, match=r"^data\.vocab\.only_seen: training showed no byte 'z'; false takes all"):
        vocab.encode(b"abz")
    assert vocab.unknown(b"zab!") == ["!", "z"]
    without = Bytes(only_seen=True, newlines=False).fit([b"ca\n", b"ab"])
    assert (without.n_token, without.encode(b"a\nb\n").tolist()) == (3, [0, 1])


# States.


def fitted(bpe):
    yield from (Bytes(), Bytes(only_seen=True).fit([b"abc"]), Bytes(newlines=False), Characters().fit(NASTY), bpe)
    yield Words(min_freq=2, lower_case=True, unknown=None, eos_first=True).fit([b"a B a b \xff\xff"])


def test_a_state_is_json_and_makes_the_same_vocabulary_again(bpe):
    for vocab in fitted(bpe):
        again = from_state(json.loads(json.dumps(vocab.state())))
        text = b"cab" if vocab.n_token < 256 else b"".join(NASTY)
        text = text if not isinstance(vocab, Words) else b"A b\n"
        assert type(again) is type(vocab) and again.n_token == vocab.n_token
        assert again.encode(text).tolist() == vocab.encode(text).tolist()
        assert again.decode(range(vocab.n_token)) == vocab.decode(range(vocab.n_token))
        assert fingerprint(again) == fingerprint(vocab)
    assert len({fingerprint(vocab) for vocab in fitted(bpe)}) == len(list(fitted(bpe)))


WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    math.nan,
    "",
    "aa",
    "\ud800",
    "\udcff\n\n",
    [],
    [1, 1],
    [300],
    [[1]],
    [1.5],
    {},
    {"a": {}},
]


def test_a_crafted_state_is_refused_or_works(bpe):
    """Whatever a stranger puts into a checkpoint: a ValueError that names the checkpoint, or a vocabulary."""
    refused = 0
    for vocab in fitted(bpe):
        state = vocab.state() | ({} if vocab.state()["kind"] != "bpe" else {"max_size": 300, "special_tokens": []})
        crafted = [{**state, key: wrong} for key in state for wrong in WRONG]
        crafted += [{other: state[other] for other in state if other != key} for key in state]
        crafted += [{**state, "more": 1}, {**state, "_target_": "os.system"}, {"kind": state["kind"]}]
        for one in crafted:
            try:
                made = from_state(one)
                made.decode(range(min(made.n_token, 300)))
                made.state()
            except ValueError as error:
                assert str(error).startswith(("checkpoint: its vocabulary", "data.vocab.")) and len(str(error)) < 400
                refused += 1
    assert refused > 200
    for state in (None, [], "bytes", 5, {}, {"kind": "syllables"}, {"kind": ["bytes"]}, {"kind": None}):
        with pytest.raises(ValueError, match=r"^checkpoint: its vocabulary is of the unknown kind"):
            from_state(state)


@pytest.mark.parametrize(
    "state",
    [
        {"kind": "words"},
        {"kind": "words", "words": ""},
        {"kind": "words", "words": "a\nb\na"},
        {"kind": "characters"},
        {"kind": "characters", "characters": "ba"},
        {"kind": "bytes", "only_seen": True},
        {"kind": "bytes", "only_seen": True, "symbols": []},
        {"kind": "bytes", "only_seen": True, "symbols": [98, 97]},
        {"kind": "bpe", "max_size": 300},
        {"kind": "bpe", "tokenizer": "{}"},
        {"kind": "bpe", "file": "/etc/hostname"},
        {"kind": "words", "file": "/etc/hostname"},
    ],
)
def test_a_state_that_is_no_vocabulary_is_refused(state):
    with pytest.raises(ValueError, match=r"^checkpoint: its vocabulary (is damaged|holds no)"):
        from_state(state)
