"""Vocabularies: text to token numbers and back. Bytes and characters stand here, words and byte pairs in files of their own.

Each offers the same: `fit` learns it from the pieces of a text, `encode` and `decode` go there and back, `sizes` says how
many bytes each token stands for, `place` where a block of text may be cut, `state` is all of it as plain JSON.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from txl.data.bpe import BPE
from txl.data.text import character_border, character_sizes, characters, code_points, utf8, word_border
from txl.data.words import Words
from txl.signature import call_problems

NEWLINE = ord("\n")


class Bytes:
    """Each byte is a token: 256 of them, any text in any language, exact in both directions.

    `only_seen`: only the bytes of the training text, in their order; another one is an error. `newlines=False` leaves
    line ends out of the text, as the authors' enwik8 does (204 tokens where the file has 205 bytes).
    """

    def __init__(self, *, only_seen: bool = False, newlines: bool = True, symbols: list[int] | None = None):
        self.only_seen, self.newlines, self.symbols = only_seen, newlines, symbols
        if symbols is not None and (sorted(set(symbols)) != symbols or not all(0 <= byte < 256 for byte in symbols)):
            raise ValueError("data.vocab.symbols: must be distinct bytes in their order")
        kept = range(256) if symbols is None else symbols
        self._bytes = np.array([byte for byte in kept if newlines or byte != NEWLINE], dtype=np.uint8)
        self._numbers = np.full(256, -1, dtype=np.int16)
        self._numbers[self._bytes] = np.arange(len(self._bytes))

    @property
    def n_token(self) -> int:
        return len(self._bytes)

    @property
    def fitted(self) -> bool:
        return not self.only_seen or self.symbols is not None

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "Bytes":
        """The bytes of the text, where only those seen are asked for."""
        if self.fitted:
            return self
        seen = sorted(set().union(*mapped(set, pieces)))
        return Bytes(only_seen=True, newlines=self.newlines, symbols=seen)

    def _kept(self, text: bytes) -> np.ndarray:
        values = np.frombuffer(text, dtype=np.uint8)
        return values if self.newlines else values[values != NEWLINE]

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        """The token numbers. Raises ValueError for a byte that the training text does not have."""
        tokens = self._numbers[self._kept(text)]
        if (tokens < 0).any():
            raise ValueError(
                f"data.vocab.only_seen: training showed no byte {self.unknown(text)[0]!a}; false takes all"
            )
        return tokens.astype(np.uint8)

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        return np.ones(len(self._kept(text)), dtype=np.int64)

    def decode(self, tokens: Iterable) -> bytes:
        return bytes(self._bytes[np.fromiter(map(int, tokens), dtype=np.int64)])

    def unknown(self, text: bytes) -> list[str]:
        """The bytes of the text that the vocabulary lacks, as the characters of their numbers."""
        return sorted(map(chr, {*self._kept(text).tolist()} - {*self._bytes.tolist()}))

    def place(self, block: bytes) -> int:
        return word_border(block) or len(block)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        if not self.only_seen and self.newlines:
            return {"kind": "bytes"}
        return {"kind": "bytes", "only_seen": self.only_seen, "newlines": self.newlines, "symbols": self.symbols}


class Characters:
    """Each character of the training text is a token, in the order of code points, after `<unk>` for all others.

    The text is read as UTF-8; a byte that is no UTF-8 counts as a character of its own (Python's surrogateescape), so
    that such text comes back exactly too. `<unk>` decodes to U+FFFD.
    """

    def __init__(self, *, characters: str | None = None):
        self.characters = characters or ""
        if list(self.characters) != sorted(set(self.characters)):
            raise ValueError("data.vocab.characters: must be distinct, in the order of their code points")
        utf8(self.characters)  # a UnicodeEncodeError, which is a ValueError, for half a character
        self._codes = code_points(self.characters)

    @staticmethod
    def _seen(text: bytes) -> set[str]:
        return set(characters(text))

    @property
    def n_token(self) -> int:
        return 1 + len(self.characters)

    @property
    def fitted(self) -> bool:
        return bool(self.characters)

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "Characters":
        """The characters of the text, unless they were given."""
        if self.fitted:
            return self
        return Characters(characters="".join(sorted(set().union(*mapped(self._seen, pieces)))))

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        points = code_points(characters(text))
        places = np.searchsorted(self._codes, points).clip(max=len(self._codes) - 1)
        return np.where(self._codes[places] == points, places + 1, 0).astype(np.int64)

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        return character_sizes(text)

    def decode(self, tokens: Iterable) -> bytes:
        alphabet = ["\ufffd", *self.characters]
        return utf8("".join(alphabet[int(token)] for token in tokens))

    def unknown(self, text: bytes) -> list[str]:
        """The characters of the text that the vocabulary lacks, in code point order."""
        return sorted(set(characters(text)) - set(self.characters))

    def place(self, block: bytes) -> int:
        return word_border(block) or character_border(block)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        return {"kind": "characters", "characters": self.characters}


Vocabulary = Bytes | Characters | Words | BPE
KINDS = {"bytes": Bytes, "characters": Characters, "words": Words, "bpe": BPE}


def from_state(state: Any) -> Vocabulary:
    """Makes the vocabulary that `state()` described. Raises ValueError for one that is not known, not fitted or damaged."""
    kind = state.get("kind") if isinstance(state, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"checkpoint: its vocabulary is of the unknown kind {kind!r}")
    try:
        given = {key: value for key, value in state.items() if key not in ("kind", "file")}
        if wrong := next(call_problems(KINDS[kind], given, ""), None):
            raise ValueError(wrong[:200])
        vocab = KINDS[kind](**given)
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint: its vocabulary is damaged ({error})") from error
    if not vocab.fitted or vocab.n_token < 1:
        raise ValueError(f"checkpoint: its vocabulary holds no {kind}")
    return vocab


def fingerprint(vocab: Vocabulary) -> str:
    """The sha256 of the vocabulary: two runs can be compared, or continued, where it is equal."""
    return hashlib.sha256(json.dumps(vocab.state(), sort_keys=True).encode()).hexdigest()
