"""From text to tokens and back to what they stand for: the encoder, and a split of a corpus."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from txl.data.text import Piece, Text, characters
from txl.data.vocab import Vocabulary, Words


@dataclass(frozen=True)
class Encoder:
    """Turns pieces of a text into tokens; a document begins behind each `separator`, and no token spans one."""

    vocab: Vocabulary
    separator: bytes | None = None

    def documents(self, piece: Piece) -> Iterator[tuple[bytes, bool]]:
        """The stretches of a piece up to each separator, and whether nothing goes on behind."""
        start, text = 0, piece.text
        while self.separator is not None and (found := text.find(self.separator, start)) >= 0:
            stop = found + len(self.separator)
            yield text[start:stop], piece.closes and stop == len(text)
            start = stop
        if start < len(text):
            yield text[start:], piece.closes

    @property
    def how(self) -> str | None:
        """The separator as plain JSON."""
        return None if self.separator is None else self.separator.hex()

    def parted(self, piece: Piece) -> bytes:
        """The piece with a line end behind each separator, for counting words: none of them spans one."""
        if self.separator is None or not isinstance(self.vocab, Words):
            return piece.text
        return b"\n".join(document for document, _ in self.documents(piece))

    def __call__(self, piece: Piece) -> "Encoded":
        parts = [self.vocab.encode(*document) for document in self.documents(piece)]
        borders = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        tokens = np.concatenate([np.zeros(0, np.int64), *parts]).astype(smallest(self.vocab.n_token))
        dropped = 0 if getattr(self.vocab, "newlines", True) else piece.text.count(b"\n")
        before = (len(tokens), len(piece.text), len(piece.text) - dropped, words(piece), int(piece.closes))
        return Encoded(tokens, borders[int(not piece.begins) : -1], before)

    @property
    def sees_borders(self) -> bool:
        """Whether the tokens alone tell where a document begins; not where the vocabulary has none for the separator."""
        if self.separator is None:
            return False
        if isinstance(self.vocab, Words):
            if self.vocab.eos_first:
                return self.separator == b"\n"
            return bool(self._ending) and not self.vocab.unknown(self.separator)
        return getattr(self.vocab, "newlines", True) or b"\n" not in self.separator

    @cached_property
    def _ending(self) -> list[int]:
        """The tokens that a document of words ends with."""
        return self.vocab.encode(self.separator, False).tolist()

    def begins(self, document: Sequence[int], token: int) -> bool:
        """Whether a token begins a document, after the tokens of the one before it (the last few are enough)."""
        if isinstance(self.vocab, Words):
            if self.vocab.eos_first:
                return self.vocab.decode([token]) == self.separator
            return list(document[-len(self._ending) :]) == self._ending
        return self.vocab.decode(document[-len(self.separator) :]).endswith(self.separator)

    def sizes(self, piece: Piece) -> np.ndarray:
        """The bytes that each token of the piece stands for."""
        return np.concatenate([np.zeros(0, np.int64), *(self.vocab.sizes(*part) for part in self.documents(piece))])


@dataclass(frozen=True)
class Encoded:
    """A piece as tokens, and where among them documents begin.

    `counts`: its tokens, its bytes, the bytes that tokens stand for, its words, and whether nothing goes on after it.
    """

    tokens: np.ndarray
    starts: np.ndarray
    counts: tuple[int, int, int, int, int]


class Tables:
    """Gathers, piece by piece, what a split must know beside its tokens: where documents begin, what stands before a piece."""

    def __init__(self):
        self._starts, self._rows = [np.zeros(0, np.int64)], [(0, 0, 0, 0, 0)]

    def add(self, piece: Encoded) -> None:
        self._starts.append(piece.starts + self._rows[-1][0])
        *sums, closes = piece.counts
        self._rows.append((*(before + more for before, more in zip(self._rows[-1], sums, strict=False)), closes))

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate(self._starts)

    @property
    def pieces(self) -> np.ndarray:
        """A row for each piece and one for the end: the tokens, bytes of text, bytes that tokens stand for, and words before
        it, and whether the piece before it closes."""
        return np.array(self._rows, dtype=np.int64)


def words(piece: Piece) -> int:
    """The whitespace-separated words of a text and its line ends: what a word-level model predicts."""
    text = characters(piece.text)
    returns = text.count("\r") - text.count("\r\n")
    unended = piece.closes and text[-1:] not in ("\n", "\r", "")
    return len(text.split()) + text.count("\n") + returns + unended


def smallest(n_token: int) -> type[np.integer]:
    """The smallest type of integer for so many different tokens."""
    return np.uint8 if n_token <= 2**8 else np.uint16 if n_token <= 2**16 else np.int32


class Split:
    """One split of a corpus: its tokens, memory-mapped, and what text they stand for.

    `starts`: the tokens that documents begin with; `pieces`: see `Tables`. `resets`: memory ends where a document does.
    """

    def __init__(
        self,
        name: str,
        text: Text,
        encoder: Encoder,
        *,
        tokens: np.ndarray,
        starts: np.ndarray,
        pieces: np.ndarray,
        resets: bool = False,
    ):
        self.name, self.text, self.encoder, self.vocab = name, text, encoder, encoder.vocab
        self.tokens, self.starts, self.resets, self._pieces = tokens, starts, resets, pieces
        self._read_piece = lru_cache(maxsize=2)(self._read_piece)

    @classmethod
    def of(
        cls, name: str, text: bytes, vocab: Vocabulary, *, separator: bytes | None = None, resets: bool = False
    ) -> "Split":
        """A split from a text in memory."""
        whole, encoder, tables = Text.of(text), Encoder(vocab, separator), Tables()
        parts = [np.zeros(0, smallest(vocab.n_token))]
        for piece in map(encoder, whole.pieces(vocab.place, separator)):
            parts.append(piece.tokens)
            tables.add(piece)
        made = dict(tokens=np.concatenate(parts), starts=tables.starts, pieces=tables.pieces)
        return cls(name, whole, encoder, **made, resets=resets)

    @property
    def borders(self) -> np.ndarray | None:
        """The tokens that memory does not reach beyond, where it is reset."""
        return self.starts if self.resets else None

    def count_bytes(self, start: int, stop: int) -> int:
        """How many bytes of text the tokens start, ..., stop - 1 stand for."""
        return self._before(stop, 2) - self._before(start, 2)

    def count_words(self, start: int, stop: int) -> int:
        """How many words and line ends there are in their text; of a word that is cut, the beginning counts."""
        return self._before(stop, 3) - self._before(start, 3)

    def _before(self, token: int, column: int) -> int:
        """The bytes or words of the tokens before one."""
        row = int(np.searchsorted(self._pieces[:, 0], token, side="right")) - 1 if token else 0
        before, inside = int(self._pieces[row, column]), token - int(self._pieces[row, 0])
        if not inside:
            return before
        sizes, text = self._read_piece(row)
        size = int(sizes[:inside].sum())
        return before + (size if column == 2 else words(Piece(text[:size], begins=False, closes=False)))

    def _read_piece(self, row: int) -> tuple[np.ndarray, bytes]:
        """The bytes of each token of a piece, and its text. Raises ValueError if that is no longer what was encoded."""
        text = self.text.read(*map(int, self._pieces[row : row + 2, 1]))
        sizes = self.encoder.sizes(Piece(text, begins=False, closes=bool(self._pieces[row + 1, 4])))
        if len(sizes) != self._pieces[row + 1, 0] - self._pieces[row, 0]:
            raise ValueError(f"data.{self.name}: the text changed since it was encoded")
        return sizes, text
