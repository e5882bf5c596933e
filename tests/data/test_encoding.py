import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from scraps import SCRAPPY, TRAINING

from txl.data import parallel
from txl.data import text as texts
from txl.data.corpus import text_files
from txl.data.encoding import Split
from txl.data.store import SPLITS, Corpus
from txl.data.text import Part, Text
from txl.data.vocab import BPE, Bytes, Characters, Words

TEXT = b"the cat sat\non the mat|the dog|\n\n" * 20 + "naïve|\xff".encode()


def corpus_of(vocab, parts=(TEXT,), *, cache_dir="cache", **how):
    """A corpus whose three texts are made of these parts."""
    text = Text([Part(part, 0, len(part)) for part in parts])
    return Corpus(texts={name: lambda: text for name in SPLITS}, vocab=vocab, cache_dir=str(cache_dir), **how)


def contents(corpus):
    vocab = corpus.vocabulary()
    split = corpus.split("train", vocab)
    return vocab.state(), split.tokens.tolist(), split.starts.tolist(), split.count_bytes(1, len(split.tokens) - 1)


@pytest.mark.parametrize(
    "variants",
    {
        "content": [(Words(), (TEXT,)), (Words(), (TEXT.replace(b"cat", b"dog"),)), (Words(), (TEXT[::-1],))],
        "vocabulary": [
            (Bytes(),),
            (Bytes(only_seen=True),),
            (Bytes(newlines=False),),
            (Characters(),),
            (Words(),),
            (Words(min_freq=25),),
            (Words(max_size=2),),
            (Words(eos_first=True),),
            (Words(eos="|"),),
            (BPE(max_size=260),),
            (BPE(max_size=270),),
            (BPE(max_size=270, special_tokens=["cat"]),),
        ],
        "borders": [(Words(), (TEXT,)), (Words(), (TEXT[:50], TEXT[50:])), (Words(), (TEXT[:51], TEXT[51:]))],
    }.items(),
    ids=lambda item: item[0],
)
def test_an_encoding_is_never_taken_for_another(variants):
    """One cache for all gives what a cache for each gives."""
    for _ in range(2):
        for index, variant in enumerate(variants[1]):
            for separator in (None, "|", r"\n", "the"):
                how = dict(document_separator=separator)
                own = f"own-{index}-{separator}".replace("\\", "")
                assert contents(corpus_of(*variant, **how)) == contents(corpus_of(*variant, cache_dir=own, **how))


def test_what_is_encoded_is_read_as_it_was_made():
    for vocab in (Bytes(), Characters(), BPE(max_size=270), Words()):
        corpus = corpus_of(vocab, document_separator="|")
        vocab = corpus.vocabulary()
        found, made = corpus.split("train", vocab), Split.of("train", TEXT, vocab, separator=b"|")
        assert isinstance(found.tokens, np.memmap) and found.tokens.tolist() == made.tokens.tolist()
        assert found.starts.tolist() == made.starts.tolist()
        counts = [(split.count_bytes(3, 50), split.count_words(3, 50)) for split in (found, made)]
        assert counts[0] == counts[1]


def test_words_that_only_documents_part_are_in_the_vocabulary():
    corpus = corpus_of(Words(unknown=None), (b"one|two one|three",), document_separator="|")
    vocab = corpus.vocabulary()
    assert vocab.words == ["<eos>", "one|", "two", "three"]
    assert corpus.split("train", vocab).tokens.tolist() == [1, 2, 1, 3, 0]


DAMAGES = {
    "none of it": lambda whole: b"",
    "a byte short": lambda whole: whole[:-1],
    "half": lambda whole: whole[: len(whole) // 2],
    "a few bytes": lambda whole: whole[:7],
    "a bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "garbage": lambda whole: b"\x93NUMPY garbage" * 20,
    "an archive": lambda whole: b"PK\x03\x04" + whole,
    "a broken header": lambda whole: whole[:12] + b"(" + whole[13:],
}
ARRAYS = {
    "floats": np.zeros(6),
    "a table": np.zeros((2, 3), np.uint8),
    "no numbers": np.zeros(0, np.int64),
    "no rows": np.zeros((0, 5), np.int64),
    "one number": np.array(5),
    "objects": np.array([{}], dtype=object),
    "numbers too high": np.full(6, 1 << 40),
    "other rows": np.ones((3, 5), np.int64),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *ARRAYS])
def test_a_damaged_cache_is_made_again(damage):
    corpus = corpus_of(Words(), document_separator="|")
    expected = contents(corpus)
    for pattern in ("train-*[!s].npy", "*.starts.npy", "*.pieces.npy", "*.sha256", "vocab-*.json"):
        (path,) = Path("cache").glob(pattern)
        whole = path.read_bytes()
        path.unlink()  # it may still be mapped
        if damage in ARRAYS:
            with path.open("wb") as file:
                np.save(file, ARRAYS[damage])
        else:
            path.write_bytes(DAMAGES[damage](whole))
        assert contents(corpus_of(Words(), document_separator="|")) == expected
        assert path.read_bytes() == whole
    assert len(list(Path("cache").iterdir())) == 5


@pytest.mark.parametrize(
    "state", ["[]", "null", '{"kind": 5}', '{"kind": "words", "words": ["a"]}', '{"kind": "words"}']
)
def test_a_damaged_vocabulary_is_made_again(state):
    expected = contents(corpus_of(Words()))
    (path,) = Path("cache").glob("vocab-*.json")
    path.write_text(state)
    assert contents(corpus_of(Words())) == expected


@pytest.mark.parametrize("other", [b"abcdeg abc", b"abc", b"abcdef abc and more"])
def test_a_text_that_changes_while_it_is_read_is_refused(other):
    Path("t.txt").write_bytes(b"abcdef abc")
    corpus = text_files(vocab=Words(), train="t.txt", valid="t.txt", test="t.txt", cache_dir="cache")
    vocab = corpus.vocabulary()
    corpus.text_hash("train")
    Path("t.txt").write_bytes(other)
    again = text_files(vocab=Words(min_freq=2), train="t.txt", valid="t.txt", test="t.txt", cache_dir="cache")
    again._hashes, again._texts = corpus._hashes, corpus._texts  # as if it had changed just now
    if not other.startswith(b"abcdef abc"):  # what was added is not read
        with pytest.raises(ValueError, match=r"^data[^ ]*: .*the text changed while it was read"):
            corpus.split("train", vocab)
        with pytest.raises(ValueError, match=r"^data[^ ]*: .*the text changed while it was read"):
            again.vocabulary()
        assert len(list(Path("cache").iterdir())) == 1
    else:
        assert vocab.decode(corpus.split("train", vocab).tokens) == b"abcdef abc \n"


def test_a_cache_that_cannot_be_written_is_refused():
    Path("file").touch()
    for vocab in (Words(), Bytes()):
        with pytest.raises(ValueError, match=r"^cache_dir: cannot write file/cache \("):
            contents(corpus_of(vocab, cache_dir="file/cache"))


@pytest.mark.parametrize("text", [b" ", b"\n", b"\n \n", b"x"])
def test_a_split_of_less_than_two_tokens_is_refused(text):
    for vocab in (Words(eos=None, words="a\n<unk>"), Bytes(newlines=False)):
        with pytest.raises(ValueError, match=r"^data\.train: a text of [01] token is too short"):
            corpus_of(vocab, (text,)).split("train", vocab)


@pytest.mark.parametrize("vocab", ["Bytes()", "Words()"])
def test_processes_that_encode_at_once_do_not_harm_each_other(vocab):
    Path("train.txt").write_bytes(b"some text " * 20_000)
    program = (
        "from txl.data.corpus import text_files\n"
        "from txl.data.vocab import Bytes, Words\n"
        f"corpus = text_files(vocab={vocab}, path='.', cache_dir='cache')\n"
        "print(len(corpus.split('train', corpus.vocabulary()).tokens))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
        for _ in range(2)
    ]
    expected = b"200000\n" if vocab == "Bytes()" else b"40001\n"
    assert [process.communicate(timeout=120)[0] for process in started] == [expected] * 2
    assert len(list(Path("cache").iterdir())) == (4 if vocab == "Bytes()" else 5)


# Words and line ends, which perplexities of different tokens are compared by.


def words_by_hand(text):
    lines = text.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    return len(lines.split()) + lines.count("\n") + bool(lines and not lines.endswith("\n"))


@pytest.mark.parametrize("vocab", [Words().fit([b"a"]), BPE(max_size=270).fit([TRAINING])], ids=["words", "bpe"])
@given(SCRAPPY, st.integers(1, 9), st.data())
def test_words_and_line_ends_are_counted(vocab, text, size, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        split = Split.of("test", text, vocab)
    n = len(split.tokens)
    start = data.draw(st.integers(0, n))
    assert split.count_words(0, n) == words_by_hand(text) == split.count_words(0, start) + split.count_words(start, n)


@pytest.mark.parametrize("vocab", [Bytes(), Characters().fit([TEXT]), Words().fit([TEXT])])
def test_words_are_counted_whatever_the_tokens(vocab, monkeypatch):
    for size in (20, 33, 1000):
        monkeypatch.setattr(texts, "PIECE", size)
        split = Split.of("test", TEXT, vocab)
        assert split.count_words(0, len(split.tokens)) == words_by_hand(TEXT)
        assert Words().fit([TEXT]).encode(TEXT).size == words_by_hand(TEXT)


def test_the_words_of_scored_tokens():
    """Up to each token of BPE: the words that have begun and the line ends."""
    vocab = BPE(max_size=280).fit([TRAINING])
    split = Split.of("test", TRAINING, vocab)
    for stop in range(1, len(split.tokens), 5):
        before = vocab.decode(split.tokens[:stop])
        assert split.count_words(0, stop) == len(before.split()) + before.count(b"\n")


# Several processes.


@pytest.fixture
def in_parallel(monkeypatch):
    monkeypatch.setattr(parallel, "WORTHWHILE", 1)
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setattr(texts, "PIECE", 100)


@pytest.mark.parametrize(
    "vocab", [Words(min_freq=2), Characters(), BPE(max_size=270)], ids=["words", "characters", "bpe"]
)
def test_several_processes_encode_as_one_does(vocab, in_parallel, capsys):
    how = dict(document_separator="|")
    found = contents(corpus_of(vocab, (TEXT[:70], TEXT[70:]), **how))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"reading the vocabulary: {len(TEXT)} bytes, once", f"encoding train: {len(TEXT)} bytes, once"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "WORTHWHILE", 1 << 40)
        assert found == contents(corpus_of(vocab, (TEXT[:70], TEXT[70:]), cache_dir="serial", **how))
    assert capsys.readouterr().err == ""
    assert multiprocessing.active_children() == []


def test_a_mistake_in_another_process_is_told_here(in_parallel):
    vocab = Words(unknown=None, words="<eos>\nthe")
    with pytest.raises(ValueError, match=r"^data\.vocab\.unknown: the vocabulary lacks the word 'cat'"):
        corpus_of(vocab).split("train", vocab)
    assert multiprocessing.active_children() == []
    assert not list(Path("cache").iterdir())


def test_a_process_that_is_killed_is_told_and_none_is_left(in_parallel):
    with pytest.raises(ValueError, match=r"^data: a process that encoded the text was killed"):
        list(parallel.in_order(os._exit, [1] * 20, size=1))
    assert multiprocessing.active_children() == []


def test_results_come_in_order_and_few_are_waited_for(in_parallel):
    taken = []

    def pieces():
        for number in range(30):
            taken.append(number)
            yield -number

    results = parallel.in_order(abs, pieces(), size=1)
    assert next(results) == 0 and len(taken) < 8
    assert list(results) == list(range(1, 30))


def test_processes_end_with_the_one_that_started_them():
    program = (
        "import multiprocessing, sys, time\n"
        "from txl.data import parallel\n"
        "parallel.cores = lambda: 2\n"
        "def pieces():\n"
        "    yield 60\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    yield 60\n"
        "list(parallel.in_order(time.sleep, pieces(), size=1 << 40))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as process:
        worker = int(process.stdout.readline())
        time.sleep(1)  # until it works
        process.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not alive(worker):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its parent")


def alive(pid):
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_processes_that_encode_do_without_torch():
    """Each would take a quarter of a gigabyte, and two seconds to start."""
    program = "import sys, txl.data.store, txl.data.encoding, txl.data.parallel, txl.data.vocab; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == b"False\n"


def test_what_a_killed_process_left_half_written_is_cleared_away_in_time():
    Path("cache").mkdir()
    ours = f".train-{'0' * 16}-{'f' * 16}.npy-"
    ages = {
        f"{ours}olderold": 90_000,
        f"{ours}youngnew": 10,
        ".git-credentials": 90_000,
        ".pre-commit-config.yaml": 90_000,
    }
    for name, age in ages.items():
        half = Path("cache", name)
        half.write_bytes(b"half")
        os.utime(half, (time.time() - age, time.time() - age))
    Path("t.txt").write_bytes(TEXT)
    text_files(vocab=Bytes(), train="t.txt", cache_dir="cache").split("train", Bytes())
    assert {path.name for path in Path("cache").glob(".*")} == ages.keys() - {f"{ours}olderold"}
