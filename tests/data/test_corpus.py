import hashlib
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import ROOT

from txl.data import corpus as corpora
from txl.data.vocab import Bytes, Characters

FRACTIONS = [0.9, 0.05, 0.05]


def write(**texts):
    for name, text in texts.items():
        Path(f"{name}.txt").write_bytes(text)
    return {name: f"{name}.txt" for name in texts}


def test_python_docs_are_the_sorted_topics_cut_by_bytes():
    corpus = corpora.python_docs(vocab=Bytes(), fractions=FRACTIONS)
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    assert b"".join(corpus.text(name) for name in corpora.SPLITS) == text
    assert abs(len(corpus.text("train")) - 0.9 * len(text)) <= 1
    assert abs(len(corpus.text("valid")) - 0.05 * len(text)) <= 1
    assert len(text) > 400_000


def test_python_source_leaves_out_tests_and_installed_packages():
    whole = corpora.python_source(vocab=Bytes(), fractions=FRACTIONS)
    text = b"".join(whole.text(name) for name in corpora.SPLITS)
    assert 5_000_000 < len(text) < 30_000_000
    assert text.startswith((Path(sysconfig_stdlib()) / "__future__.py").read_bytes()[:200])
    assert b"class Fraction(numbers.Rational):" in text
    assert b"class TestCase_Foo" not in text and b"def test_main" not in text
    short = corpora.python_source(vocab=Bytes(), fractions=FRACTIONS, max_bytes=1000)
    assert sum(len(short.text(name)) for name in corpora.SPLITS) == 1000


def sysconfig_stdlib():
    import sysconfig

    return sysconfig.get_paths()["stdlib"]


def test_bytes_in_bytes_out():
    """No newline is translated and no invalid UTF-8 is lost, on the way through files, tokens and back."""
    text = b"\xef\xbb\xbfa\r\nb\rc\n\x00\xff\xfe \xe2\x80\xa8" * 3
    files = write(train=text, valid=text[:9], test=text[5:])
    for vocab in (Bytes(), Characters()):
        corpus = corpora.text_files(vocab=vocab, **files)
        fitted = corpus.vocabulary()
        for name, expected in {"train": text, "valid": text[:9], "test": text[5:]}.items():
            split = corpus.split(name, fitted)
            assert corpus.text(name) == expected
            assert fitted.decode(split.tokens) == expected
            assert split.count_bytes(0, len(split.tokens)) == len(expected)


def test_one_file_is_cut_by_the_fractions():
    text = bytes(range(200))
    corpus = corpora.text_files(vocab=Bytes(), fractions=[0.5, 0.3, 0.2], **write(train=text))
    assert [len(corpus.text(name)) for name in corpora.SPLITS] == [100, 60, 40]
    assert b"".join(corpus.text(name) for name in corpora.SPLITS) == text


def test_a_folder_holds_three_files():
    write(train=b"abc", valid=b"de", test=b"fg")
    corpus = corpora.text_files(vocab=Bytes(), path=".")
    assert [corpus.text(name) for name in corpora.SPLITS] == [b"abc", b"de", b"fg"]


def test_max_bytes_takes_the_start_of_each_file():
    corpus = corpora.text_files(vocab=Bytes(), max_bytes=2, **write(train=b"abc", valid=b"def", test=b"ghi"))
    assert [corpus.text(name) for name in corpora.SPLITS] == [b"ab", b"de", b"gh"]


@pytest.mark.parametrize(
    "fractions", [[0.9, 0.1], [0.9, 0.2, 0.1], [1.0, 0.0, 0.0], [1.1, -0.05, -0.05], [0.4, 0.3, float("nan")]]
)
def test_fractions_must_make_a_whole(fractions):
    with pytest.raises(ValueError, match=r"data\.fractions: must be three numbers"):
        corpora.python_docs(vocab=Bytes(), fractions=fractions)


def test_encoded_once_into_a_memory_map(monkeypatch):
    corpus = corpora.text_files(vocab=Bytes(), cache_dir="cache", **write(train=b"abcdef", valid=b"ab", test=b"cd"))
    first = corpus.split("train", Bytes())
    assert isinstance(first.tokens, np.memmap)
    monkeypatch.setattr(Bytes, "encode", lambda *_: pytest.fail("encoded again"))
    assert np.array_equal(corpus.split("train", Bytes()).tokens, first.tokens)


def test_changed_data_never_meets_a_stale_token_file():
    """Another text, of the same length and name, or another vocabulary is another file."""
    files = write(train=b"abcdef", valid=b"ab", test=b"cd")
    before = corpora.text_files(vocab=Bytes(), cache_dir="cache", **files).split("train", Bytes())
    write(train=b"abcdeg")
    after = corpora.text_files(vocab=Bytes(), cache_dir="cache", **files)
    assert bytes(after.split("train", Bytes()).tokens) == b"abcdeg"
    assert bytes(before.tokens) == b"abcdef"
    characters = Characters().fit(b"abcdeg")
    assert after.split("train", characters).tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(list(Path("cache").glob("train-*.npy"))) == 3


def test_a_truncated_token_file_is_made_again():
    corpus = corpora.text_files(vocab=Bytes(), cache_dir="cache", **write(train=b"abcdef", valid=b"ab", test=b"cd"))
    corpus.split("train", Bytes())
    (path,) = Path("cache").glob("train-*.npy")
    whole = path.read_bytes()
    for length in (0, 5, len(whole) - 1):
        path.unlink()
        path.write_bytes(whole[:length])
        assert bytes(corpus.split("train", Bytes()).tokens) == b"abcdef"


def test_tokens_take_the_fewest_bytes():
    for n_char, dtype in [(10, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.int32)]:
        text = "".join(chr(0x20000 + code) for code in range(n_char)).encode()
        corpus = corpora.text_files(vocab=Characters(), cache_dir="cache", **write(train=text, valid=text, test=text))
        vocab = corpus.vocabulary()
        split = corpus.split("train", vocab)
        assert split.tokens.dtype == dtype
        assert split.tokens[-1] == n_char
        assert vocab.decode(split.tokens[-3:]) == text[-12:]


def test_two_processes_that_encode_at_once_do_not_harm_each_other():
    write(train=b"some text " * 20_000, valid=b"ab", test=b"cd")
    program = (
        "from txl.data import corpus, vocab\n"
        "c = corpus.text_files(vocab=vocab.Bytes(), path='.', cache_dir='cache')\n"
        "print(len(c.split('train', vocab.Bytes()).tokens))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == [b"200000\n"] * 3
    assert len(list(Path("cache").iterdir())) == 1


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


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.uint8), np.zeros(6, np.int64), np.zeros(0, np.float32)])
def test_a_token_file_of_other_numbers_is_made_again(other):
    corpus = corpora.text_files(vocab=Bytes(), cache_dir="cache", **write(train=b"abcdef", valid=b"ab", test=b"cd"))
    corpus.split("train", Bytes())
    (path,) = Path("cache").glob("train-*.npy")
    path.unlink()
    np.save(path, other)
    assert bytes(corpus.split("train", Bytes()).tokens) == b"abcdef"
