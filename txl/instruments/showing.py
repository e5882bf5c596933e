"""How instruments show what they found: what tokens stand for, readable whatever bytes they are; files and figures."""

import codecs
import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from txl.data.vocab import Vocabulary
from txl.instruments.taking import ENDINGS, picture

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line end


def readable(text: bytes) -> str:
    r"""Bytes as text: what is no UTF-8, and each control character but tab and line end, as \xNN."""
    return _without_control(text.decode("utf-8", "backslashreplace"))


def _without_control(text: str) -> str:
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def token_texts(vocab: Vocabulary) -> list[str]:
    """What each token of the vocabulary stands for."""
    return [readable(vocab.decode([token])) for token in range(vocab.n_token)]


def whole_characters(vocab: Vocabulary, tokens: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """Cuts tokens where no character is cut: the first of each group, the one after its last, and their text."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    first, text, stop = 0, "", 0
    for stop, token in enumerate(tokens, start=1):
        text += decoder.decode(vocab.decode([token]))
        if not decoder.getstate()[0]:  # no character is begun
            yield first, stop, _without_control(text)
            first, text = stop, ""
    if first < stop:
        yield first, stop, _without_control(text + decoder.decode(b"", final=True))


def beside(out: Path, suffix: str) -> Path:
    """The file that stands beside a measurement's JSON, under its name."""
    assert suffix in ENDINGS, suffix
    return out.with_suffix(suffix)


@contextlib.contextmanager
def canvas(path: Path, *, size: tuple[float, float]) -> Iterator[Any]:
    """An empty figure, for pictures whose parts differ in size; saved when it is left.

    Its text may be anybody's: characters that the font lacks are boxes, without a warning for each.
    """
    with warnings.catch_warnings(), picture(path, size=size) as axes:
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure = axes[0, 0].figure
        axes[0, 0].remove()
        yield figure
