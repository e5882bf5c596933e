"""Texts to try vocabularies on, and a split of a text in pieces of any size."""

from functools import cache

import pytest
from hypothesis import strategies as st

from txl.data import text as texts
from txl.data.encoding import Split
from txl.data.vocab import BPE

NASTY = [
    b"",
    b"\x00\xff\xfe",
    "naïve — “x” 𝔘 \u2028\u0085".encode(),
    b"\r\n\r \n\n",
    b"\xef\xbb\xbfbom",
    b"\xf0\x9f\x98",  # a UTF-8 character cut short
    b"\xed\xb2\x80",  # an encoded surrogate, which is no UTF-8
    b"  two  spaces \t and don't 123456 'll<|end|>x<|end|>",
    "日本語のテキスト。\n中文".encode() + b"\xe6\x97",
]
TRAINING = b"the cat sat on the mat, and the dog sat on the cat. don't! 1234 12345\n\n" * 3
# what lines, words and bytes can be made of
SCRAPS = [
    b"a",
    b"b",
    b"B",
    b" ",
    b"  ",
    b"\t",
    b"\n",
    b"\r",
    b"\r\n",
    "é".encode(),
    b"\xff",
    b"\xe2",
    b"<unk>",
    b"<eos>",
]
SCRAPS += ["\ufeff".encode(), "\u2028".encode(), "\u0085".encode(), "İ".encode()]
SCRAPPY = st.lists(st.sampled_from(SCRAPS), max_size=25).map(b"".join)


@cache
def learned_bpe():
    return BPE(max_size=280, special_tokens=["<|end|>", "new york"]).fit([TRAINING])


def split_in_pieces(text, vocab, size, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        return Split.of("test", text, vocab, **how)
