"""Dynamic evaluation: the model goes on learning from the text that it is scored on, each segment after it was scored."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from txl.data.streams import ScoredLane, ScoredSegment
from txl.data.vocab import BPE
from txl.evaluation import figure, losses, plan
from txl.instruments.adapting import Scored, adapting, add_squares, training_lanes
from txl.instruments.subject import Subject
from txl.instruments.taking import picture
from txl.model import TransformerXL
from txl.reading import stair_of
from txl.runtime import to_device

EVERY = 1.0  # seconds between two figures of what was read so far
POINTS = 100  # stretches of the text that are compared
LEARNING = 4.0  # about how many times as long it takes to learn from a token as to read it


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """The figure of a model that adapts to the text as it reads it (Krause et al. 2018; of this model, arXiv 1904.08378, section 3).

        sgd:  w <- w - lr g - decay (w - w_0)
        rms:  w <- w - lr g / (sqrt(s) + epsilon) - min(decay sqrt(s), 1) (w - w_0),    s = sum of g^2 over training text

    g is the gradient of a segment's mean nll, followed once the segment was scored; w_0 are the checkpoint's weights; s is
    summed over `statistics` segments of the training text, read with w_0. Lanes, segments and carried memory are those of
    `evaluate.py`, without dropout. Only the nll teaches, and the checkpoint stays as it is. With lr 0 nothing changes, and the
    text is read as `evaluate.py` reads it: the figure is the same bit for bit. `max_segments` ends each lane early. Raises
    ValueError for numbers out of bounds, for fp16, and once the nll is no longer finite.
    """

    rule: Literal["sgd", "rms"]
    lr: float | int
    decay: float | int
    epsilon: float | int
    statistics: int
    max_segments: int | None

    def __post_init__(self):
        for name in ("lr", "decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be at least 0, got {getattr(self, name)}")
        if self.rule == "sgd" and self.decay > 1:
            raise ValueError(f"decay: must be at most 1 with rule=sgd, got {self.decay}")
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon: must be above 0, got {self.epsilon}")
        for name in ("statistics", "max_segments"):
            if (value := getattr(self, name)) is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name}: must be at least 1 and below 2^31, got {value}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads the split with the weights as they are, then training text if need be, then the split while adapting to it."""
        if self.lr and subject.precision == "fp16":
            raise ValueError("precision: gradients in fp16 would have to be scaled; take bf16 or fp32")
        training = training_lanes(subject) if self.lr and self.rule == "rms" else None
        found |= {"settings": asdict(self), "along": {"tokens": [], "dynamic": [], "static": []}}
        model, n_target = subject.model(), len(subject.split.tokens) - 1
        limits = dict(tgt_len=subject.tgt_len, batch_size=subject.batch_size, max_segments=self.max_segments)
        how = dict(stair=stair_of(model, subject.tgt_len), precision=subject.precision)
        lanes = plan(model, n_target, warmed=1, **limits).lanes
        static, dynamic = (Tally(subject, model, lanes) for _ in range(2))

        def as_it_is() -> Iterator[Scored]:
            return losses(model, subject.split, plan(model, n_target, **limits), **how)

        phases = [(1.0, static.read(as_it_is(), found, "static"))]
        if self.lr:
            update = Rule(self, model)
            if training is not None:
                cost = LEARNING * self.statistics * subject.batch_size * subject.tgt_len / static.n_target
                phases.append((cost, add_squares(update.squares, model, subject, training, self.statistics)))
            adapted = adapting(model, subject, lanes, update)
            phases.append((LEARNING, dynamic.read(adapted, found, "dynamic", beside=static)))
        else:  # the weights stay, so that segments need not be read one by one
            phases.append((1.0, dynamic.read(as_it_is(), found, "dynamic", beside=static)))
        yield from in_turn(phases)

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The dynamic figure, and the static one."""
        names = ("nll", "ppl", "bits_per_byte")
        both = {"": found["dynamic"], "static_": found["static"]}
        return {f"{prefix}{name}": figures[name] for prefix, figures in both.items() for name in names}

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """The nll along the text, both ways, and what adapting has gained up to each place."""
        tokens, dynamic, static = (np.array(found["along"][name]) for name in ("tokens", "dynamic", "static"))
        end = np.cumsum(tokens)
        with picture(path, columns=2) as axes:
            nll_axis, gain_axis = axes[0]
            nll_axis.plot(end, static, label="static", color="tab:gray")
            nll_axis.plot(end, dynamic, label=f"dynamic ({found['settings']['rule']}, lr {found['settings']['lr']:g})")
            nll_axis.set(title="nll along the text", ylabel="nats per token")
            nll_axis.margins(y=0.25)
            gain_axis.axhline(0.0, color="tab:gray", linewidth=1)
            gain_axis.plot(end, np.cumsum((dynamic - static) * tokens) / end, color="tab:green", label="so far")
            gain_axis.plot(end, dynamic - static, ".", color="tab:green", alpha=0.3, label="each stretch")
            gain_axis.set(title="dynamic minus static", ylabel="nats per token (below 0: better)")
            for axis in axes[0]:
                axis.set(xlabel="tokens read")
                axis.legend(loc="upper right" if axis is nll_axis else "best")
                axis.grid(alpha=0.3)


class Rule:
    """Changes the weights by a gradient as `Dynamic` says; what they were when it was made is w_0."""

    def __init__(self, how: Dynamic, model: TransformerXL):
        self.how, self.weights = how, list(model.parameters())
        self.start = [weight.detach().clone() for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.start] if how.rule == "rms" else []

    @cached_property
    def factors(self) -> list[tuple[Tensor | float, Tensor | float]]:
        """How far each weight follows the gradient, and how far it is pulled back, once the `squares` are added up."""
        how = self.how
        if how.rule == "sgd":
            return [(float(how.lr), float(how.decay))] * len(self.weights)
        sizes = [square.sqrt() for square in self.squares]
        return [(how.lr / (size + how.epsilon), (how.decay * size).clamp(max=1.0)) for size in sizes]

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        for weight, start, part, (rate, pull) in zip(self.weights, self.start, gradients, self.factors, strict=True):
            if part is not None:
                weight -= rate * part + pull * (weight - start)


class Tally:
    """The nll of what was read: its sum, added up as `txl.evaluation.total_nll` does, and of each stretch of the lanes."""

    def __init__(self, subject: Subject, model: TransformerXL, lanes: list[ScoredLane]):
        self.subject, self.model = subject, model
        self.lane_len = -(-(len(subject.split.tokens) - 1) // subject.batch_size)
        self.n_target = sum(lane.end - lane.first for lane in lanes)
        self.n_segment = -(-max(lane.end - lane.first for lane in lanes) // subject.tgt_len)
        self.n_stretch = min(POINTS, self.n_segment)
        self.total, self.n_token = 0.0, 0
        self.sums, self.counts = np.zeros(self.n_stretch), np.zeros(self.n_stretch, dtype=np.int64)

    def read(
        self, pairs: Iterator[Scored], found: dict[str, Any], key: str, beside: "Tally | None" = None
    ) -> Iterator[float]:
        """Adds up all pairs and yields the share that is read; found[key] is the figure of it, from a second ago or less.

        found["along"] holds the nll of each stretch that is whole, and what it was `beside`. Raises ValueError if a nll is not finite.
        """
        last = -math.inf
        for segment, nll in pairs:
            self.add(segment, nll)
            if beside is not None and not math.isfinite(self.total):
                words = f"after {self.n_token} tokens of the text the nll is no longer finite"
                raise ValueError(f"measure.lr: {words}; take a lower rate, or more measure.decay")
            if (now := time.monotonic()) - last > EVERY or self.n_token == self.n_target:
                last, found[key] = now, self.figure()
                if beside is not None:
                    found["along"] = self.along(beside)
            yield self.n_token / self.n_target

    def add(self, segment: ScoredSegment, nll: Float[Tensor, "b i"]) -> None:
        scored = segment.scored
        values = nll.cpu().double() if nll.device.type == "mps" else nll.double()
        self.total += float(values.where(to_device(scored, values.device), 0.0).sum())
        self.n_token += int(scored.sum())
        column = segment.places[scored].numpy() % self.lane_len // self.subject.tgt_len
        stretch = column * self.n_stretch // self.n_segment
        self.sums += np.bincount(stretch, values.cpu()[scored].numpy(), self.n_stretch)
        self.counts += np.bincount(stretch, minlength=self.n_stretch)

    def along(self, beside: "Tally") -> dict[str, list]:
        """The tokens and the mean nll of each stretch that is through."""
        whole = (self.counts == beside.counts) & (self.counts > 0)
        counts, sums = self.counts[whole], {"dynamic": self.sums[whole], "static": beside.sums[whole]}
        return {"tokens": counts.tolist(), **{name: (total / counts).tolist() for name, total in sums.items()}}

    def figure(self) -> dict[str, Any]:
        """What `evaluate.py` would say, of the tokens read by now."""
        split, n_token = self.subject.split, self.n_token
        n_word = split.count_words(1, 1 + n_token) if isinstance(split.vocab, BPE) else None
        return {
            **figure(self.total, n_token, split.count_bytes(1, 1 + n_token), n_word),
            "split": split.name,
            "mem_len": self.model.memory.mem_len,
            "clamp_len": self.model.position.clamp_len,
            "same_length": self.model.same_length,
            "tgt_len": self.subject.tgt_len,
            "batch_size": self.subject.batch_size,
        }


def in_turn(phases: list[tuple[float, Iterator[float]]]) -> Iterator[float]:
    """Goes through one phase after the other, each with its cost; yields the share of all that is done."""
    before, whole = 0.0, sum(cost for cost, _ in phases)
    for cost, phase in phases:
        for share in phase:
            yield (before + cost * share) / whole
        before += cost
