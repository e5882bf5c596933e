"""Generation: prompts are read once, in long segments; then each new token costs one token, for many texts side by side."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl.data.encoding import Encoder
from txl.data.text import Piece
from txl.data.vocab import Vocabulary, Words
from txl.model import TransformerXL
from txl.reading import Cache, Segments, cache_bytes, reach_of, stair_of
from txl.runtime import autocast, threads, to_device

ONE_THREAD = 2**24  # multiplications, up to which waking a second thread costs more than its help is worth
PROMPT_AT_ONCE = 1024  # tokens of a prompt that are read at a time
ROWS_AT_ONCE, CACHE_BYTES = 64, 2**31  # texts that are continued side by side, and what their keys and values may take


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from log p.

    temperature t: p^(1/t), renormalised; 0 takes the most probable token. top_k: only the k most probable (Fan et al.
    2018). top_p: only the fewest tokens that together have probability p (Holtzman et al. 2020, section 3.1), at least
    one. Both are taken after the temperature, top_k first. Raises ValueError for values outside their range.
    """

    max_new_tokens: int = 500
    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None

    def __post_init__(self):
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: must be at least 0, got {self.max_new_tokens}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature: must be at least 0 (0 is greedy), got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, or null for all tokens; got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must lie in (0, 1], or be null for all tokens; got {self.top_p}")

    def draw(self, log_probs: Float[Tensor, "v"], generator: torch.Generator) -> int:
        """One token. Computed on the CPU, so that a seed gives the same text on every device that gives the same log p."""
        log_probs = log_probs.detach().cpu().double()
        if self.temperature == 0:
            return int(log_probs.argmax())
        scores = (log_probs - log_probs.max()) / self.temperature  # the best at 0, so that no temperature overflows
        tokens = None
        if self.top_k is not None and self.top_k < len(scores):
            scores, tokens = scores.topk(self.top_k)
        probabilities = scores.softmax(dim=0)
        if self.top_p is not None:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            before = probabilities.cumsum(dim=0) - probabilities
            probabilities = probabilities[: int((before < self.top_p).sum())]
            tokens = order if tokens is None else tokens[order]
        drawn = int(torch.multinomial(probabilities, 1, generator=generator))
        return drawn if tokens is None else int(tokens[drawn])


class Reader:
    """Reads prompts, and then the tokens that continue them, with keys and values cached: one more token costs one token.

    Each token sees mem_len tokens before it (mem_len - 1 with same_length); in the prompt, mem_len before its stair of
    `context` tokens, as in training with segments of that length. A model without memory sees the last `context` tokens.
    Where keys do not last (`TransformerXL.keys_last`), a text is read by segments of `context`, the last of them anew for
    each token.
    `n_token` is that of the vocabulary, where the model has room for more: those are never drawn. `documents`, for a model
    whose memory was reset at documents, says where one begins.
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        context: int,
        n_token: int | None = None,
        precision: str = "fp32",
        documents: Encoder | None = None,
    ):
        self.model, self.context, self.n_token = model.eval(), context, n_token
        self.precision, self.documents = precision, documents
        self.device = next(model.parameters()).device

    def begin(
        self, prompts: Sequence[Int[Tensor, "_"]], copies: Sequence[int] | None = None, *, room: int = 1
    ) -> "Texts | RecentTexts | SegmentTexts":
        """Reads prompts of one token or more, of any lengths; each is then continued once, or `copies` times, side by side.

        `room`: how many further tokens of each are read at a time; for more of them it only takes longer.
        """
        copies = [1] * len(prompts) if copies is None else copies
        if not self.model.keys_last:
            return SegmentTexts(self, repeated(prompts, copies))
        if self.model.memory.mem_len is None:
            return RecentTexts(self, repeated(prompts, copies))
        return Texts(self, prompts, copies, room=room)

    @torch.inference_mode()
    def read_segment(
        self, segments: Segments, tokens: Int[Tensor, "b i"], starts: Bool[Tensor, "b i"] | None
    ) -> Float[Tensor, "b v"]:
        """log p of the token after a segment, which becomes the memory of the next."""
        starts = None if starts is None else to_device(starts, self.device)
        with autocast(self.device, self.precision):
            hidden = segments.read(tokens, starts=starts)
            return self.model.softmax.log_prob(hidden[:, -1:])[:, 0, : self.n_token]

    @torch.inference_mode()
    def predict(
        self, cache: Cache, tokens: Int[Tensor, "b i"], starts: Bool[Tensor, "b i"] | None, *, stair: int
    ) -> Float[Tensor, "b v"]:
        """log p of the token after those that are read."""
        starts = None if starts is None else to_device(starts, self.device)
        small = self.device.type == "cpu" and self._work(cache, tokens) <= ONE_THREAD
        with threads(1 if small else torch.get_num_threads()), autocast(self.device, self.precision):
            hidden = cache.read(tokens, starts=starts, stair=stair)
            return self.model.softmax.log_prob(hidden[:, -1:])[:, 0, : self.n_token]

    def _work(self, cache: Cache, tokens: Int[Tensor, "b i"]) -> int:
        """The multiplications of the largest product in a layer: scores over the window, or the feed-forward network."""
        layer = self.model.layers[0]
        return tokens.numel() * max(
            layer.attention.q_net.weight.shape[0] * (cache.length + 1), layer.feedforward.inner.weight.numel()
        )


def repeated(rows: Sequence[Any], copies: Sequence[int]) -> list[Any]:
    """Each row as often as `copies` says."""
    return [row for row, times in zip(rows, copies, strict=True) for _ in range(times)]


class Borders:
    """Marks where documents begin in texts that are read side by side, however few tokens at a time."""

    def __init__(self, documents: Encoder | None, n_batch: int):
        self.documents = documents
        self.ends: list[tuple[int, ...]] = [()] * n_batch  # of what was read of each document, as long as a separator

    def mark(self, row: int, tokens: Sequence[int]) -> list[bool]:
        """Which tokens begin a document, in the text of this row, after those that were marked before."""
        marks, end = [], self.ends[row]
        for number in tokens:
            marks.append(self.documents.begins(end, number))
            end = (number,) if marks[-1] else (*end, number)[-len(self.documents.separator) :]
        self.ends[row] = end
        return marks


class Texts:
    """Texts that are continued side by side, each as if it were alone; `log_probs` are those of their next tokens."""

    def __init__(self, reader: Reader, prompts: Sequence[Int[Tensor, "_"]], copies: Sequence[int], *, room: int):
        self.reader, self.borders, self.room = reader, Borders(reader.documents, len(prompts)), room
        caches, log_probs = zip(*(self._alone(*row) for row in enumerate(prompts)), strict=True)
        self.borders.ends = repeated(self.borders.ends, copies)
        self.log_probs = torch.cat(repeated(log_probs, copies))
        self.cache = Cache.join(caches, copies, room=room)

    def _alone(self, row: int, prompt: Int[Tensor, "_"]) -> tuple[Cache, Float[Tensor, "1 v"]]:
        """A prompt as it is read without the others, in long segments."""
        reader, context = self.reader, self.reader.context
        length = -(-PROMPT_AT_ONCE // context) * context
        cache = Cache(reader.model, reach=reach_of(reader.model), room=max(self.room, min(length, len(prompt))))
        starts = None if reader.documents is None else torch.tensor([self.borders.mark(row, prompt.tolist())])
        for segment in (slice(place, place + length) for place in range(0, len(prompt), length)):
            marks = None if starts is None else starts[:, segment]
            log_probs = reader.predict(cache, prompt[None, segment], marks, stair=stair_of(reader.model, context))
        return cache, log_probs

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Reads further tokens of each text, as many of each."""
        tokens, starts = torch.tensor(rows), None
        if self.reader.documents is not None:
            starts = torch.tensor([self.borders.mark(row, further) for row, further in enumerate(rows)])
        for place in range(0, tokens.shape[1], self.room):
            part = slice(place, place + self.room)
            marks = None if starts is None else starts[:, part]
            self.log_probs = self.reader.predict(self.cache, tokens[:, part], marks, stair=1)


class RecentTexts:
    """`Texts` of a model without memory: of each, the last `context` tokens are read again once there are more of them."""

    def __init__(self, reader: Reader, prompts: Sequence[Int[Tensor, "_"]]):
        self.reader, context = reader, reader.context
        self.borders = Borders(reader.documents, len(prompts))
        self.cache = Cache(reader.model, reach=context, room=context)
        self.recent = [prompt.tolist() for prompt in prompts]
        self.marks = [self._mark(row, prompt) for row, prompt in enumerate(self.recent)]
        self._read_again()

    def _mark(self, row: int, tokens: Sequence[int]) -> list[bool]:
        if self.reader.documents is None:
            return [False] * len(tokens)
        return self.borders.mark(row, tokens)

    def _read_again(self) -> None:
        """What a text lacks in length is filled up, as another document."""
        context = self.reader.context
        self.recent, self.marks = ([row[-context:] for row in rows] for rows in (self.recent, self.marks))
        longest = max(map(len, self.recent))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in self.recent])
        starts = [[False] * (longest - len(row)) + [True, *row[1:]] for row in self.marks]
        self.cache.clear()
        self.log_probs = self.reader.predict(self.cache, tokens, torch.tensor(starts), stair=1)

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Reads further tokens of each text, as many of each."""
        for row, further in enumerate(rows):
            self.recent[row] += further
            self.marks[row] += self._mark(row, further)
        n_token = len(rows[0])
        if self.cache.stop + n_token > self.reader.context:
            self._read_again()
            return
        starts = torch.tensor([row[-n_token:] for row in self.marks])
        self.log_probs = self.reader.predict(self.cache, torch.tensor(rows), starts, stair=1)


class SegmentTexts:
    """`Texts` of a model whose keys do not last: of each, the segment that is not full yet is read again for each token.

    A text is in a segment of its own, whatever the others' lengths, so each is read as if it were alone.
    """

    def __init__(self, reader: Reader, prompts: Sequence[Int[Tensor, "_"]]):
        self.reader, self.borders = reader, Borders(reader.documents, len(prompts))
        self.segments = [Segments(reader.model, tgt_len=reader.context) for _ in prompts]
        self.recent: list[list[int]] = [[] for _ in prompts]
        self.marks: list[list[bool]] = [[] for _ in prompts]
        read = [self._read(row, prompt.tolist()) for row, prompt in enumerate(prompts)]
        self.log_probs = torch.cat(read)

    def _read(self, row: int, tokens: Sequence[int]) -> Float[Tensor, "1 v"]:
        """log p after more tokens of a text; whole segments are read for good, the rest of it until there are more."""
        recent, marks, segments = self.recent[row], self.marks[row], self.segments[row]
        recent += tokens
        marks += [False] * len(tokens) if self.reader.documents is None else self.borders.mark(row, tokens)
        while True:
            whole = slice(self.reader.context)
            starts = None if self.reader.documents is None else torch.tensor([marks[whole]])
            before = segments.mems
            log_probs = self.reader.read_segment(segments, torch.tensor([recent[whole]]), starts)
            if len(recent) < self.reader.context:
                segments.mems = before
                return log_probs
            del recent[whole], marks[whole]
            if not recent:
                return log_probs

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Reads further tokens of each text, as many of each."""
        self.log_probs = torch.cat([self._read(row, further) for row, further in enumerate(rows)])


def borders_for(encoder: Encoder, resets: bool) -> Encoder | None:
    """What tells a `Reader` where documents begin, for a model whose memory was reset there; warns where nothing can."""
    if not resets or encoder.separator is None:
        return None
    if not encoder.sees_borders:
        print(
            "warning: the vocabulary has no token for data.document_separator: memory goes on past it", file=sys.stderr
        )
        return None
    return encoder


def encode_prompt(encoder: Encoder, prompt: bytes) -> Int[Tensor, "1 _"]:
    """The prompt's tokens, document by document as in training; an empty prompt is a newline.

    Raises ValueError for characters that the vocabulary lacks, and for words where it has none for the unknown; else it
    warns of them.
    """
    prompt = prompt or b"\n"
    check_known(encoder.vocab, prompt)
    tokens = encoder(Piece(prompt, begins=True, closes=False)).tokens.astype("int64")
    if not len(tokens):
        raise ValueError("prompt: holds nothing that the checkpoint's vocabulary knows")
    return torch.from_numpy(tokens)[None]


def check_known(vocab: Vocabulary, prompt: bytes) -> None:
    """Raises ValueError for what the vocabulary lacks, or warns where it has a word for all that."""
    if unknown := vocab.unknown(prompt):
        names = ", ".join(map(repr, unknown[:5])) + (" and more" if len(unknown) > 5 else "")
        if not isinstance(vocab, Words) or not vocab.takes_unknown:
            raise ValueError(f"prompt: the checkpoint's vocabulary lacks {names}")
        print(f"warning: prompt: the checkpoint's vocabulary lacks {names}", file=sys.stderr)


def generate(
    texts: Texts | RecentTexts | SegmentTexts, sampling: Sampling, generators: Sequence[torch.Generator]
) -> Iterator[list[int]]:
    """The tokens that continue each text, one of each at a time; every text has a generator of its own."""
    for remaining in range(sampling.max_new_tokens, 0, -1):
        log_probs = texts.log_probs.cpu()
        tokens = [sampling.draw(row, generator) for row, generator in zip(log_probs, generators, strict=True)]
        yield tokens
        if remaining > 1:
            texts.extend([[token] for token in tokens])


def pieces(
    texts: Texts | RecentTexts | SegmentTexts,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    *,
    decode: Callable[[list[int]], bytes],
    stops: Sequence[bytes] = (),
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, bytes | None, list[float]]]:
    """What `generate` makes as text: the number of a row, its next piece, and the nll of the token that each byte comes from.

    None in place of a piece is the end of a text, before the first of `stops` to begin in it. Each token is decoded once.
    The nll (nats) is the model's own, whatever the temperature. All texts end once they are `interrupted`.
    """
    untils, losses = [Until(stops) for _ in generators], [[] for _ in generators]

    def passed(row: int, piece: bytes) -> tuple[int, bytes, list[float]]:
        own = losses[row][: len(piece)]
        del losses[row][: len(piece)]
        return row, piece, own

    for tokens in generate(texts, sampling, generators):
        log_probs = texts.log_probs[list(range(len(tokens))), tokens].tolist()
        for row, (until, token) in enumerate(zip(untils, tokens, strict=True)):
            if not until.ended:
                piece = decode([token])
                losses[row] += [-log_probs[row]] * len(piece)
                yield passed(row, until.feed(piece))
                if until.ended:
                    yield row, None, []
        if interrupted() or all(until.ended for until in untils):
            break
    for row, until in enumerate(untils):
        if not until.ended:
            yield passed(row, until.finish())
            yield row, None, []


def sample_seed(seed: int, sample: int) -> torch.Generator:
    """The generator of one of several samples: it does not depend on how many are drawn or how long the others are."""
    return torch.Generator().manual_seed((seed * 1_000_003 + sample) % 2**63)


class Until:
    """Passes pieces of text on, as early as they cannot belong to a stop text, and ends before the first to begin."""

    def __init__(self, stops: Sequence[bytes]):
        self.stops, self.held, self.ended = stops, b"", False
        self.longest = max(map(len, stops), default=1)

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on after one more piece."""
        if self.ended:
            return b""
        text = self.held + piece
        found, begun = self._found(text), self._begun(text)
        if found is not None and found <= begun:  # none that is still incomplete begins before it
            self.ended, self.held = True, b""
            return text[:found]
        self.held = text[begun:]
        return text[:begun]

    def finish(self) -> bytes:
        """What was held back, when no more text comes."""
        rest = self.held[: self._found(self.held)]
        self.held, self.ended = b"", True
        return rest

    def _found(self, text: bytes) -> int | None:
        """Where the first whole stop text begins."""
        return min((place for stop in self.stops if (place := text.find(stop)) >= 0), default=None)

    def _begun(self, text: bytes) -> int:
        """Where the end of the text may be the beginning of a stop text."""
        places = range(max(0, len(text) - self.longest + 1), len(text))
        return next((place for place in places if any(stop.startswith(text[place:]) for stop in self.stops)), len(text))


def rows_at_once(model: TransformerXL, context: int) -> int:
    """How many texts are continued side by side: as many as fill the machine, if the keys and values have room."""
    kept = context if model.memory.mem_len is None else model.memory.mem_len * 5 // 4
    return max(1, min(ROWS_AT_ONCE, CACHE_BYTES // cache_bytes(model, kept + 1)))
