import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl.data.vocab import Bytes, Characters, fingerprint, from_state

NASTY = [
    b"",
    b"\x00\xff\xfe",
    "naïve — “x” 𝔘 \u2028\u0085".encode(),
    b"\r\n\r \n\n",
    b"\xef\xbb\xbfbom",
    b"\xf0\x9f\x98",  # a UTF-8 character cut short
    b"\xed\xb2\x80",  # an encoded surrogate, which is no UTF-8
]


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("kind", [Bytes, Characters])
def test_encode_then_decode_gives_the_text_back(kind, text):
    vocab = kind().fit(text + b"x")
    assert vocab.decode(vocab.encode(text)) == text
    again = from_state(vocab.state())
    assert again.decode(vocab.encode(text)) == text
    assert fingerprint(again) == fingerprint(vocab)


@given(st.binary(max_size=60), st.binary(max_size=60), st.data())
def test_characters_lose_nothing_but_the_unknown(training, text, data):
    vocab = Characters().fit(training + b"x")
    tokens = vocab.encode(text)
    assert ((tokens >= 0) & (tokens < vocab.n_token)).all()
    unknown = vocab.unknown(text)
    assert (0 in tokens) == bool(unknown)
    if not unknown:
        assert vocab.decode(tokens) == text
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    assert vocab.count_bytes(text, 0, len(tokens)) == len(text)
    parts = [vocab.count_bytes(text, *pair) for pair in ((0, start), (start, stop), (stop, len(tokens)))]
    assert sum(parts) == len(text)


def test_unknown_characters_are_one_token():
    vocab = Characters().fit(b"abc")
    assert vocab.n_token == 4
    assert vocab.encode(b"abzc").tolist() == [1, 2, 0, 3]
    assert vocab.decode([1, 0]) == "a\ufffd".encode()
    assert vocab.unknown("zéa".encode()) == ["z", "é"]


def test_every_byte_is_a_token():
    everything = bytes(range(256))
    assert Bytes().encode(everything).tolist() == list(range(256))
    assert Bytes().n_token == 256
    assert Bytes().decode(np.arange(256)) == everything


def test_fingerprints_tell_vocabularies_apart():
    prints = {fingerprint(vocab) for vocab in (Bytes(), Characters().fit(b"ab"), Characters().fit(b"ac"))}
    assert len(prints) == 3


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown kind 'words'"):
        from_state({"kind": "words"})
