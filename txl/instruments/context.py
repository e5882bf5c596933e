"""The loss by the number of tokens seen before, by memory length and by clamp_len."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from txl import checkpoint
from txl.evaluation import figure
from txl.instruments.subject import Subject
from txl.instruments.taking import picture, token_nll
from txl.model import TransformerXL
from txl.reading import reach_of
from txl.settings import TRAINED

BINS = 32  # at most
OFTEN = 30  # a picture leaves out what is seen so seldom that its mean is noise
AT_ONCE = 2**20  # places that are counted at a time


@dataclass(frozen=True, kw_only=True)
class Context:
    """Reads the split once for each pair of `mem_lens` and `clamp_lens`, as the plain figure does, and says which is best.

        seen(p) = min(p, mem_len + p mod tgt_len),    with same_length: min(p, mem_len - 1)    (Dai et al. 2019, section 3.2)

    That is how many tokens before its own the first layer sees from place p of a lane, or of a document beyond which no
    memory reaches; the layers above see further through it. For a compressive memory mem_len is all that it may span.
    What is found: `seen`, the edges of the bins (seen[k] <= seen(p) < seen[k + 1]); `settings`, for each pair its figures
    (mem_len, clamp_len, same_length, nll, ppl, bits_per_token, bits_per_byte, tokens, bytes) and, by bin, `tokens_by_seen`,
    `nll_by_seen` and `error_by_seen`, its standard error (nats, null in an empty bin); `best`, the pair of the lowest nll.
    `max_segments` ends each lane after as many segments. Raises ValueError for a length below 1, for one given twice, and for a pair the model cannot be read with.
    """

    mem_lens: list[int | None]
    clamp_lens: list[int | None]
    max_segments: int | None

    def __post_init__(self):
        for name in ("mem_lens", "clamp_lens"):
            lengths = getattr(self, name)
            if not lengths or len(set(lengths)) < len(lengths):
                raise ValueError(f"{name}: must be one or more different lengths, got {lengths}")
            for length in lengths:
                if length is not None and not 1 <= length < 2**31:
                    raise ValueError(f"{name}: each must be at least 1 and below 2^31, or null; got {length}")
        if self.max_segments is not None and self.max_segments < 1:
            raise ValueError(f"max_segments: must be at least 1, or null for all; got {self.max_segments}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads with one pair after the other; a pair that is not through leaves nothing."""
        pairs = list(itertools.product(self.mem_lens, self.clamp_lens))
        edges = self._edges(subject, [outline(subject, *pair) for pair in pairs])
        for name in ("mem_len", "clamp_len"):  # each pair has its own
            found.pop(name, None)
        found |= {"max_segments": self.max_segments, "seen": edges.tolist(), "settings": [], "best": None}
        nll = np.empty(len(subject.split.tokens) - 1)
        for done, (mem_len, clamp_len) in enumerate(pairs):
            model = subject.model(mem_len=mem_len, clamp_len=clamp_len)
            for share in token_nll(model, subject, nll, max_segments=self.max_segments):
                if share < 1:
                    yield (done + share) / len(pairs)
            found["settings"].append(self._figures(model, subject, nll, edges))
            best = min(found["settings"], key=lambda one: one["nll"])
            found["best"] = {name: best[name] for name in ("mem_len", "clamp_len", "nll", "ppl")}
            yield (done + 1) / len(pairs)

    def _lane_len(self, subject: Subject) -> tuple[int, int]:
        """The targets of a lane, and how many of them are scored."""
        lane_len = -(-(len(subject.split.tokens) - 1) // subject.batch_size)
        return lane_len, min(lane_len, (self.max_segments or lane_len) * subject.tgt_len)

    def _edges(self, subject: Subject, models: list[TransformerXL]) -> np.ndarray:
        """Borders of bins that hold all that any of the models sees: whole numbers, then ever longer stretches."""
        _, scored_len = self._lane_len(subject)
        longest = min(scored_len - 1, max(sight(model, subject.tgt_len - 1) for model in models))
        return np.unique([0, *np.geomspace(1, longest + 1, BINS).round().astype(int)])

    def _figures(self, model: TransformerXL, subject: Subject, nll: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
        """What one reading of the split has given."""
        lane_len, scored_len = self._lane_len(subject)
        sums, squares, counts = (
            np.zeros(len(edges) - 1),
            np.zeros(len(edges) - 1),
            np.zeros(len(edges) - 1, dtype=np.int64),
        )
        for start in range(0, len(nll), AT_ONCE):
            places = np.arange(start, min(start + AT_ONCE, len(nll)))
            places = places[places % lane_len < scored_len]
            bins = np.searchsorted(edges, seen_before(model, subject, places, lane_len), side="right") - 1
            sums += np.bincount(bins, nll[places], len(sums))
            squares += np.bincount(bins, nll[places] ** 2, len(sums))
            counts += np.bincount(bins, minlength=len(counts))
        n_token = int(counts.sum())
        with np.errstate(invalid="ignore", divide="ignore"):  # bins that hold nothing
            means = sums / counts
            errors = np.sqrt(np.maximum(squares / counts - means**2, 0.0) / counts)
        return {
            "mem_len": model.memory.mem_len,
            "clamp_len": model.position.clamp_len,
            "same_length": model.same_length,
            **figure(float(sums.sum()), n_token, subject.split.count_bytes(1, 1 + n_token)),
            "tokens_by_seen": counts.tolist(),
            "nll_by_seen": [None if np.isnan(mean) else mean for mean in means.tolist()],
            "error_by_seen": [None if np.isnan(error) else error for error in errors.tolist()],
        }

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """The loss by what is seen, for each memory at the best clamp_len; and each reading's nll."""
        with picture(path, 2, size=(8.0, 8.0)) as ((by_seen,), (by_length,)):
            by_seen.set(xlabel="tokens before the input that the first layer sees", ylabel="nll (nats per token)")
            by_length.set(xlabel="mem_len (tokens)", ylabel=f"nll of {found['split']} (nats per token)")
            if found["best"] is not None:
                self._draw_by_seen(found, by_seen)
                self._draw_by_length(found, by_length)

    def _draw_by_seen(self, found: dict[str, Any], axes: Any) -> None:
        from matplotlib import colormaps
        from matplotlib.ticker import ScalarFormatter

        edges, clamp_len = np.array(found["seen"]), found["best"]["clamp_len"]
        middles, first = (edges[:-1] + edges[1:] - 1) / 2, edges[-1]
        for one in found["settings"]:
            if one["clamp_len"] != clamp_len:
                continue
            counts = np.array(one["tokens_by_seen"])
            nll, error = (np.array(one[f"{name}_by_seen"], dtype=float) for name in ("nll", "error"))
            often = counts >= OFTEN * np.diff(edges)  # else it is the text's beginning
            if often.any():
                first = min(first, middles[often][0])
            colour = colormaps["viridis"](self.mem_lens.index(one["mem_len"]) / len(self.mem_lens))
            axes.plot(middles[often], nll[often], ".-", color=colour, label=f"mem_len {named(one['mem_len'])}")
            axes.fill_between(
                middles[often], (nll - error)[often], (nll + error)[often], color=colour, alpha=0.2, linewidth=0
            )
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0.9 * first - 0.2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.legend(fontsize="small", ncols=1 + len(self.mem_lens) // 8)
        words = f"what was seen at least {OFTEN} times; its standard error"
        axes.set_title(f"clamp_len {named(clamp_len)}; {words}", fontsize="medium")

    def _draw_by_length(self, found: dict[str, Any], axes: Any) -> None:
        for clamp_len in self.clamp_lens:
            points = [
                (self.mem_lens.index(one["mem_len"]), one["nll"])
                for one in found["settings"]
                if one["clamp_len"] == clamp_len
            ]
            axes.plot(*zip(*points, strict=True) if points else ([], []), "o-", label=f"clamp_len {named(clamp_len)}")
        best = found["best"]
        label = f"best: mem_len {named(best['mem_len'])}, clamp_len {named(best['clamp_len'])}, nll {best['nll']:.4f}"
        axes.plot(self.mem_lens.index(best["mem_len"]), best["nll"], "k*", markersize=14, label=label)
        axes.set_xticks(range(len(self.mem_lens)), [named(mem_len) for mem_len in self.mem_lens])
        axes.legend(fontsize="small")

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The best pair, and a warning where it was not chosen on the valid split."""
        chosen = {"split": found["split"], "best": found["best"]}
        if found["split"] == "valid":
            return chosen
        return {**chosen, "warning": f"chosen on {found['split']}: choose on split=valid, then measure split=test once"}


def outline(subject: Subject, mem_len: int | None, clamp_len: int | None) -> TransformerXL:
    """The model as it would be read, without its weights. Raises ValueError, with the key, where it cannot be so read."""
    for key in ("mem_len", "clamp_len"):
        if subject.asked[key] != TRAINED:
            raise ValueError(f"{key}: this measure reads with each of measure.{key}s; leave {key} at {TRAINED}")
    try:
        reading = {"mem_len": mem_len, "clamp_len": clamp_len, "same_length": subject.asked["same_length"]}
        config = checkpoint.model_config(subject.content["config"]["model"], **reading)
    except ValueError as error:
        raise ValueError(f"measure.clamp_lens: [null] alone is possible ({error})") from error
    with torch.device("meta"):
        return checkpoint.construct(config)


def seen_before(model: TransformerXL, subject: Subject, places: np.ndarray, lane_len: int) -> np.ndarray:
    """How many tokens before its own the first layer sees from these places of the split."""
    before = in_lane = places % lane_len
    if subject.split.borders is not None:
        begins = np.concatenate([[0], subject.split.borders])
        before = np.minimum(before, places - begins[np.searchsorted(begins, places, side="right") - 1])
    return np.minimum(before, sight(model, in_lane % subject.tgt_len))


def sight(model: TransformerXL, place: int | np.ndarray) -> int | np.ndarray:
    """How many tokens before its own a layer sees at the most from these places of a segment."""
    same = model.same_length and model.memory.mem_len is not None
    return reach_of(model) + (0 if same else place)


def named(length: int | None) -> str:
    """A length as a picture names it."""
    return "none" if length is None else str(length)
