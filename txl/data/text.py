"""Text: what a split is made of, read piece by piece, so that a corpus may be larger than the memory."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PIECE = 1 << 20  # bytes; part of what a token file's name stands for
LONGEST = 16 * PIECE  # bytes without a place to cut at, after which any character is one


@dataclass(frozen=True)
class Part:
    """Bytes start, ..., stop - 1 of a file, or of bytes in memory. `begins`: a document begins with it."""

    source: Path | bytes
    start: int
    stop: int
    begins: bool = True

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start, ..., stop - 1 of the part. Raises ValueError for a file that is no longer there, or has grown shorter."""
        start, stop = self.start + start, min(self.start + stop, self.stop)
        if isinstance(self.source, bytes):
            return self.source[start:stop]
        try:
            with open(self.source, "rb") as file:
                file.seek(start)
                found = file.read(stop - start)
        except OSError as error:
            raise ValueError(f"data: cannot read {self.source} any more ({error.strerror})") from error
        if len(found) < stop - start:
            raise ValueError(f"data: {self.source} is shorter than it was; the text changed while it was read")
        return found


@dataclass(frozen=True)
class Piece:
    """Some of a text, cut where no token is. `begins`: a document begins with it; `closes`: nothing goes on after it."""

    text: bytes
    begins: bool
    closes: bool


class Text:
    """Parts one after the other. It is cheap to make: nothing is read before it is asked for."""

    def __init__(self, parts: list[Part]):
        self.parts = [part for part in parts if len(part)]
        self.size = sum(map(len, self.parts))

    @classmethod
    def of(cls, text: bytes) -> "Text":
        return cls([Part(text, 0, len(text))])

    def cut(self, start: int, stop: int) -> "Text":
        """Bytes start, ..., stop - 1."""
        parts, offset = [], 0
        for part in self.parts:
            first, last = max(start - offset, 0), min(stop - offset, len(part))
            if first < last:
                parts.append(replace(part, start=part.start + first, stop=part.start + last))
            offset += len(part)
        return Text(parts)

    def blocks(self) -> Iterator[bytes]:
        """All bytes, a block of at most PIECE at a time."""
        for part in self.parts:
            for start in range(0, len(part), PIECE):
                yield part.read(start, start + PIECE)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start, ..., stop - 1; without them, the whole text."""
        return b"".join(self.cut(start, self.size if stop is None else stop).blocks())

    def sha256(self) -> str:
        """Of all bytes, whatever parts they stand in."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    def layout(self) -> list[tuple[int, bool]]:
        """The sizes of the parts, and whether a document begins with each: what the bytes do not say."""
        return [(len(part), part.begins) for part in self.parts]

    def pieces(self, place: Callable[[bytes], int], separator: bytes | None) -> Iterator[Piece]:
        """The text in pieces of about PIECE bytes, the same ones each time.

        `place(block)` is the last place in a block where it may be cut without changing a token, 0 if there is none
        (then more is read). Behind a `separator` one may always cut, and inside it never.
        """
        begins = False
        for index, part in enumerate(self.parts):
            closes = index + 1 == len(self.parts) or self.parts[index + 1].begins
            begins = begins or part.begins or index == 0
            held, position = b"", 0
            while position < len(part):
                held += part.read(position, position + PIECE)
                position = min(position + PIECE, len(part))
                cut = len(held) if position == len(part) else _cut(held, place, separator)
                if cut:
                    yield Piece(held[:cut], begins, closes and position == len(part) and cut == len(held))
                    begins = separator is not None and _behind(held[:cut], separator) == cut
                    held = held[cut:]


def _behind(block: bytes, separator: bytes) -> int:
    """The place behind the last separator, counted from the left since they may overlap; 0 if there is none."""
    stop = 0
    while (found := block.find(separator, stop)) >= 0:
        stop = found + len(separator)
    return stop


def _cut(block: bytes, place: Callable[[bytes], int], separator: bytes | None) -> int:
    if separator is not None:
        if stop := _behind(block, separator):
            return stop
        block = block[: len(block) - len(separator) + 1]  # what follows may be the beginning of one
    return place(block) or (character_border(block) or len(block) if len(block) >= LONGEST else 0)


def character_border(block: bytes) -> int:
    """The place of the last byte that goes on with no character of UTF-8 (0 if there is none)."""
    place = len(block) - 1
    while place > 0 and block[place] & 0xC0 == 0x80:
        place -= 1
    return max(place, 0)


def word_border(block: bytes) -> int:
    """The place after the last line end, or before the last space, whichever comes later (0 if there is none)."""
    return max(block.rfind(b"\n") + 1, block.rfind(b" "))


def separator_bytes(separator: str | None) -> bytes | None:
    """A separator as it was given, where \\n, \\t and \\r may stand for what a command line cannot hold. Refuses an empty one."""
    if separator == "":
        raise ValueError("data.document_separator: must not be empty; null is none")
    if separator is None:
        return None
    return utf8(re.sub(r"\\([ntr])", lambda match: {"n": "\n", "t": "\t", "r": "\r"}[match[1]], separator))


def file_part(path: Path, key: str, *, begins: bool = True) -> Part:
    """A file as a part. Raises ValueError, naming the key, for one that is missing, unreadable, empty or no file."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe can be read but once
            raise ValueError(f"{key}: cannot read {path} (not a regular file)")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{key}: cannot read {path} ({error.strerror})") from error
    if not status.st_size:
        raise ValueError(f"{key}: {path} is empty")
    return Part(path, 0, status.st_size, begins)


def characters(text: bytes) -> str:
    """A text read as UTF-8; a byte that is none counts as a character of its own (Python's surrogateescape)."""
    return text.decode("utf-8", "surrogateescape")


def utf8(text: str) -> bytes:
    """Undoes `characters`."""
    return text.encode("utf-8", "surrogateescape")


def code_points(text: str) -> np.ndarray:
    """The numbers of its characters."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def character_sizes(text: bytes) -> np.ndarray:
    """The bytes of each of its characters."""
    points = code_points(characters(text))
    escaped = (points >= 0xDC80) & (points <= 0xDCFF)
    length = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.where(escaped, 1, length)
