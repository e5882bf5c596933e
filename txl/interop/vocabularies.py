"""Other people's vocabularies as ours: the authors' `Vocab`, which NVIDIA's code and Hugging Face's tokenizer took over."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl.data.bpe import BPE
from txl.data.vocab import NEWLINE, Bytes, Characters, Vocabulary, from_state
from txl.data.words import Words
from txl.interop import pickles
from txl.interop.pickles import Inert, Unreadable

UNKNOWN = ("<unk>", "<UNK>")


@dataclass(frozen=True)
class Known:
    """A vocabulary; `order`: for each of its tokens, the number that it has in the other code, where they differ."""

    vocab: Vocabulary
    order: list[int] | None = None


def from_symbols(symbols: Sequence[Any], *, lower_case: bool = False) -> Known:
    """The vocabulary of a list of symbols in the order of their numbers.

    Words, with <eos> at each line's end or, where there is <S> in its place, <S> around each line; the bytes of the authors'
    enwik8, written as decimal numbers; the characters of their text8, where `_` is the blank. Raises ValueError for a list
    that is none of these.
    """
    if not symbols or not all(isinstance(symbol, str) and symbol and "\n" not in symbol for symbol in symbols):
        raise ValueError("--vocab: holds no list of symbols")
    if len(set(symbols)) < len(symbols):
        raise ValueError("--vocab: holds a symbol twice")
    unknown = next((word for word in UNKNOWN if word in symbols), None)
    for eos, first in (("<eos>", False), ("<S>", True)):
        if eos in symbols:
            options = dict(lower_case=lower_case, unknown=unknown, eos=eos, eos_first=first)
            return Known(Words(**options, words="\n".join(symbols)))
    if all(symbol.isdecimal() and int(symbol) < 256 for symbol in symbols):
        return _bytes([int(symbol) for symbol in symbols])
    if all(len(symbol) == 1 and symbol.isascii() for symbol in symbols):
        return _bytes([ord(" " if symbol == "_" else symbol) for symbol in symbols])
    raise ValueError(
        "--vocab: its symbols are neither words with <eos> or <S>, nor enwik8's numbers of bytes, nor single characters"
    )


def _bytes(values: list[int]) -> Known:
    order = sorted(range(len(values)), key=values.__getitem__)
    symbols = sorted(values)
    return Known(Bytes(only_seen=True, newlines=NEWLINE in symbols, symbols=symbols), order)


def found(where: Any) -> Known | None:
    """The vocabulary in a file, or in what a pickle held: a `Vocab`, a `Corpus` that has one, a tokenizer's attributes, the
    state of one of ours; else None.

    Raises ValueError for a file that holds none, and for one whose symbols are not understood.
    """
    if isinstance(where, Path):
        return read(where)
    if isinstance(where, dict) and "kind" in where:
        return _of_state(where)
    return _of_object(where)


def _of_state(state: dict[str, Any]) -> Known:
    try:
        return Known(from_state(state))
    except ValueError as error:
        raise ValueError(f"--vocab: {error}") from error


def _of_object(value: Any) -> Known | None:
    if pickles.is_a(value, "Corpus"):
        value = value.get("vocab")
    if pickles.is_a(value, "OpenAIVocab"):
        raise ValueError("--vocab: the checkpoint's tokens are GPT-2's; give --vocab tokenizer.json, GPT-2's own")
    attributes = value.attributes if isinstance(value, Inert) else value
    if isinstance(attributes, Mapping) and isinstance(attributes.get("idx2sym"), list):
        return from_symbols(attributes["idx2sym"], lower_case=bool(attributes.get("lower_case")))
    return None


def read(path: Path) -> Known:
    """The vocabulary in a file: what another code pickled, our vocab.json, a tokenizer.json, or a list, a symbol a line.

    Raises ValueError for a file that is none of these.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ValueError(f"--vocab: cannot read {path} ({error.strerror})") from error
    if start.startswith((b"PK", b"\x80")):
        try:
            held = _of_object(pickles.read(path))
        except Unreadable as error:
            raise ValueError(f"--vocab: {path}: {error}") from error
        if held is None:
            raise ValueError(f"--vocab: {path} holds no vocabulary")
        return held
    try:
        text = path.read_text("utf-8")
        if not text.startswith("{"):
            return from_symbols([line.split()[0] for line in text.split("\n") if line.split()])
        state = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"--vocab: {path} is neither text nor a pickle") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--vocab: {path} is no JSON") from error
    return _of_state(state) if "kind" in state else Known(BPE(file=str(path)).fit([]))


def group_of(vocab: Vocabulary) -> str:
    """The option of `data/vocab=` that makes such a vocabulary."""
    return {Bytes: "bytes", Characters: "characters", Words: "words", BPE: "bpe"}[type(vocab)]
