"""Corpora: where the text comes from, how it is split, and the token files it is encoded into, once."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from txl.data.vocab import Vocabulary, fingerprint
from txl.runtime import write_whole

SPLITS = ("train", "valid", "test")
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Split:
    """One split of a corpus: its text, as bytes, and its tokens, memory-mapped."""

    name: str
    text: bytes
    tokens: np.ndarray
    vocab: Vocabulary

    def count_bytes(self, start: int, stop: int) -> int:
        """How many bytes of text the tokens start, ..., stop - 1 stand for."""
        return self.vocab.count_bytes(self.text, start, stop)


class Corpus:
    """Three texts and a vocabulary, which the training text determines.

    `texts` maps each split to a function that reads it, so that evaluation reads just the one it scores. Raises
    ValueError with the key to change for a text that is empty or can't be read, or a folder that can't be written.
    """

    def __init__(self, *, texts: dict[str, Callable[[], bytes]], vocab: Vocabulary, cache_dir: str | None):
        self._texts = {name: cache(read) for name, read in texts.items()}
        self._hashes: dict[str, str] = {}
        self._vocab = vocab
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()

    def text(self, split: str) -> bytes:
        text = self._texts[split]()
        if not text:
            raise ValueError(f"data.{split}: the text is empty")
        return text

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, fitted to the training text."""
        return self._vocab.fit(self.text("train"))

    def text_hash(self, split: str) -> str:
        """The sha256 of a split's text, computed once: every checkpoint names it."""
        if split not in self._hashes:
            self._hashes[split] = hashlib.sha256(self.text(split)).hexdigest()
        return self._hashes[split]

    def fingerprint(self) -> str:
        """The sha256 over the three texts."""
        return hashlib.sha256(" ".join(map(self.text_hash, SPLITS)).encode()).hexdigest()

    def split(self, name: str, vocab: Vocabulary) -> Split:
        """The split's tokens, from their file if text and vocabulary are those it was made of, else encoded into it."""
        text = self.text(name)
        path = self.cache_dir / f"{name}-{self.text_hash(name)[:16]}-{fingerprint(vocab)[:16]}.npy"
        tokens = _load(path, vocab.n_token)
        if tokens is None:
            _save(path, vocab.encode(text).astype(_smallest(vocab.n_token)))
            tokens = np.load(path, mmap_mode="r")
        if len(tokens) < 2:
            raise ValueError(f"data.{name}: a text of {len(tokens)} token is too short; scoring takes at least 2")
        return Split(name=name, text=text, tokens=tokens, vocab=vocab)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/txl`, or `~/.cache/txl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "txl"


def _smallest(n_token: int) -> type[np.integer]:
    return np.uint8 if n_token <= 2**8 else np.uint16 if n_token <= 2**16 else np.int32


def _load(path: Path, n_token: int) -> np.ndarray | None:
    """The token file, or None where there is none, only a part of one, or one of other numbers."""
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    ours = tokens.ndim == 1 and tokens.dtype == _smallest(n_token) and tokens.max(initial=0) < n_token
    return tokens if ours else None


def _save(path: Path, tokens: np.ndarray) -> None:
    """Whole or not at all, so that a process that encodes the same text at the same time does no harm."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: np.save(file, tokens))
    except OSError as error:
        raise ValueError(f"cache_dir: cannot write {path.parent} ({error.strerror})") from error


def cut(text: bytes, fractions: Sequence[float | int]) -> dict[str, bytes]:
    """Cuts a text by bytes, in order, into train, valid and test. Raises ValueError unless three shares make a whole."""
    if len(fractions) != 3 or not min(fractions) > 0 or not abs(sum(fractions) - 1) <= 1e-6:
        raise ValueError(f"data.fractions: must be three numbers above 0 that add up to 1, got {list(fractions)}")
    first = int(len(text) * fractions[0])
    second = int(len(text) * (fractions[0] + fractions[1]))
    return dict(zip(SPLITS, (text[:first], text[first:second], text[second:]), strict=True))


def _cut_corpus(
    read: Callable[[], bytes],
    *,
    fractions: Sequence[float | int],
    max_bytes: int | None,
    vocab: Vocabulary,
    cache_dir: str | None,
) -> Corpus:
    _check_max_bytes(max_bytes)
    cut(b"", fractions)  # a mistake in the fractions is told before anything is read
    parts = cache(lambda: cut(read()[:max_bytes], fractions))
    return Corpus(texts={name: lambda name=name: parts()[name] for name in SPLITS}, vocab=vocab, cache_dir=cache_dir)


def _check_max_bytes(max_bytes: int | None) -> None:
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"data.max_bytes: must be at least 1, or null for the whole text; got {max_bytes}")


def python_docs(
    *, vocab: Vocabulary, fractions: list[float | int], max_bytes: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The help topics that ship inside CPython: about 0.46 MB of English, different a little in each release.

    The topics in sorted order, joined by two newlines, the first `max_bytes` of them cut by `fractions`.
    """

    def read() -> bytes:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()

    return _cut_corpus(read, fractions=fractions, max_bytes=max_bytes, vocab=vocab, cache_dir=cache_dir)


def python_source(
    *, vocab: Vocabulary, fractions: list[float | int], max_bytes: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The standard library's own .py files in path order, without tests: about 11 MB.

    Joined by two newlines, the first `max_bytes` of them cut by `fractions`.
    """

    def read() -> bytes:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path.relative_to(root) for path in root.rglob("*.py")]
        library = sorted((path for path in paths if not NOT_LIBRARY & set(path.parts)), key=Path.as_posix)
        return b"\n\n".join((root / path).read_bytes() for path in library)

    return _cut_corpus(read, fractions=fractions, max_bytes=max_bytes, vocab=vocab, cache_dir=cache_dir)


def text_files(
    *,
    vocab: Vocabulary,
    train: str | None = None,
    valid: str | None = None,
    test: str | None = None,
    path: str | None = None,
    fractions: list[float | int] = (0.9, 0.05, 0.05),
    max_bytes: int | None = None,
    cache_dir: str | None = None,
) -> Corpus:
    """The user's own files, byte for byte: three of them, or one, `train`, that `fractions` cut.

    `path` names a folder that holds train.txt, valid.txt and test.txt. `max_bytes` reads just the start of each file.
    Raises ValueError for files that are missing, named twice over, or can't be read.
    """
    _check_max_bytes(max_bytes)
    files = {"train": train, "valid": valid, "test": test}
    if path is not None:
        if any(files.values()):
            raise ValueError("data.path: give either a folder or the files data.train, data.valid, data.test, not both")
        files = {name: str(Path(path) / f"{name}.txt") for name in SPLITS}
    if train is not None and valid is None and test is None:
        read = _reader("train", train, max_bytes)
        return _cut_corpus(read, fractions=fractions, max_bytes=max_bytes, vocab=vocab, cache_dir=cache_dir)
    texts = {name: _reader(name, file, max_bytes) for name, file in files.items()}
    return Corpus(texts=texts, vocab=vocab, cache_dir=cache_dir)


def _reader(split: str, file: str | None, max_bytes: int | None) -> Callable[[], bytes]:
    def read() -> bytes:
        if file is None:
            raise ValueError(
                f"data.{split}: no file given; give data.train, data.valid and data.test, or data.train alone to cut it"
            )
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe can be read but once
                raise ValueError(f"data.{split}: cannot read {file} (not a regular file)")
            with open(file, "rb") as opened:
                text = opened.read(-1 if max_bytes is None else max_bytes)
        except OSError as error:
            raise ValueError(f"data.{split}: cannot read {file} ({error.strerror})") from error
        if not text:
            raise ValueError(f"data.{split}: {file} is empty")
        return text

    return read
