"""Generation: a prompt is read once, then each new token costs one step; the memory carries what came before."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from txl.data.encoding import Encoder
from txl.data.text import Piece
from txl.data.vocab import Words
from txl.runtime import autocast


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
        scores, tokens = scores.sort(descending=True, stable=True)
        scores, tokens = scores[: self.top_k], tokens[: self.top_k]
        probabilities = scores.softmax(dim=0)
        if self.top_p is not None:
            before = probabilities.cumsum(dim=0) - probabilities
            kept = int((before < self.top_p).sum())
            probabilities, tokens = probabilities[:kept], tokens[:kept]
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True)
class Read:
    """A text as the model has read it: log p of the token after it, and the memory; continued as often as one likes."""

    log_probs: Float[Tensor, "v"]
    mems: list[Float[Tensor, "1 _ m"]]
    recent: Int[Tensor, "1 _"]  # without a memory the last tokens, which are all that the next one sees
    starts: Bool[Tensor, "1 _"] | None = None  # where documents begin in them
    document: tuple[int, ...] = ()  # the last tokens of the document that is being read, as many as a separator has


class Reader:
    """Reads tokens with the memory carried. A model without memory is given the last `context` tokens again each time.

    `documents`, for a model whose memory was reset at documents, says where one begins.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: int,
        n_token: int | None = None,
        precision: str = "fp32",
        documents: Encoder | None = None,
    ):
        self.model, self.context, self.precision, self.documents = model.eval(), context, precision, documents
        self.n_token = n_token  # of the vocabulary, where the model has room for more: those are never drawn
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def read(self, tokens: Int[Tensor, "1 _"], after: Read | None = None) -> Read:
        """Reads one token or more, in segments of at most `context`, after what was read before."""
        tokens, after = tokens.cpu(), after or Read(torch.empty(0), [], tokens[:, :0].cpu())
        starts, document = self._starts(tokens, after.document)
        if self.model.memory.mem_len is None:
            recent = torch.cat([after.recent, tokens], dim=1)[:, -self.context :]
            if starts is not None and after.starts is not None:
                starts = torch.cat([after.starts, starts], dim=1)
            starts = None if starts is None else starts[:, -self.context :]
            log_probs, mems = self._forward(recent, None, starts)
        else:
            recent, mems = tokens[:, :0], after.mems
            for place in range(0, tokens.shape[1], self.context):
                segment = slice(place, place + self.context)
                marks = None if starts is None else starts[:, segment]
                log_probs, mems = self._forward(tokens[:, segment], mems, marks)
        return Read(log_probs[0, -1, : self.n_token], mems, recent, starts, document)

    def _starts(
        self, tokens: Int[Tensor, "1 i"], document: tuple[int, ...]
    ) -> tuple[Bool[Tensor, "1 i"] | None, tuple[int, ...]]:
        """Which tokens begin a document, after the end of the one before, and the end of the last one."""
        if self.documents is None:
            return None, ()
        marks, kept = [], len(self.documents.separator)
        for number in tokens[0].tolist():
            marks.append(self.documents.begins(document, number))
            document = (number,) if marks[-1] else (*document, number)[-kept:]
        return torch.tensor([marks]), document

    def _forward(
        self, tokens: Int[Tensor, "1 i"], mems: list[Tensor] | None, starts: Bool[Tensor, "1 i"] | None
    ) -> tuple[Float[Tensor, "1 i v"], list[Tensor]]:
        starts = None if starts is None else starts.to(self.device)
        with autocast(self.device, self.precision):
            return self.model(tokens.to(self.device), mems, starts=starts)


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
    prompt, vocab = prompt or b"\n", encoder.vocab
    if unknown := vocab.unknown(prompt):
        names = ", ".join(map(repr, unknown[:5])) + (" and more" if len(unknown) > 5 else "")
        if not isinstance(vocab, Words) or not vocab.takes_unknown:
            raise ValueError(f"prompt: the checkpoint's vocabulary lacks {names}")
        print(f"warning: prompt: the checkpoint's vocabulary lacks {names}", file=sys.stderr)
    tokens = encoder(Piece(prompt, begins=True, closes=False)).tokens.astype("int64")
    if not len(tokens):
        raise ValueError("prompt: holds nothing that the checkpoint's vocabulary knows")
    return torch.from_numpy(tokens)[None]


def generate(reader: Reader, prompt: Read, sampling: Sampling, generator: torch.Generator) -> Iterator[int]:
    """The tokens that continue what was read, one by one."""
    state = prompt
    for remaining in range(sampling.max_new_tokens, 0, -1):
        token = sampling.draw(state.log_probs, generator)
        yield token
        if remaining > 1:
            state = reader.read(torch.tensor([[token]]), state)


def sample_seed(seed: int, sample: int) -> torch.Generator:
    """The generator of one of several samples: it does not depend on how many are drawn or how long the others are."""
    return torch.Generator().manual_seed((seed * 1_000_003 + sample) % 2**63)


def until(pieces: Iterable[bytes], stop: bytes | None) -> Iterator[bytes]:
    """Passes pieces of text on, as early as they cannot belong to `stop`, and ends before it."""
    if not stop:
        yield from pieces
        return
    held = b""
    for piece in pieces:
        held += piece
        place = held.find(stop)
        if place >= 0:
            yield held[:place]
            return
        keep = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held
