"""Vocabularies: text to token numbers and back. All options of `data/vocab` stand here.

Each offers the same: `fit` learns it from the pieces of a text, `encode` and `decode` go there and back, `sizes` says how
many bytes each token stands for, `place` where a block of text may be cut, `state` is all of it as plain JSON.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from txl.data.text import character_border, word_border
from txl.signature import call_problems

UNKNOWN = "<unk>"
NEWLINE = ord("\n")
LINE_END_OR_WORD = re.compile(r"\r\n|\r|\n|\S+")
LONG_WORD = re.compile(r"\S{1000}(?=\S)|\s{1000}(?=\s)")
BYTE_ORDER_MARK = re.compile(r"(?:\A|(?<=[\r\n]))\ufeff")


def _read(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _write(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class Bytes:
    """Each byte is a token: 256 of them, any text in any language, exact in both directions.

    `only_seen`: only the bytes of the training text, in their order; another one is an error. `newlines=False` leaves
    line ends out of the text, as the authors' enwik8 does (204 tokens where the file has 205 bytes).
    """

    def __init__(self, *, only_seen: bool = False, newlines: bool = True, symbols: list[int] | None = None):
        self.only_seen, self.newlines, self.symbols = only_seen, newlines, symbols
        if symbols is not None and (sorted(set(symbols)) != symbols or not all(0 <= byte < 256 for byte in symbols)):
            raise ValueError("data.vocab.symbols: must be distinct bytes in their order")
        kept = range(256) if symbols is None else symbols
        self._bytes = np.array([byte for byte in kept if newlines or byte != NEWLINE], dtype=np.uint8)
        self._numbers = np.full(256, -1, dtype=np.int16)
        self._numbers[self._bytes] = np.arange(len(self._bytes))

    @property
    def n_token(self) -> int:
        return len(self._bytes)

    @property
    def fitted(self) -> bool:
        return not self.only_seen or self.symbols is not None

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "Bytes":
        """The bytes of the text, where only those seen are asked for."""
        if self.fitted:
            return self
        seen = sorted(set().union(*mapped(set, pieces)))
        return Bytes(only_seen=True, newlines=self.newlines, symbols=seen)

    def _kept(self, text: bytes) -> np.ndarray:
        values = np.frombuffer(text, dtype=np.uint8)
        return values if self.newlines else values[values != NEWLINE]

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        """The token numbers. Raises ValueError for a byte that the training text does not have."""
        tokens = self._numbers[self._kept(text)]
        if (tokens < 0).any():
            raise ValueError(
                f"data.vocab.only_seen: training showed no byte {self.unknown(text)[0]!a}; false takes all"
            )
        return tokens.astype(np.uint8)

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        return np.ones(len(self._kept(text)), dtype=np.int64)

    def decode(self, tokens: Iterable) -> bytes:
        return bytes(self._bytes[np.fromiter(map(int, tokens), dtype=np.int64)])

    def unknown(self, text: bytes) -> list[str]:
        """The bytes of the text that the vocabulary lacks, as the characters of their numbers."""
        return sorted(map(chr, {*self._kept(text).tolist()} - {*self._bytes.tolist()}))

    def place(self, block: bytes) -> int:
        return word_border(block) or len(block)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        if not self.only_seen and self.newlines:
            return {"kind": "bytes"}
        return {"kind": "bytes", "only_seen": self.only_seen, "newlines": self.newlines, "symbols": self.symbols}


class Characters:
    """Each character of the training text is a token, in the order of code points, after `<unk>` for all others.

    The text is read as UTF-8; a byte that is no UTF-8 counts as a character of its own (Python's surrogateescape), so
    that such text comes back exactly too. `<unk>` decodes to U+FFFD.
    """

    def __init__(self, *, characters: str | None = None):
        self.characters = characters or ""
        if list(self.characters) != sorted(set(self.characters)):
            raise ValueError("data.vocab.characters: must be distinct, in the order of their code points")
        _write(self.characters)  # a UnicodeEncodeError, which is a ValueError, for half a character
        self._codes = self._points(self.characters)

    @staticmethod
    def _points(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)

    @staticmethod
    def _seen(text: bytes) -> set[str]:
        return set(_read(text))

    @property
    def n_token(self) -> int:
        return 1 + len(self.characters)

    @property
    def fitted(self) -> bool:
        return bool(self.characters)

    def fit(self, pieces: Iterable[bytes], mapped: Callable = map) -> "Characters":
        """The characters of the text, unless they were given."""
        if self.fitted:
            return self
        return Characters(characters="".join(sorted(set().union(*mapped(self._seen, pieces)))))

    def encode(self, text: bytes, closes: bool = True) -> np.ndarray:
        points = self._points(_read(text))
        places = np.searchsorted(self._codes, points).clip(max=len(self._codes) - 1)
        return np.where(self._codes[places] == points, places + 1, 0).astype(np.int64)

    def sizes(self, text: bytes, closes: bool = True) -> np.ndarray:
        points = self._points(_read(text))
        escaped = (points >= 0xDC80) & (points <= 0xDCFF)
        length = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        return np.where(escaped, 1, length)

    def decode(self, tokens: Iterable) -> bytes:
        alphabet = ["\ufffd", *self.characters]
        return _write("".join(alphabet[int(token)] for token in tokens))

    def unknown(self, text: bytes) -> list[str]:
        """The characters of the text that the vocabulary lacks, in code point order."""
        return sorted(set(_read(text)) - set(self.characters))

    def place(self, block: bytes) -> int:
        return word_border(block) or character_border(block)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to make this vocabulary again: plain JSON."""
        return {"kind": "characters", "characters": self.characters}


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
        _write(words or "")  # a UnicodeEncodeError, which is a ValueError, for half a character
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
        read = _read(text)
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
            raise ValueError(f"data.vocab.unknown: training never showed the word {word!a}, and there is no <unk>")
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
        places = np.cumsum([0, *Characters().sizes(text)])[[0, *ends]]
        return np.diff(places)

    def decode(self, tokens: Iterable) -> bytes:
        words = (self.words[int(token)] for token in tokens)
        return _write("".join("\n" if word == self.eos else f"{word} " for word in words))

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

        try:
            tokenizer = Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"data.vocab.file: no tokenizer.json that can be read ({error})") from error
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
        tokenizer, _ = (
            self._tokenizer,
            self._texts,
        )  # the latter before to_str(), which takes its time over high numbers
        described = json.loads(tokenizer.to_str())
        steps = described["pre_tokenizer"] or {}
        kinds = [step["type"] for step in steps.get("pretokenizers", [steps]) if step]
        if described["model"]["type"] != "BPE" or "ByteLevel" not in kinds or described["normalizer"]:
            raise ValueError("data.vocab.file: only byte-level BPE without a normalizer gives the text back exactly")
        if missing := set(_byte_letters()) - tokenizer.get_vocab().keys():
            raise ValueError(f"data.vocab.file: the tokenizer lacks {len(missing)} of the 256 bytes")

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
                return BPE(tokenizer=Path(self.file).read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"data.vocab.file: cannot read {self.file} ({error})") from error
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
    """The text as stretches of UTF-8, each with the stray bytes that follow it."""
    for match in re.finditer("([^\udc80-\udcff]*)([\udc80-\udcff]*)", _read(text)):
        yield match[1], _write(match[2])


Vocabulary = Bytes | Characters | Words | BPE
KINDS = {"bytes": Bytes, "characters": Characters, "words": Words, "bpe": BPE}


def from_state(state: Any) -> Vocabulary:
    """Makes the vocabulary that `state()` described. Raises ValueError for one that is not known, not fitted or damaged."""
    kind = state.get("kind") if isinstance(state, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"checkpoint: its vocabulary is of the unknown kind {kind!r}")
    try:
        given = {key: value for key, value in state.items() if key not in ("kind", "file")}
        if wrong := next(call_problems(KINDS[kind], given, ""), None):
            raise ValueError(wrong[:200])
        vocab = KINDS[kind](**given)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"checkpoint: its vocabulary is damaged ({error})") from error
    if not vocab.fitted or vocab.n_token < 1:
        raise ValueError(f"checkpoint: its vocabulary holds no {kind}")
    return vocab


def fingerprint(vocab: Vocabulary) -> str:
    """The sha256 of the vocabulary: two runs can be compared, or continued, where it is equal."""
    return hashlib.sha256(json.dumps(vocab.state(), sort_keys=True).encode()).hexdigest()
