"""How texts are shown: the colour says the probability, and no character is cut."""

import io
import math
import re
import sys

import pytest

from txl.printing import Output, Shades

CODE = re.compile(rb"\x1b\[30;48;5;(\d+)m(.*?)\x1b\[0m", re.DOTALL)


@pytest.fixture
def shades():
    return Shades(256, "always")


def test_the_colour_goes_from_green_to_red_as_the_probability_falls(shades):
    """Equal steps of nll; a guess among all tokens is as red as anything worse; what nothing predicts has no colour."""
    losses = [0.0, *(math.log(256) * part / 4 for part in range(1, 5)), 50.0, math.nan]
    painted, used = shades.painted(b"abcdefg", losses)
    assert used == 7 and painted.endswith(b"\x1b[0mg")
    colours = [int(colour) for colour, _ in CODE.findall(painted)]
    rgb = [((colour - 16) // 36, (colour - 16) // 6 % 6, (colour - 16) % 6) for colour in colours]
    assert [red for red, _, _ in rgb] == sorted(red for red, _, _ in rgb)
    assert [green for _, green, _ in rgb] == sorted((green for _, green, _ in rgb), reverse=True)
    assert rgb[0][1] > rgb[0][0] and rgb[4][0] > rgb[4][1] and rgb[4] == rgb[5] and len(set(rgb)) >= 4


def test_a_character_of_several_tokens_has_the_colour_of_their_mean(shades):
    text = "é日".encode() + b"\xffz"
    one, _ = shades.painted(text, [0.0, 4.0, 1.0, 2.0, 3.0, 1.0, 2.0])
    two, _ = shades.painted(b"abcd", [2.0, 2.0, 1.0, 2.0])
    assert [colour for colour, _ in CODE.findall(one)] == [colour for colour, _ in CODE.findall(two)]
    assert [shown for _, shown in CODE.findall(one)] == ["é".encode(), "日".encode(), b"\xff", b"z"]


def test_a_character_is_written_once_it_is_whole(shades, monkeypatch):
    """However the bytes come; a line end is not coloured, and at the end of the text nothing is kept back."""
    for text in ("é日\n".encode(), b"a\xe6\x97", b"\xe6\x97a"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
        output, seen = Output([(b"", 0)], format="text", seed=1, shades=shades), []
        for byte in text:
            output.add(0, bytes([byte]), [1.0])
            seen.append(sys.stdout.buffer.getvalue())
        output.add(0, None)
        written = sys.stdout.buffer.getvalue()
        assert re.sub(rb"\x1b\[[0-9;]*m", b"", written) == text + b"\n"
        assert b"m\n" in written if text.endswith(b"\n") else True
        for part in seen if text.endswith(b"\n") else []:
            re.sub(rb"\x1b\[[0-9;]*m", b"", part).decode()


def test_a_terminal_without_colours_gets_none(monkeypatch):
    for name, value, coloured in (("TERM", "dumb", False), ("NO_COLOR", "1", True), ("TERM", "xterm-256color", True)):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm-256color")
            patch.setenv(name, value)
            terminal = io.TextIOWrapper(io.BytesIO())
            terminal.isatty = lambda: True
            patch.setattr(sys, "stdout", terminal)
            assert (b"\x1b" in Shades(256, True).painted(b"a", [1.0])[0]) == coloured
            assert Shades(256, False).painted(b"a", [1.0])[0] == b"a"
