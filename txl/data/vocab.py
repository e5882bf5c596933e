"""Vocabularies: bytes of text to token numbers and back. Nothing is lost on the way but what a vocabulary has never seen."""

import hashlib
import json
from typing import Any

import numpy as np

UNKNOWN = "<unk>"


class Bytes:
    """Each byte is a token: 256 of them, any text in any language, exact in both directions."""

    n_token = 256

    def fit(self, text: bytes) -> "Bytes":
        """Nothing to learn."""
        return self

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens) -> bytes:
        return bytes(int(token) for token in tokens)

    def count_bytes(self, text: bytes, start: int, stop: int) -> int:
        """How many bytes of the text its tokens start, ..., stop - 1 stand for."""
        return len(text[start:stop])

    def unknown(self, text: bytes) -> list[str]:
        """The pieces of the text that the vocabulary lacks."""
        return []

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        return {"kind": "bytes"}


class Characters:
    """Each character of the training text is a token, in the order of code points, after `<unk>` for all others.

    The text is read as UTF-8; a byte that is no UTF-8 counts as a character of its own (Python's surrogateescape), so
    that such text comes back exactly too. `<unk>` decodes to U+FFFD.
    """

    def __init__(self, *, characters: str | None = None):
        self.characters = characters or ""
        if list(self.characters) != sorted(set(self.characters)):
            raise ValueError("data.vocab.characters: must be distinct, in the order of their code points")
        self.characters.encode(
            "utf-8", "surrogateescape"
        )  # a UnicodeEncodeError, which is a ValueError, for half a character
        self._codes = self._points(self.characters)

    @staticmethod
    def _points(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)

    @staticmethod
    def _read(text: bytes) -> str:
        return text.decode("utf-8", "surrogateescape")

    @property
    def n_token(self) -> int:
        return 1 + len(self.characters)

    def fit(self, text: bytes) -> "Characters":
        """The characters of the text, unless they were given."""
        return self if self.characters else Characters(characters="".join(sorted(set(self._read(text)))))

    def encode(self, text: bytes) -> np.ndarray:
        points = self._points(self._read(text))
        places = np.searchsorted(self._codes, points).clip(max=len(self._codes) - 1)
        return np.where(self._codes[places] == points, places + 1, 0).astype(np.int64)

    def decode(self, tokens) -> bytes:
        alphabet = ["\ufffd", *self.characters]
        return "".join(alphabet[int(token)] for token in tokens).encode("utf-8", "surrogateescape")

    def count_bytes(self, text: bytes, start: int, stop: int) -> int:
        """How many bytes of the text its tokens start, ..., stop - 1 stand for."""
        return len(self._read(text)[start:stop].encode("utf-8", "surrogateescape"))

    def unknown(self, text: bytes) -> list[str]:
        """The characters of the text that the vocabulary lacks, in code point order."""
        return sorted(set(self._read(text)) - set(self.characters))

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        return {"kind": "characters", "characters": self.characters}


Vocabulary = Bytes | Characters


def from_state(state: dict[str, Any]) -> Vocabulary:
    """Makes the vocabulary that `state()` described. Raises ValueError for a kind that is not known."""
    if state.get("kind") == "bytes":
        return Bytes()
    if state.get("kind") == "characters":
        if not isinstance(state.get("characters"), str) or not state["characters"]:
            raise ValueError("checkpoint: its vocabulary holds no characters")
        return Characters(characters=state["characters"])
    raise ValueError(f"checkpoint: its vocabulary is of the unknown kind {state.get('kind')!r}")


def fingerprint(vocab: Vocabulary) -> str:
    """The sha256 of the vocabulary: two runs can be compared, or continued, where it is equal."""
    return hashlib.sha256(json.dumps(vocab.state(), sort_keys=True).encode()).hexdigest()
