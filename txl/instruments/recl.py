"""How long a context helps, among several checkpoints: the relative effective context length."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from txl.data.streams import ScoredLane
from txl.data.vocab import fingerprint
from txl.evaluation import AT_ONCE, AT_ONCE_ON_DEVICE, CACHE_ON_DEVICE, Plan, losses
from txl.instruments.subject import Subject
from txl.instruments.taking import picture
from txl.model import TransformerXL
from txl.reading import cache_bytes, reach_of, stair_of


@dataclass(frozen=True, kw_only=True)
class RECL:
    """Measures the relative effective context length of a checkpoint and those it stands `against` (Dai et al. 2019, appendix C).

        l_i(c, t) = -log P_i(x_t | the last c tokens),    b(c, t) = min_i l_i(c, t)
        f_i(c, c') = mean over T of min(b(c, t), l_i(c', t)),    T = the share r of the positions with the greatest b(c, t)
        g_i(c) = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c),    c' = c + step
        RECL_i = the first of c = step, 2 step, ... with g_i(c) < threshold

    It is at least the longest context c where the gain never falls below the threshold. Each context is read as the figure
    would read a text of c tokens: from an empty memory, by segments of tgt_len. So a token sees further at a segment's end
    than at its beginning; read with mem_len >= longest, or same_length, for gains that owe nothing to that. What is found:
    `models`, each one's settings; `positions`, the places t in the split; `contexts`, those c that are through; `nll`, for
    each model l_i(c, t) by context and position (nats), `mean_nll` by context; `ratios`, for each r the `gains` of each model
    by context but the last, and its `recl`: `tokens`, and whether that is `at_least`.
    Raises ValueError for values out of bounds, a split too short, and checkpoints that are the same or read other tokens.
    """

    against: list[str]
    positions: int
    step: int
    longest: int
    ratios: list[float | int]
    threshold: float | int

    def __post_init__(self):
        for name in ("positions", "step"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}: must be at least 1 and below 2^31, got {getattr(self, name)}")
        if not 2 * self.step <= self.longest < 2**31:
            raise ValueError(
                f"longest: must be at least two steps, {2 * self.step}, and below 2^31; got {self.longest}"
            )
        if not self.ratios or len(set(self.ratios)) < len(self.ratios) or not all(0 < r <= 1 for r in self.ratios):
            raise ValueError(f"ratios: must be different shares above 0 and at most 1, got {self.ratios}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold: must lie between 0 and 1, got {self.threshold}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads one context after the other with all models; a context that is not through leaves nothing."""
        group, models = self._group(subject)
        contexts = range(self.step, self.longest + 1, self.step)
        targets = self._targets(subject, contexts[-1])
        found |= {"models": {name: one.settings for name, one in group.items()}, "positions": targets.tolist()}
        found |= {"contexts": [], "ratios": [], "nll": {name: [] for name in group}}
        found["mean_nll"] = {name: [] for name in group}
        whole, done, due = sum(contexts) * len(targets) * len(group), 0, 0
        for context in contexts:
            due += context * len(targets) * len(group)
            losses_of = {name: np.empty(len(targets)) for name in group}
            for name, nll in losses_of.items():
                for n_token in nll_after(models[name], group[name], targets, context, nll):
                    done += n_token
                    if done < due:
                        yield done / whole
            found["contexts"].append(context)
            for name, nll in losses_of.items():
                found["nll"][name].append(nll.tolist())
                found["mean_nll"][name].append(float(nll.mean()))
            found["ratios"] = [self._lengths(found, ratio) for ratio in self.ratios]
            yield done / whole

    def _group(self, subject: Subject) -> tuple[dict[str, Subject], dict[str, TransformerXL]]:
        """The checkpoint and the others by the names they were given, all of the same tokens; and their models."""
        group = {subject.asked["checkpoint"]: subject}
        models = {subject.asked["checkpoint"]: subject.model()}
        for name in self.against:
            try:
                other = subject.other(name)
                models[name] = other.model()
            except ValueError as error:
                raise ValueError(f"measure.against: {name} cannot be read so ({error})") from error
            if any(other.path.samefile(one.path) for one in group.values()):
                raise ValueError(f"measure.against: {name} is in the group already")
            if fingerprint(other.vocab) != fingerprint(subject.vocab):
                raise ValueError(f"measure.against: {name} has another vocabulary; all must predict the same tokens")
            if not np.array_equal(other.split.tokens, subject.split.tokens):
                words = f"data.{subject.split.name}=FILE gives all the same"
                raise ValueError(f"measure.against: {name} reads another text; {words}")
            group[name] = other
        return group, models

    def _targets(self, subject: Subject, longest: int) -> Int[np.ndarray, "t"]:
        """The places of the tokens to be predicted, each after `longest` others."""
        n_token, name = len(subject.split.tokens), subject.split.name
        if n_token <= longest:
            raise ValueError(
                f"measure.longest: {longest} tokens of context leave none of the {n_token} of split={name}"
            )
        if n_token - longest < self.positions:
            most = n_token - longest
            raise ValueError(f"measure.positions: at most {most} of {name} stand after {longest} others")
        return np.linspace(longest, n_token - 1, self.positions).round().astype(np.int64)

    def _lengths(self, found: dict[str, Any], ratio: float) -> dict[str, Any]:
        """The gains and the lengths for one share of the positions, from the contexts that are through."""
        gains = relative_gains(np.array(list(found["nll"].values())), ratio)
        lengths = {}
        for name, gain in zip(found["nll"], gains, strict=True):
            (below,) = np.nonzero(gain < self.threshold)
            tokens = found["contexts"][below[0] if len(below) else -1]
            lengths[name] = {"tokens": tokens, "at_least": not len(below)}
        return {"ratio": ratio, "gains": dict(zip(found["nll"], gains.tolist(), strict=True)), "recl": lengths}

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """The loss by context and, for each share of the positions, the gains and where they fall below the threshold."""
        rows = (len(self.ratios) + 2) // 2
        with picture(path, rows, 2, size=(8.0, 0.5 + 3.2 * rows)) as grid:
            first, *others = grid.flat
            first.set(title="loss at all positions", xlabel="context (tokens)", ylabel="nll (nats per token)")
            for name, nll in found.get("mean_nll", {}).items():
                first.plot(found["contexts"], nll, ".-", label=shortened(name))
            if found.get("models"):
                first.legend(fontsize="small")
            for axes, one in zip(others, found.get("ratios", []), strict=False):
                self._draw_gains(found["contexts"], one, axes)
            for axes in others[len(self.ratios) :]:
                axes.set_axis_off()

    def _draw_gains(self, contexts: list[int], one: dict[str, Any], axes: Any) -> None:
        axes.set_title(
            f"gain at the hardest {100 * one['ratio']:.4g} %" if one["ratio"] < 1 else "gain at all positions"
        )
        axes.set(xlabel="context c (tokens)", ylabel=f"gain by {self.step} tokens more (%)")
        for name, gains in one["gains"].items():
            length = one["recl"][name]
            words = f"RECL {'at least ' if length['at_least'] else ''}{length['tokens']}"
            (line,) = axes.plot(contexts[:-1], [100 * gain for gain in gains], ".-", label=words)
            axes.axvline(length["tokens"], color=line.get_color(), linestyle=":", linewidth=1)
        axes.axhline(100 * self.threshold, color="grey", linestyle="--", linewidth=1)
        axes.legend(fontsize="small")

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The lengths, by share of the positions and by checkpoint; a warning of memories shorter than the contexts."""
        lengths = {str(one["ratio"]): one["recl"] for one in found["ratios"]}
        short = [name for name, one in found["models"].items() if (one["mem_len"] or self.longest) < self.longest]
        words = f"mem_len is shorter than measure.longest={self.longest}: a layer of {', '.join(short)} sees no further"
        return {"split": found["split"], "recl": lengths} | ({"warning": words} if short else {})


def nll_after(
    model: TransformerXL, subject: Subject, targets: Int[np.ndarray, "t"], context: int, nll: Float[np.ndarray, "t"]
) -> Iterator[int]:
    """Writes each target's nll (nats) after exactly `context` tokens; yields how many tokens were read, bit by bit."""
    stair = stair_of(model, subject.tgt_len)
    length = -(-min(context, subject.tgt_len) // stair) * stair
    room = CACHE_ON_DEVICE // cache_bytes(model, reach_of(model) + length)
    at_once = (AT_ONCE if subject.device.type == "cpu" else AT_ONCE_ON_DEVICE) // length
    for start in range(0, len(targets), n_lane := max(1, min(room, at_once))):
        chunk = targets[start : start + n_lane].tolist()
        read = Plan([ScoredLane(target - context, target - 1, target) for target in chunk], length)
        for segment, values in losses(model, subject.split, read, stair=stair, precision=subject.precision):
            if segment.scored.any():
                nll[start : start + len(chunk)] = values.cpu()[segment.scored].double().numpy()
            yield segment.tokens.numel()


def relative_gains(nll: Float[np.ndarray, "n c t"], ratio: float) -> Float[np.ndarray, "n c1"]:
    """g_i(c) of each model, for each context but the last, on the share of the positions that is hardest at c."""
    n_model, n_context, n_target = nll.shape
    gains = np.empty((n_model, n_context - 1))
    for c in range(n_context - 1):
        best = nll[:, c].min(axis=0)
        hardest = np.argsort(-best, kind="stable")[: max(1, round(ratio * n_target))]
        before, after = best[hardest], np.minimum(best, nll[:, c + 1])[:, hardest]
        gains[:, c] = 0.0 - np.expm1(after.mean(axis=1) - before.mean())
    return gains


def shortened(name: str) -> str:
    """A checkpoint as a picture names it: the end of its path."""
    return name if len(name) <= 30 else "…" + name[-29:]
