"""A prompt loop: each line is read after all that was said before, which stays in the model's memory."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from txl.data.encoding import Encoder
from txl.generation import Reader, Sampling, encode_prompt, pieces, sample_seed
from txl.printing import Output, Shades
from txl.signals import StopSignals, leave
from txl.signature import call_problems

AT_ONCE = 256  # tokens of a line that are read at a time
BETWEEN = b"\n---\n"  # in what is saved, where the memory was emptied
EXAMPLES = {"temperature": "0.7", "top_p": "0.9", "top_k": "40", "max_new_tokens": "200", "seed": "1"}
HELP = """a line             text for the model to continue; its line end is no part of it. An empty line: the model goes on
//...              text that begins with /
/reset             empties the memory and begins with the seed again: the next line is the first
/save FILE         writes all that was said and generated so far, byte for byte, to a new file
/temperature 0.7   also /top_p 0.9, /top_k 40, /max_new_tokens 200, /seed 1; null: no top_p, no top_k; alone: what it is
/help              this
/quit              or Ctrl-D: the end. Ctrl-C ends a text that is being written, at other times the program"""


class Conversation:
    """A text that a user and a model write in turn, each token of which is read once.

    What is said in a turn is read after all before it, token by token as what is generated: each token sees the mem_len
    tokens before it; only the first is read as a prompt is, in segments. The text that ended a turn (`stops`) is not shown,
    but is a part of what was said.
    """

    def __init__(
        self,
        reader: Reader,
        encoder: Encoder,
        sampling: Sampling,
        *,
        seed: int,
        stops: list[bytes],
        shades: Shades,
    ):
        self.reader, self.encoder, self.sampling, self.seed = reader, encoder, sampling, seed
        self.stops, self.shades = stops, shades
        self.said = [b""]  # since the start and since each reset
        self.reset()

    def reset(self) -> None:
        """Forgets all, as if nothing had been said."""
        self.texts = None
        self.unread: list[int] = []  # the token that was drawn last, which nothing was predicted from yet
        self.generator = sample_seed(self.seed, 0)
        if self.said[-1]:
            self.said.append(b"")

    def say(self, text: bytes) -> None:
        """Reads a text and writes what follows, until it ends or Ctrl-C ends it.

        Raises ValueError for a text that the vocabulary cannot take; nothing is read then.
        """
        begins = self.texts is None
        tokens = encode_prompt(self.encoder, text)[0] if text or begins else None
        further = self.unread + ([] if tokens is None else tokens.tolist())
        with StopSignals() as stop:  # no layer reads a token that another does not
            if begins:
                self.texts = self.reader.begin([tokens], room=AT_ONCE)
            elif further:
                self.texts.extend([further])
            self.unread = []
            self.said[-1] += text or (b"\n" if begins else b"")
            output = Output([(text, 0)], format="text", seed=self.seed, shades=self.shades)
            made = pieces(
                self.texts,
                self.sampling,
                [self.generator],
                decode=self._drawn,
                stops=self.stops,
                interrupted=lambda: stop.received is not None,
            )
            for piece in made:
                output.add(*piece)
        if stop.received not in (None, signal.SIGINT):
            leave(stop.received)

    def _drawn(self, tokens: list[int]) -> bytes:
        """The text of a token that was just drawn."""
        self.unread = tokens
        text = self.encoder.vocab.decode(tokens)
        self.said[-1] += text
        return text

    def save(self, name: str) -> str:
        """Writes what was said to a new file. Raises ValueError where there is nothing, or the file is there already."""
        said = BETWEEN.join(part for part in self.said if part)
        if not name:
            raise ValueError("/save: name a file, as in /save out.txt")
        if not said:
            raise ValueError("/save: nothing was said yet")
        try:
            with open(Path(name).expanduser(), "xb") as file:
                file.write(said)
        except FileExistsError:
            raise ValueError(f"/save: {name} is there already; name another file") from None
        except OSError as error:
            raise ValueError(f"/save: cannot write {name} ({error.strerror}); name another file") from error
        return f"{len(said)} bytes written to {name}"

    def set(self, name: str, word: str) -> str:
        """Changes how tokens are drawn from now on, or says how they are. Raises ValueError for a value that is none."""
        if word:
            value, example = _value(word), f"; as in /{name} {EXAMPLES[name]}"
            if name == "seed":
                if not isinstance(value, int) or value < 0:
                    raise ValueError(f"seed: must be a whole number of at least 0, got {word}{example}")
                self.seed, self.generator = value, sample_seed(value, 0)
            else:
                if wrong := next(call_problems(Sampling, {**vars(self.sampling), name: value}, ""), None):
                    raise ValueError(f"{wrong}{example}")
                try:
                    self.sampling = replace(self.sampling, **{name: value})
                except ValueError as error:
                    raise ValueError(f"{error}{example}") from error
        value = self.seed if name == "seed" else getattr(self.sampling, name)
        return f"{name}: {'null' if value is None else value}"

    def command(self, name: str, word: str) -> str:
        """Does what stands behind a `/` and returns what to say of it. Raises ValueError with what to type instead."""
        if name in EXAMPLES:
            return self.set(name, word)
        if name == "save":
            return self.save(word)
        if name not in ("reset", "help", "quit"):
            raise ValueError(f"/{name}: there is no such command; /help lists them, and //{name} is text")
        if word:
            raise ValueError(f"/{name}: takes no value; type /{name} alone")
        if name == "help":
            return HELP
        self.reset()
        return "the memory is empty"


def converse(conversation: Conversation, first: bytes | None) -> None:
    """Reads `first`, then lines until they end: texts and commands. Standard output gets what is generated, and nothing else."""
    if first is not None:
        conversation.say(first)
    for line in lines():
        command = line[:1] == b"/" != line[1:2]
        try:
            if not command:
                conversation.say(line[1:] if line[:2] == b"//" else line)
                continue
            name, _, word = line[1:].decode("utf-8", "surrogateescape").strip().partition(" ")
            if (name, word) == ("quit", ""):
                return
            print(conversation.command(name, word.strip()), file=sys.stderr, flush=True)
        except ValueError as error:
            print(error, file=sys.stderr, flush=True)


def lines() -> Iterator[bytes]:
    """What is typed or piped, without line ends."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin.buffer:
            yield line.removesuffix(b"\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, which makes `input` an editor
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt) as end:
            print(flush=True)
            if isinstance(end, EOFError):
                return
            raise
        yield os.fsencode(line)


def _value(word: str) -> str | int | float | None:
    """A number, or null, as it is typed; any other word as it is."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return None if word == "null" else word
