"""How generated texts are shown: as they grow, one after the other; side by side; coloured by what the model expected."""

import codecs
import colorsys
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich.color import Color
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from txl.instruments.showing import readable

SHADES = 20  # that are told apart between green and red
NARROWEST = 24  # characters of a column; where more samples do not fit, they stand below


class Shades:
    """Puts a colour behind text by its nll, or none where standard output shows none.

        hue = green + (red - green) min(1, nll / ln(n_token)),    nll = -log p(token)    (nats)

    Red stands for a guess among all tokens alike, or worse. `color`: true for a terminal that has colours, "always" also
    for what is none.
    """

    def __init__(self, n_token: int, color: bool | Literal["always"]):
        self.full = math.log(max(n_token, 2))
        forced = dict(force_terminal=True, color_system="256") if color == "always" else {}
        self.console = Console(
            no_color=not color and None, **forced
        )  # who asks for colours wants them despite NO_COLOR
        self.system = COLOR_SYSTEMS.get(self.console.color_system) if color else None

    def painted(self, text: bytes, nll: Sequence[float], *, ended: bool = True) -> tuple[bytes, int]:
        """The text with colours, and how many of its bytes that is: a character that is not whole waits until it `ended`."""
        if self.system is None:
            return text, len(text)
        parts, stop = [], 0
        for first, stop in whole_characters(text, ended):
            shown = text[first:stop].decode("utf-8", "surrogateescape")
            shown = shown if shown == "\n" else self._style(nll[first:stop]).render(shown, color_system=self.system)
            parts.append(shown.encode("utf-8", "surrogateescape"))
        return b"".join(parts), stop

    def cell(self, text: bytes, nll: Sequence[float]) -> Text:
        """The text for a table, in which no character moves the cursor."""
        if self.system is None:
            return Text(readable(text))
        spans = list(whole_characters(text, ended=True))
        return Text.assemble(*((readable(text[first:stop]), self._style(nll[first:stop])) for first, stop in spans))

    def _style(self, nll: Sequence[float]) -> Style:
        """The colour of a character, by the mean of its bytes; none for what nothing predicts."""
        mean = sum(nll) / len(nll)
        return Style() if math.isnan(mean) else _shade(round(SHADES * min(1.0, max(0.0, mean / self.full))))


@functools.cache
def _shade(step: int) -> Style:
    rgb = colorsys.hsv_to_rgb((1 - step / SHADES) / 3, 0.5, 1.0)
    return Style(color="black", bgcolor=Color.from_rgb(*(255 * part for part in rgb)))


def whole_characters(text: bytes, ended: bool) -> Iterator[tuple[int, int]]:
    """Where each character begins and stops; what is no UTF-8 may go with its neighbour."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    first = stop = 0
    for stop in range(1, len(text) + 1):
        decoder.decode(text[stop - 1 : stop])
        if not decoder.getstate()[0]:
            yield first, stop
            first = stop
    if ended and first < stop:
        yield first, stop


class _Decoding:
    """Takes bytes for a stream that takes text: a character is written once it is whole, � for bytes that are none."""

    def __init__(self, stream: Any):
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        self._stream.write(self._decoder.decode(data))

    def flush(self) -> None:
        self._stream.flush()


def standard_output() -> Any:
    """A stream for bytes, which are written as they are; or, where standard output takes text alone, as in a notebook, as text."""
    return getattr(sys.stdout, "buffer", None) or _Decoding(sys.stdout)


class Output:
    """Writes texts in their order: the first that has not ended as it grows, those behind it when their turn comes.

    `rows`: the prompt of each, and the number of the sample.
    """

    def __init__(self, rows: list[tuple[bytes, int]], *, format: str, seed: int, shades: Shades):
        self.rows, self.format, self.seed, self.shades = rows, format, seed, shades
        self.stream, self.current, self.written = standard_output(), 0, 0
        self.texts, self.ended = [b""] * len(rows), [False] * len(rows)
        self.losses: list[list[float]] = [[] for _ in rows]

    def add(self, row: int, piece: bytes | None, nll: Sequence[float] = ()) -> None:
        """One more piece of a text, with the nll of each byte (nats); None ends it."""
        self.ended[row] |= piece is None
        self.texts[row] += piece or b""
        self.losses[row] += nll
        while self.current < len(self.rows):
            text, losses, ended = self.texts[self.current], self.losses[self.current], self.ended[self.current]
            if self.format == "text":
                shown, used = self.shades.painted(text[self.written :], losses[self.written :], ended=ended)
                self.stream.write(shown)
                self.written += used
            if not ended:
                break
            self._end(*self.rows[self.current])
            self.current, self.written = self.current + 1, 0
        self.stream.flush()

    def _end(self, prompt: bytes, sample: int) -> None:
        """What follows the text that has ended."""
        more = self.current + 1 < len(self.rows)
        if self.format == "text":
            self.stream.write(b"\n---\n" if more else b"\n")
        elif self.format == "jsonl":
            texts = {"prompt": exact(prompt), "text": exact(self.texts[self.current])}
            self.stream.write((json.dumps({"sample": sample, "seed": self.seed, **texts}) + "\n").encode())
        elif not more or self.rows[self.current + 1][1] == 0:
            first = self.current - sample
            self._columns(prompt, range(first, self.current + 1), named=len(self.rows) > sample + 1)

    def _columns(self, prompt: bytes, rows: range, *, named: bool) -> None:
        """The samples of a prompt side by side, as many as there is width for."""
        console = self.shades.console
        abreast = max(1, console.width // NARROWEST)
        for place in range(0, len(rows), abreast):
            part = rows[place : place + abreast]
            title = Text(readable(prompt)) if named and not place else None
            table = Table(title=title, title_justify="left", expand=True)
            for row in part:
                table.add_column(f"sample {self.rows[row][1]}, seed {self.seed}", ratio=1, overflow="fold")
            table.add_row(*(self.shades.cell(self.texts[row], self.losses[row]) for row in part))
            console.print(table)


def exact(text: bytes) -> str:
    """Text for JSON; bytes that are no UTF-8 become lone surrogates, from which Python's surrogateescape makes them again."""
    return text.decode("utf-8", "surrogateescape")
