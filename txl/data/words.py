"""Words as tokens: the vocabulary of the word-level papers."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from txl.data.text import character_sizes, characters, utf8, word_border

UNKNOWN = "<unk>"
LINE_END_OR_WORD = re.compile(r"\r\n|\r|\n|\S+")
BYTE_ORDER_MARK = re.compile(r"(?:\A|(?<=[\r\n]))\ufeff")


class Words:
    """Whitespace-separated words, and `eos` at the end of each line: the corpora of the word-level papers.

    Numbers: eos, then the words by frequency in the training text, the first seen first among equals; those rarer than
    `min_freq` and beyond the `max_size` most frequent become `unknown`. That word takes its place by frequency where the
    text has it, and comes second where it has not; with `unknown=None` a word that training never showed is an error.
    `eos_first` puts eos before each line, and once more after the last: a sentence then reads <S> words <S>, the second
    <S> being the first of the next (the Billion Word benchmark). `file` is a list of words, one a line, in place of counting.

    What is lost: runs of whitespace are one space, each of \\n, \\r\\n and \\r is one line end, a last line always ends, a
    byte order mark at the start of a line is dropped, and so is the case with `lower_case`. Decoded, each word is followed by a space.
    """

    def __init__(
        self,
        *,
        min_freq: int = 1,
        max_size: int | None = None,
        lower_case: bool = False,
        unknown: str | None = UNKNOWN,
        eos: str | None = "<eos>",
        eos_first: bool = False,
        file: str | None = None,
        words: str | None = None,
    ):
        for name, value in {"min_freq": min_freq, "max_size": max_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"data.vocab.{name}: must be at least 1, got {value}")
        for name, value in {"unknown": unknown, "eos": eos}.items():
            if value is not None and value.split() != [value]:
                raise ValueError(f"data.vocab.{name}: must be one word, or null for none; got {value!r}")
        if eos_first and eos is None:
            raise ValueError("data.vocab.eos_first: there is no eos to come first; give data.vocab.eos")
        self.options = dict(min_freq=min_freq, max_size=max_size, lower_case=lower_case)
        self.options |= dict(unknown=unknown, eos=eos, eos_first=eos_first)
        self.lower_case, self.eos, self.eos_first, self.file = lower_case, eos, eos_first, file
        utf8(words or "")  # a UnicodeEncodeError, which is a ValueError, for half a character
        self.words = words.split("\n") if words else []
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if len(self._numbers) < len(self.words):
            raise ValueError("data.vocab.words: holds a word twice")
        self._unknown = self._numbers.get(unknown) if unknown is not None else None

    @property
    def n_token(self) -> int:
        return len(self.words)

    @property
    def fitted(self) -> bool:
        return bool(self.words) or self.file is not None

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "Words":
        """Counts the words of the text, or reads the list that was given."""
        if self.words:
            return self
        unknown, eos = self.options["unknown"], self.eos
        if self.file is not None:
            return self._with(self._listed(Path(self.file)))
        counts = Counter()
        for counted in mapped(self._count, pieces):
            counts.update(counted)
        if not counts:
            raise ValueError("data.vocab: the training text holds no word")
        frequent = [word for word, n in counts.most_common(self.options["max_size"]) if n >= self.options["min_freq"]]
        special = [eos] if eos is not None else []
        if unknown is not None and unknown not in frequent:
            special.append(unknown)
        return self._with([*special, *(word for word in frequent if word not in special)])

    def _with(self, words: list[str]) -> "Words":
        return Words(**self.options, words="\n".join(words))

    def _listed(self, path: Path) -> list[str]:
        try:
            lines = path.read_text("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise ValueError(f"data.vocab.file: cannot read {path} ({error.strerror})") from error
        words = list(dict.fromkeys(line.split()[0] for line in lines if line.split()))
        for name in ("unknown", "eos"):
            if self.options[name] is not None and self.options[name] not in words:
                raise ValueError(f"data.vocab.{name}: {path} does not list {self.options[name]!r}")
        return words

    @staticmethod
    def _marked(text: bytes) -> str:
        """The text with a space in place of each byte order mark."""
        read = characters(text)
        return BYTE_ORDER_MARK.sub(" ", read) if "\ufeff" in read else read

    def _lines(self, text: bytes) -> str:
        lines = self._marked(text)
        if "\r" in lines:
            lines = lines.replace("\r\n", "\n").replace("\r", "\n")
        return lines.lower() if self.lower_case else lines

    def _count(self, text: bytes) -> Counter:
        return Counter(self._lines(text).split())

    def _tokens(self, text: bytes, closes: bool) -> list[str]:
        lines = self._lines(text)
        if self.eos is None or not text:
            return lines.split()
        if closes and not lines.endswith("\n"):
            lines += "\n"
        tokens = lines.replace("\n", f" {self.eos} ").split()
        if not self.eos_first:
            return tokens
        return [self.eos, *(tokens if closes or not lines.endswith("\n") else tokens[:-1])]

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        """The token numbers; `closes` ends a last line without a line end. Raises ValueError for an unknown word."""
        get, unknown = self._numbers.get, self._unknown
        tokens = self._tokens(text, closes)
        if unknown is None and (word := next((word for word in tokens if get(word) is None), None)) is not None:
            raise ValueError(f"data.vocab.unknown: the vocabulary lacks the word {word!r}, and a word for the unknown")
        return np.fromiter((get(word, unknown) for word in tokens), dtype=np.int64, count=len(tokens))

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        """Bytes of each token with the whitespace before it; with `eos_first` a line end belongs to the last word."""
        read, ends = self._marked(text), []
        if self.eos_first and read:
            ends.append(0)
        for match in LINE_END_OR_WORD.finditer(read):
            if match[0][0] not in "\r\n":
                ends.append(match.end())
            elif self.eos_first:
                ends[-1] = match.end()
                ends += [match.end()] if closes or match.end() < len(read) else []
            elif self.eos is not None:
                ends.append(match.end())
        if closes and self.eos is not None and read and read[-1] not in "\r\n":
            ends.append(len(read))
        if ends:
            ends[-1] = len(read)
        places = np.cumsum([0, *character_sizes(text)])[[0, *ends]]
        return np.diff(places)

    def decode(self, tokens: Iterable) -> bytes:
        words = (self.words[int(token)] for token in tokens)
        return utf8("".join("\n" if word == self.eos else f"{word} " for word in words))

    def unknown(self, text: bytes) -> list[str]:
        """The words of the text that the vocabulary lacks."""
        return sorted(set(self._tokens(text, False)) - self._numbers.keys())

    @property
    def takes_unknown(self) -> bool:
        """Whether it has a word for those that it lacks."""
        return self._unknown is not None

    def place(self, block: bytes) -> int:
        return block.rfind(b"\n") + 1 if self.eos_first else word_border(block)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        return {"kind": "words", **self.options, "words": "\n".join(self.words)}
