"""Byte-pair encoding: tokens that are learned, and exact in both directions."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from txl.data.text import PIECE, characters, utf8

STRETCH = re.compile(f"([^\udc80-\udcff]{{0,{2 * PIECE}}})([\udc80-\udcff]*)")
LONG_WORD = re.compile(r"\S{1000}(?=\S)|\s{1000}(?=\s)")


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE (Radford et al. 2019): itself if it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class BPE:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019, section 2.2) by Hugging Face `tokenizers`.

    `max_size` tokens are learned from the training split, pairs seen at least `min_freq` times, or all is read from
    `file`, a tokenizer.json. `special_tokens` are texts that are always one token. Exact in both directions for any
    bytes: what is no UTF-8 goes byte by byte. Raises ValueError for a tokenizer that would not give the text back.
    """

    def __init__(
        self,
        *,
        max_size: int = 16384,
        min_freq: int = 2,
        special_tokens: list[str] = (),
        file: str | None = None,
        tokenizer: str | None = None,
    ):
        if max_size < 256 + len(special_tokens):
            raise ValueError(f"data.vocab.max_size: must hold the 256 bytes and special_tokens; got {max_size}")
        if min_freq < 1:
            raise ValueError(f"data.vocab.min_freq: must be at least 1, got {min_freq}")
        if not all(special_tokens):
            raise ValueError("data.vocab.special_tokens: must not be empty texts")
        self.max_size, self.min_freq, self.special_tokens = max_size, min_freq, list(special_tokens)
        self.file, self.json = file, tokenizer
        if tokenizer is not None:
            self._check()

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        with _told("no tokenizer.json that can be read"):
            tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _texts(self) -> list[bytes]:
        """The bytes of each token."""
        letters, vocabulary = _byte_letters(), self._tokenizer.get_vocab(with_added_tokens=True)
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        last = max(vocabulary.values(), default=-1)
        if last > 1000 + 2 * len(vocabulary):
            raise ValueError(f"data.vocab.file: its {len(vocabulary):,} tokens are numbered up to {last:,}")
        texts = [b""] * (last + 1)
        for token, number in vocabulary.items():
            if token not in added and not letters.keys() >= set(token):
                raise ValueError(
                    f"data.vocab.file: {token!r} stands for no bytes; only byte-level BPE gives the text back"
                )
            texts[number] = token.encode() if token in added else bytes(letters[letter] for letter in token)
        return texts

    def _check(self) -> None:
        tokenizer, n_token = self._tokenizer, self.n_token  # the latter refuses high numbers, which to_str() would list
        described = json.loads(tokenizer.to_str())
        steps = described["pre_tokenizer"] or {}
        kinds = [step["type"] for step in steps.get("pretokenizers", [steps]) if step]
        if described["model"].get("dropout"):
            raise ValueError(
                "data.vocab.file: a tokenizer with dropout gives other tokens each time; set it to null there"
            )
        if described["model"]["type"] != "BPE" or "ByteLevel" not in kinds or described["normalizer"]:
            raise ValueError("data.vocab.file: only byte-level BPE without a normalizer gives the text back exactly")
        if missing := set(_byte_letters()) - tokenizer.get_vocab().keys():
            raise ValueError(f"data.vocab.file: the {n_token:,} tokens lack {len(missing)} of the 256 bytes")

    @property
    def n_token(self) -> int:
        return len(self._texts)

    @property
    def fitted(self) -> bool:
        return self.json is not None or self.file is not None

    @staticmethod
    def _sentences(text: bytes) -> list[str]:
        """What is UTF-8 of a text, in parts where a word is very long: learning takes the square of its length."""
        return LONG_WORD.sub("\\g<0>\ud800", text.decode("utf-8", "ignore")).split("\ud800")  # which no text holds

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "BPE":
        """Learns the pairs of the text, or reads the file that was given."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if self.json is not None:
            return self
        if self.file is not None:
            try:
                described = Path(self.file).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                words = getattr(error, "strerror", None) or "not UTF-8"
                raise ValueError(f"data.vocab.file: cannot read {self.file} ({words})") from error
            return BPE(tokenizer=described)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.max_size,
            min_frequency=self.min_freq,
            special_tokens=self.special_tokens,
            initial_alphabet=sorted(_byte_letters()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(self._sentences, pieces), trainer)
        return BPE(tokenizer=tokenizer.to_str())

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        """The token numbers. Raises ValueError if they would not give the text back."""
        numbers = []
        for valid, stray in _stretches(text):
            with _told("the tokenizer fails on this text"):
                numbers += self._tokenizer.encode(valid, add_special_tokens=False).ids if valid else []
            numbers += [self._byte_numbers[byte] for byte in stray]
        if b"".join(map(self._texts.__getitem__, numbers)) != text:
            raise ValueError("data.vocab.file: this tokenizer does not give the text back; only byte-level BPE does")
        return np.array(numbers, dtype=np.int64)

    @cached_property
    def _byte_numbers(self) -> dict[int, int]:
        return {byte: self._tokenizer.token_to_id(letter) for letter, byte in _byte_letters().items()}

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        return np.array([len(self._texts[number]) for number in self.encode(text)], dtype=np.int64)

    def decode(self, tokens: Iterable) -> bytes:
        return b"".join(self._texts[int(token)] for token in tokens)

    def unknown(self, text: bytes) -> list[str]:
        """Nothing: every byte is a token."""
        return []

    def place(self, block: bytes) -> int:
        """Before a space between two ASCII letters or digits, where GPT-2's own cuts fall too; else after a line end."""
        stop = max(len(block) - max(map(len, self._spaced), default=0), 0)  # what follows may be the beginning of one
        start = max(stop - 4096, 0)
        words = [match.end() for match in re.finditer(rb"[A-Za-z0-9](?= [A-Za-z0-9])", block[start:stop])]
        place = start + words[-1] if words else block.rfind(b"\n", 0, stop) + 1
        around = (block.find(special, max(0, place - len(special) + 1)) for special in self._spaced)
        return min([place, *(found for found in around if found >= 0)])

    @cached_property
    def _spaced(self) -> list[bytes]:
        """The special tokens that a cut might fall into."""
        if self.json is None:
            special = self.special_tokens
        else:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        return [text.encode() for text in special if any(map(str.isspace, text))]

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        if self.json is not None:
            return {"kind": "bpe", "tokenizer": self.json}
        return {
            "kind": "bpe",
            **dict(max_size=self.max_size, min_freq=self.min_freq, special_tokens=self.special_tokens),
        }


def _stretches(text: bytes) -> Iterable[tuple[str, bytes]]:
    """The text as stretches of UTF-8, each with the stray bytes that follow it; none so long that it takes much memory."""
    for match in STRETCH.finditer(characters(text)):
        yield match[1], utf8(match[2])


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns the library's ways to fail into one ValueError: a bare Exception, or a panic, which is none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"data.vocab.file: {what} ({' '.join(str(error).split())[:200]})") from error
