"""A corpus: three texts, their vocabulary, and the memory-mapped token files that they are encoded into, once."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from txl.data.encoding import Encoder, Split, Tables, smallest
from txl.data.parallel import in_order, progress
from txl.data.text import Piece, Text, separator_bytes
from txl.data.vocab import BPE, Vocabulary, fingerprint, from_state

SPLITS = ("train", "valid", "test")
HALF = re.compile(r"\.(train|valid|test)-[0-9a-f]{16}-[0-9a-f]{16}(\.starts\.npy|\.pieces\.npy|\.npy|\.sha256)-\w{8}")
FORM = 3  # of the token files; another number makes them all again


class Corpus:
    """Three texts and a vocabulary, which the training text determines (or the texts of all `vocab_splits`).

    `texts` maps each split to a function that finds it, so that evaluation reads just the one it scores. A document
    begins with each part of a text and behind each `document_separator`. `reset_at_document`: the memory does not reach
    from one document into the next; `shuffle_documents`: each pass over the training text has another order of them.
    `n_token`: how many tokens the splits are known to have.
    Raises ValueError with the key to change for a text that can't be read, or a folder that can't be written.
    """

    def __init__(
        self,
        *,
        texts: dict[str, Callable[[], Text]],
        vocab: Vocabulary,
        cache_dir: str | None,
        document_separator: str | None = None,
        reset_at_document: bool = False,
        shuffle_documents: bool = False,
        vocab_splits: tuple[str, ...] = ("train",),
        n_token: dict[str, int] | None = None,
    ):
        self._texts = {name: cache(find) for name, find in texts.items()}
        self._hashes: dict[str, str] = {}
        self._vocab = vocab
        self._vocab_splits = ("train",) if isinstance(vocab, BPE) else vocab_splits
        self._separator = separator_bytes(document_separator)
        self._n_token = n_token or {}
        self.reset_at_document, self.shuffle_documents = reset_at_document, shuffle_documents
        self.cache_dir = cache_folder(cache_dir)

    def text(self, split: str) -> Text:
        text = self._texts[split]()
        if not text.size:
            raise ValueError(f"data.{split}: the text is empty")
        return text

    def text_hash(self, split: str) -> str:
        """The sha256 of a split's text, computed once: every checkpoint names it."""
        if split not in self._hashes:
            self._hashes[split] = self.text(split).sha256()
        return self._hashes[split]

    def fingerprint(self) -> str:
        """The sha256 over the three texts."""
        return hashlib.sha256(" ".join(map(self.text_hash, SPLITS)).encode()).hexdigest()

    def encoder(self, vocab: Vocabulary) -> Encoder:
        """What turns text into tokens, document by document."""
        return Encoder(vocab, self._separator)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, fitted to the training text; found again if text and options are those it was made of."""
        if self._vocab.fitted:
            return self._vocab.fit([])
        texts = [self.text(split) for split in self._vocab_splits]
        hashes = [self.text_hash(split) for split in self._vocab_splits]
        encoder = self.encoder(self._vocab)
        known = [FORM, self._vocab.state(), hashes, encoder.how, [text.layout() for text in texts]]
        path = self.cache_dir / f"vocab-{_key(known)}.json"
        with contextlib.suppress(OSError, ValueError, RecursionError):  # none yet, or half of one
            found = from_state(json.loads(path.read_text()))
            if isinstance(found, type(self._vocab)):
                return found
        size = sum(text.size for text in texts)
        with progress("reading the vocabulary", size) as advance:

            def pieces() -> Iterator[bytes]:
                for split, text in zip(self._vocab_splits, texts, strict=True):
                    for piece in self._pieces(split, text, encoder):
                        yield encoder.parted(piece)
                        advance(len(piece.text))

            vocab = self._vocab.fit(pieces(), lambda work, items: in_order(work, items, size=size))
        self._write(path, lambda file: file.write(json.dumps(vocab.state()).encode()))
        return vocab

    def split(self, name: str, vocab: Vocabulary) -> Split:
        """The split's tokens, from their file if text and vocabulary are those it was made of, else encoded into it."""
        text, encoder = self.text(name), self.encoder(vocab)
        how = _key([FORM, fingerprint(vocab), encoder.how, text.layout()])
        path = self.cache_dir / f"{name}-{self.text_hash(name)[:16]}-{how}.npy"
        if (found := _load(path, vocab.n_token, text.size)) is None:
            self._write(path, lambda file: self._encode(name, text, encoder, path, file))
            found = _load(path, vocab.n_token, text.size)
            assert found is not None, f"{path} cannot be read back"
        split = Split(name, text, encoder, **found, resets=self.reset_at_document)
        if len(split.tokens) < 2:
            raise ValueError(f"data.{name}: a text of {len(split.tokens)} token is too short; scoring takes at least 2")
        known = self._n_token.get(name, len(split.tokens))
        if known != len(split.tokens):
            raise ValueError(
                f"data.verify: the {name} text has {len(split.tokens):,} tokens, the published one {known:,}; false takes it"
            )
        if name == "train" and len(split.starts) < 2:
            for key in ("reset_at_document", "shuffle_documents"):
                if getattr(self, key):
                    missing = (
                        "give data.document_separator"
                        if self._separator is None
                        else "data.document_separator is not in it"
                    )
                    raise ValueError(f"data.{key}: the training text is one document; {missing}")
        return split

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Whole or not at all, so that a process that writes the same at the same time does no harm."""
        from txl.runtime import write_whole  # here, since processes that encode do without torch

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear_away(path.parent)
            write_whole(path, write)
        except OSError as error:
            raise ValueError(f"cache_dir: cannot write {path.parent} ({error.strerror or error})") from error

    def _pieces(self, name: str, text: Text, encoder: Encoder) -> Iterator[Piece]:
        """The pieces of a split's text. Raises ValueError if it is no longer the text whose hash is known."""
        digest = hashlib.sha256()
        for piece in text.pieces(encoder.vocab.place, encoder.separator):
            digest.update(piece.text)
            yield piece
        if digest.hexdigest() != self.text_hash(name):
            raise ValueError(f"data.{name}: the text changed while it was read")

    def _encode(self, name: str, text: Text, encoder: Encoder, path: Path, file: BinaryIO) -> None:
        """Writes the token file piece by piece; it gets its name last of four files, so that it stands for all of them."""
        tables, dtype, digest = Tables(), np.dtype(smallest(encoder.vocab.n_token)), hashlib.sha256()
        _write_header(file, dtype, 0)
        with progress(f"encoding {name}", text.size) as advance:
            for piece in in_order(encoder, self._pieces(name, text, encoder), size=text.size):
                tokens = piece.tokens.tobytes()
                file.write(tokens)
                digest.update(tokens)
                tables.add(piece)
                advance(piece.counts[1])
        file.seek(0)
        _write_header(file, dtype, int(tables.pieces[-1, 0]))
        self._write(path.with_suffix(".starts.npy"), lambda other: np.save(other, tables.starts))
        self._write(path.with_suffix(".pieces.npy"), lambda other: np.save(other, tables.pieces))
        digest.update(tables.starts.tobytes())
        digest.update(tables.pieces.tobytes())
        self._write(path.with_suffix(".sha256"), lambda other: other.write(digest.hexdigest().encode()))


def _write_header(file: BinaryIO, dtype: np.dtype, n_token: int) -> None:
    """NumPy's header of a vector; it pads it, so that any length takes the same room."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n_token,)}
    np.lib.format.write_array_header_1_0(file, described)
    assert file.tell() == 128


def _load(path: Path, n_token: int, size: int) -> dict[str, np.ndarray] | None:
    """The files of an encoding, or None where there are none, only a part of them, or where a bit of them has changed."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        starts = np.load(path.with_suffix(".starts.npy"), mmap_mode="r", allow_pickle=False)
        pieces = np.load(path.with_suffix(".pieces.npy"), allow_pickle=False)
        expected = path.with_suffix(".sha256").read_text()
        kinds = [(array.ndim, array.dtype) for array in (tokens, starts, pieces)]
    except Exception:  # NumPy has many for a damaged file
        return None
    if kinds != [(1, smallest(n_token)), (1, np.int64), (2, np.int64)] or pieces.shape[1] != 5:
        return None
    if pieces[-1:, :2].tolist() != [[len(tokens), size]] or (np.diff(pieces[:, :4], axis=0, prepend=0) < 0).any():
        return None
    if starts[:1].tolist() != [0] or not 0 <= starts[-1] <= len(tokens):
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:  # not through the map, whose pages would count as this process's memory
        file.seek(128)
        while len(block := np.fromfile(file, tokens.dtype, 1 << 22)):
            digest.update(block)
            if block.max() >= n_token or block.min() < 0:
                return None
    digest.update(starts)
    digest.update(pieces)
    if digest.hexdigest() != expected:
        return None
    return {"tokens": tokens, "starts": starts, "pieces": pieces}


def _clear_away(folder: Path) -> None:
    """Removes what processes that were killed left half-written: files of our own names that nobody wrote to for a day."""
    for half in folder.glob(".*-*"):
        with contextlib.suppress(OSError):
            ours = HALF.fullmatch(half.name) and half.is_file() and not half.is_symlink()
            if ours and time.time() - half.stat().st_mtime > 24 * 3600:
                half.unlink()


def _key(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def cache_folder(cache_dir: str | None) -> Path:
    """The folder of that name; None is `$XDG_CACHE_HOME/txl`, or `~/.cache/txl`."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "txl"
