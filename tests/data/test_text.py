import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txl.data import corpus as corpora
from txl.data import text as texts
from txl.data.encoding import Split
from txl.data.text import Part, Text, file_part, separator_bytes
from txl.data.vocab import BPE, Bytes, Characters, Words

PARTS = st.lists(st.tuples(st.text("ab|\n é").map(str.encode), st.booleans()), max_size=5)


def text_of(parts):
    return Text([Part(text, 0, len(text), begins) for text, begins in parts])


def pieces_of(text, place, separator, size, longest=1 << 24):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        patch.setattr(texts, "LONGEST", longest)
        return list(text.pieces(place, separator))


@given(PARTS, st.integers(0, 30), st.integers(0, 30), st.integers(1, 7))
def test_a_cut_is_a_slice_of_the_bytes(parts, start, stop, size):
    whole, text = b"".join(text for text, _ in parts), text_of(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        assert text.read() == whole and text.size == len(whole)
        assert text.cut(start, stop).read() == whole[start:stop] == text.read(start, stop)
        assert text.cut(start, stop).sha256() == Text.of(whole[start:stop]).sha256()
        assert all(len(block) <= size for block in text.blocks())
    assert text.layout() == [(len(text), begins) for text, begins in parts if text]


def borders_by_hand(parts, separator):
    """Where documents begin: with each part that says so, the first, and behind each separator inside one part."""
    found, offset, behind = [], 0, True
    for text, begins in parts:
        place = 0
        while text and place < len(text):
            if behind or (begins and place == 0):
                found.append(offset + place)
            after = text.find(separator, place)
            behind, place = after >= 0, len(text) if after < 0 else after + len(separator)
        offset += len(text)
    return found


@pytest.mark.parametrize("vocab", [Bytes(), Characters(), Words(), BPE()], ids=["bytes", "characters", "words", "bpe"])
@pytest.mark.parametrize("separator", [b"|", b"\n", b"\n\n", b"a|b", b"||", b" "])
@given(PARTS, st.integers(1, 9))
@example([(b"a\n\n\n", True), (b"b", False)], 20)
def test_pieces_are_the_text_cut_where_documents_allow(separator, vocab, parts, size):
    """Small pieces never split a separator, and each document begins where it does in a text that is split by hand."""
    pieces = pieces_of(text_of(parts), vocab.place, separator, size)
    assert b"".join(piece.text for piece in pieces) == b"".join(text for text, _ in parts)
    found, offset = [], 0
    for piece in pieces:
        found += [offset + place for place in borders_by_hand([(piece.text, False)], separator)[not piece.begins :]]
        offset += len(piece.text)
    assert found == borders_by_hand(parts, separator)
    borders = [(len(text), begins) for text, begins in parts if text][1:]
    assert sum(piece.closes for piece in pieces) == sum(begins for _, begins in borders) + bool(pieces)


@given(PARTS, st.sampled_from([b"|", b"\n\n", b"a|b"]), st.integers(1, 9))
def test_a_split_marks_the_documents(parts, separator, size):
    text = b"".join(text for text, _ in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        split = Split.of("test", text, Bytes(), separator=separator)
    assert split.starts.tolist() == borders_by_hand([(text, True)], separator)
    assert bytes(split.tokens) == text


@pytest.mark.parametrize("text", [b"x" * 90, b"\x80" * 90, "é".encode() * 45], ids=["ascii", "stray", "two bytes"])
@pytest.mark.parametrize("vocab", [Bytes(), Characters(), Words(), Words(eos_first=True), BPE()])
def test_a_text_without_a_place_to_cut_is_cut_all_the_same(text, vocab):
    pieces = pieces_of(Text.of(text), vocab.place, None, 10, longest=30)
    assert b"".join(piece.text for piece in pieces) == text
    assert len(pieces) >= 3 and max(len(piece.text) for piece in pieces) <= 33
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_separators_stand_for_what_a_command_line_cannot_hold():
    assert separator_bytes(r"\n<é>\t\r") == "\n<é>\t\r".encode()
    assert separator_bytes(None) is None
    with pytest.raises(ValueError, match=r"^data\.document_separator: must not be empty"):
        separator_bytes("")


def corpus_of(**files):
    return corpora.text_files(vocab=Bytes(), **files)


def test_many_files_in_their_order_with_the_separator_between_them():
    for name, text in {"b": b"B\n", "a": b"A", "c": b"C\n--\n", "x": b"X"}.items():
        Path(f"{name}.txt").write_bytes(text)
    Path("sub").mkdir()
    Path("sub/d.txt").write_bytes(b"D")
    assert corpus_of(train="*.txt").text("train").cut(0, 9).read() == b"AB\nC\n--\nX"[: int(9 * 0.9)]
    cases = {
        "[abc].txt": b"AB\nC\n--\n",
        "**/*.txt": b"AB\nC\n--\nDX",
        ("x.txt", "[ab].txt", "sub/d.txt"): b"XAB\nD",
        ("b.txt", "b.txt"): b"B\nB\n",
    }
    for files, expected in cases.items():
        files = files if isinstance(files, str) else list(files)
        assert corpus_of(train=files, valid="a.txt", test="a.txt").text("train").read() == expected
    text = corpus_of(train="[abcx].txt", valid="a.txt", document_separator=r"\n--\n").text("train")
    assert text.read() == b"A\n--\nB\n\n--\nC\n--\nX"
    assert text.layout() == [(1, True), (4, False), (2, True), (4, False), (5, True), (1, True)]


def test_a_name_that_looks_like_a_pattern_is_a_file_first():
    Path("a[1].txt").write_bytes(b"itself")
    Path("a1.txt").write_bytes(b"other")
    assert corpus_of(train="a[1].txt", valid="a1.txt").text("train").read() == b"itself"


@pytest.mark.parametrize("name", ["missing.txt", "empty.txt", "folder", "pipe", "no*.txt", "a.txt/b.txt", "x" * 300])
def test_what_is_no_text_file_is_refused_in_one_line(name):
    Path("empty.txt").touch()
    Path("a.txt").write_bytes(b"abc")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for corpus in (corpus_of(train=name), corpus_of(train=["a.txt", name], valid="a.txt")):
        with pytest.raises(ValueError, match=r"^data\.train: .*") as caught:
            corpus.text("train")
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_splits_that_are_not_given_are_named():
    Path("a.txt").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"^data\.test: no file given"):
        corpus_of(train="a.txt", valid="a.txt").text("test")
    with pytest.raises(ValueError, match=r"^data\.train: no file given"):
        corpus_of().text("train")
    with pytest.raises(ValueError, match=r"^data\.path: give either a folder or the files"):
        corpus_of(train="a.txt", path=".")
    with pytest.raises(ValueError, match=r"^data\.max_bytes: must be at least 1"):
        corpus_of(train="a.txt", max_bytes=0)


def test_a_file_that_vanished_is_told():
    Path("a.txt").write_bytes(b"abc")
    part = file_part(Path("a.txt"), "data.train")
    Path("a.txt").unlink()
    with pytest.raises(ValueError, match=r"^data: cannot read a\.txt any more"):
        Text([part]).read()
