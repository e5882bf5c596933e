"""Learning from a text while it is scored: gradients segment by segment, as in training but without dropout."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from txl import checkpoint, runs
from txl.data.encoding import Split
from txl.data.streams import Lanes, ScoredLane, ScoredSegment, Segment, scoring_segments
from txl.instruments.subject import Subject, other_text
from txl.model import TransformerXL
from txl.reading import Segments
from txl.runtime import autocast, to_device

Scored = tuple[ScoredSegment, Float[Tensor, "b i"]]  # a segment and the nll of its targets
Update = Callable[[Sequence[Tensor | None]], None]  # what the gradient, parameter by parameter, does to the weights


def adapting(model: TransformerXL, subject: Subject, lanes: list[ScoredLane], update: Update) -> Iterator[Scored]:
    """Reads the lanes by segments of tgt_len and updates the weights after each, once its nll was handed out."""
    split, reader = subject.split, Segments(model, tgt_len=subject.tgt_len)
    for segment in scoring_segments(split.tokens, lanes, length=subject.tgt_len, borders=split.borders):
        nll = nll_of(model, reader, segment, subject.precision)
        yield segment, nll.detach()
        update(gradient(model, nll, segment.scored))


def training_lanes(subject: Subject) -> Lanes:
    """The training text in lanes, side by side. Raises ValueError for a text too short for them."""
    text = training_text(subject)
    try:
        return Lanes(text.tokens, batch_size=subject.batch_size, tgt_len=subject.tgt_len, borders=text.borders)
    except ValueError as error:
        raise ValueError(f"batch_size: measure.rule=rms reads training text too, and {error}") from error


def add_squares(
    squares: list[Tensor], model: TransformerXL, subject: Subject, lanes: Lanes, n_segment: int
) -> Iterator[float]:
    """Adds to `squares`, parameter by parameter, those of the gradients of the first segments of training text.

    Yields the share that is done; a segment's gradient is of its mean nll.
    """
    reader = Segments(model, tgt_len=subject.tgt_len)
    for number, segment in enumerate(itertools.islice(lanes, n_segment), 1):
        if segment.begins:
            reader = Segments(model, tgt_len=subject.tgt_len)
        scored = torch.ones_like(segment.tokens, dtype=torch.bool)
        parts = gradient(model, nll_of(model, reader, segment, subject.precision), scored)
        for square, part in zip(squares, parts, strict=True):
            if part is not None:
                square.addcmul_(part, part)
        yield number / n_segment


def nll_of(
    model: TransformerXL, reader: Segments, segment: Segment | ScoredSegment, precision: str
) -> Float[Tensor, "b i"]:
    """The nll of a segment's targets, with what its gradient needs."""
    device = next(model.parameters()).device
    starts = None if segment.starts is None else to_device(segment.starts, device)
    with autocast(device, precision):
        return model.softmax.nll(reader.read(segment.tokens, starts=starts), segment.targets)


def gradient(model: TransformerXL, nll: Float[Tensor, "b i"], scored: Bool[Tensor, "b i"]) -> tuple[Tensor | None, ...]:
    """The gradient of the mean nll of what is scored, parameter by parameter; None for what has no part in it."""
    mean = nll.where(to_device(scored, nll.device), 0.0).sum() / int(scored.sum())
    return torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)


def training_text(subject: Subject) -> Split:
    """The training split; the run's own where `data.` gives another text for the split that is scored."""
    other = other_text(subject.asked)
    if not {"valid", "test"} & other.keys():
        return subject.corpus.split("train", subject.vocab)
    other = {key: value for key, value in other.items() if key not in ("valid", "test")}
    data = runs.other_text(subject.content["config"]["data"], other, "train")
    return checkpoint.construct(data, cache_dir=subject.asked["cache_dir"]).split("train", subject.vocab)
