import hashlib
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import TINY, in_process, refused

from txl.data import corpus as corpora
from txl.data.vocab import BPE, Bytes, Characters, Words

FRACTIONS = [0.9, 0.05, 0.05]


def write(**texts):
    for name, text in texts.items():
        Path(f"{name}.txt").write_bytes(text)
    return {name: f"{name}.txt" for name in texts}


def test_python_docs_are_the_sorted_topics_cut_by_bytes():
    corpus = corpora.python_docs(vocab=Bytes(), fractions=FRACTIONS)
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    assert b"".join(corpus.text(name).read() for name in corpora.SPLITS) == text
    assert abs(corpus.text("train").size - 0.9 * len(text)) <= 1
    assert abs(corpus.text("valid").size - 0.05 * len(text)) <= 1
    assert len(text) > 400_000


def test_python_source_leaves_out_tests_and_installed_packages():
    whole = corpora.python_source(vocab=Bytes(), fractions=FRACTIONS)
    text = b"".join(whole.text(name).read() for name in corpora.SPLITS)
    assert 5_000_000 < len(text) < 30_000_000
    assert text.startswith((Path(sysconfig.get_paths()["stdlib"]) / "__future__.py").read_bytes()[:200])
    assert b"class Fraction(numbers.Rational):" in text
    assert b"class TestCase_Foo" not in text and b"def test_main" not in text
    short = corpora.python_source(vocab=Bytes(), fractions=FRACTIONS, max_bytes=1000)
    assert sum(short.text(name).size for name in corpora.SPLITS) == 1000


NASTY = b"\xef\xbb\xbfa\r\nb\rc\n\x00\xff\xfe \xe2\x80\xa8" * 3


@pytest.mark.parametrize("vocab", [Bytes(), Bytes(only_seen=True), Characters(), BPE(max_size=260)])
def test_bytes_in_bytes_out(vocab):
    """No newline is translated and no invalid UTF-8 is lost, on the way through files, tokens and back."""
    texts = {"train": NASTY, "valid": NASTY[:9], "test": NASTY[5:]}
    corpus = corpora.text_files(vocab=vocab, **write(**texts))
    fitted = corpus.vocabulary()
    for name, expected in texts.items():
        split = corpus.split(name, fitted)
        assert corpus.text(name).read() == expected
        assert fitted.decode(split.tokens) == expected
        assert split.count_bytes(0, len(split.tokens)) == len(expected)


def test_one_file_is_cut_by_the_fractions():
    text = bytes(range(200))
    corpus = corpora.text_files(vocab=Bytes(), fractions=[0.5, 0.3, 0.2], **write(train=text))
    assert [corpus.text(name).size for name in corpora.SPLITS] == [100, 60, 40]
    assert b"".join(corpus.text(name).read() for name in corpora.SPLITS) == text


def test_a_folder_holds_three_files():
    write(train=b"abc", valid=b"de", test=b"fg")
    corpus = corpora.text_files(vocab=Bytes(), path=".")
    assert [corpus.text(name).read() for name in corpora.SPLITS] == [b"abc", b"de", b"fg"]


def test_max_bytes_takes_the_start_of_each_file():
    corpus = corpora.text_files(vocab=Bytes(), max_bytes=2, **write(train=b"abc", valid=b"def", test=b"ghi"))
    assert [corpus.text(name).read() for name in corpora.SPLITS] == [b"ab", b"de", b"gh"]


@pytest.mark.parametrize(
    "fractions", [[0.9, 0.1], [0.9, 0.2, 0.1], [1.0, 0.0, 0.0], [1.1, -0.05, -0.05], [0.4, 0.3, float("nan")]]
)
def test_fractions_must_make_a_whole(fractions):
    with pytest.raises(ValueError, match=r"data\.fractions: must be three numbers"):
        corpora.python_docs(vocab=Bytes(), fractions=fractions)


def test_encoded_once_into_a_memory_map(monkeypatch):
    files = write(train=b"a b c d e f", valid=b"ab", test=b"cd")
    for vocab in (Bytes(), Words(), BPE(max_size=256)):
        corpus = corpora.text_files(vocab=vocab, cache_dir="cache", **files)
        first = corpus.split("train", corpus.vocabulary())
        assert isinstance(first.tokens, np.memmap)
        with monkeypatch.context() as patch:
            for method in ("encode", "_count"):
                patch.setattr(type(vocab), method, lambda *_: pytest.fail("read again"), raising=False)
            again = corpora.text_files(vocab=vocab, cache_dir="cache", **files)
            assert np.array_equal(again.split("train", again.vocabulary()).tokens, first.tokens)


def test_changed_data_never_meets_a_stale_token_file():
    """Another text of the same length and name, other fractions, other files with the same bytes: each its own tokens."""
    files = write(train=b"abcdef", valid=b"ab", test=b"cd")
    before = corpora.text_files(vocab=Bytes(), cache_dir="cache", **files).split("train", Bytes())
    write(train=b"abcdeg")
    after = corpora.text_files(vocab=Bytes(), cache_dir="cache", **files)
    assert bytes(after.split("train", Bytes()).tokens) == b"abcdeg"
    assert bytes(before.tokens) == b"abcdef"
    for fractions, expected in {(0.5, 0.25, 0.25): b"abc", (0.7, 0.15, 0.15): b"abcd"}.items():
        corpus = corpora.text_files(vocab=Bytes(), cache_dir="cache", train="train.txt", fractions=list(fractions))
        assert bytes(corpus.split("train", Bytes()).tokens) == expected
    write(a=b"abc", b=b"deg", c=b"abcd", d=b"eg")
    for names, starts in {("a.txt", "b.txt"): [0, 3], ("c.txt", "d.txt"): [0, 4]}.items():
        corpus = corpora.text_files(vocab=Bytes(), cache_dir="cache", train=list(names), valid="a.txt", test="b.txt")
        split = corpus.split("train", Bytes())
        assert (bytes(split.tokens), split.starts.tolist()) == (b"abcdeg", starts)


def test_tokens_take_the_fewest_bytes():
    for n_char, dtype in [(10, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.int32)]:
        text = "".join(chr(0x20000 + code) for code in range(n_char)).encode()
        corpus = corpora.text_files(vocab=Characters(), cache_dir="cache", **write(train=text, valid=text, test=text))
        vocab = corpus.vocabulary()
        split = corpus.split("train", vocab)
        assert split.tokens.dtype == dtype
        assert split.tokens[-1] == n_char
        assert vocab.decode(split.tokens[-3:]) == text[-12:]


def test_the_hash_is_that_of_the_texts():
    files = write(train=b"abc", valid=b"de", test=b"fg")
    corpus = corpora.text_files(vocab=Bytes(), **files)
    assert corpus.text_hash("valid") == hashlib.sha256(b"de").hexdigest()
    before = corpus.fingerprint()
    with pytest.MonkeyPatch.context() as patch:  # once computed, it costs nothing at each checkpoint
        patch.setattr(hashlib, "sha256", lambda *_: pytest.fail("hashed again"))
        assert corpus.text_hash("valid") and corpus.text_hash("train")
    assert corpora.text_files(vocab=Characters(), **files).fingerprint() == before
    write(test=b"fh")
    assert corpora.text_files(vocab=Bytes(), **files).fingerprint() != before


@pytest.mark.parametrize("key", ["reset_at_document", "shuffle_documents"])
def test_what_is_done_with_documents_takes_some(key):
    files = write(train=b"abc def", valid=b"ab", test=b"cd")
    for separator, hint in {None: "give data.document_separator", "|": "data.document_separator is not in it"}.items():
        corpus = corpora.text_files(vocab=Bytes(), document_separator=separator, **{key: True}, **files)
        with pytest.raises(ValueError, match=rf"^data\.{key}: the training text is one document; {hint}"):
            corpus.split("train", Bytes())
        assert len(corpus.split("valid", Bytes()).tokens) == 2


def test_files_with_documents_train_from_the_command_line():
    """Patterns, a separator, resets and shuffling."""
    Path("news").mkdir()
    for name in "abc":
        Path(f"news/{name}.txt").write_bytes(b"the cat sat\non the mat<|>the dog sat on the cat \xff" * 30)
    data = [
        "data=text",
        "data/vocab=words",
        "data.train=[news/a.txt,news/b*.txt]",
        "data.valid=news/c.txt",
        "data.test=news/*",
    ]
    documents = ["data.document_separator='<|>'", "data.reset_at_document=true", "data.shuffle_documents=true"]
    outcome = in_process("train", *TINY, *data, *documents)
    assert outcome.status == 0, outcome.stderr


def test_a_missing_file_is_one_line():
    line = refused(in_process("train", "data=text", "data.train=no*.txt", *TINY), "data.train")
    assert "no*.txt" in line


def test_a_folders_name_is_no_pattern():
    for folder in ("x[1]", "x1"):
        Path(folder).mkdir()
        Path(folder, "train.txt").write_bytes(b"abc")
    Path("x1", "valid.txt").write_bytes(b"of another folder")
    corpus = corpora.text_files(vocab=Bytes(), path="x[1]")
    assert corpus.text("train").read() == b"abc"
    with pytest.raises(ValueError, match=r"^data\.valid: cannot read x\[1\]/valid\.txt"):
        corpus.text("valid")
