"""The vanilla sliding-window evaluation beside ours: time per token by context length, and the nll of the same tokens."""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from txl.data.encoding import Split
from txl.data.streams import ScoredLane, gather, marked
from txl.evaluation import Plan, losses
from txl.instruments.subject import Subject
from txl.instruments.taking import picture
from txl.reading import Cache, Segments, reader_of, stair_of
from txl.runtime import autocast, to_device

BURST = 0.25  # seconds of work between two looks at the clock
OURS = 2**12  # tokens that our way reads at the least, where the text has them: few take no time that can be measured


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """How much slower the vanilla sliding window is than segment recurrence (Dai et al. 2019, section 4.5, table 9).

        vanilla:  p(x_{t+1} | x_{t-L+1}, ..., x_t), L tokens read anew for each prediction    (Al-Rfou et al. 2019)
        ours:     segments of tgt_len with mem_len = L, keys and values kept

    Both are the same weights on the same targets, which begin once ours has read the longest of `lengths` (tokens); it is
    timed from there on, its memory full. The vanilla way has no memory and `batch` windows side by side, and predicts from
    the last state alone. Absolute positions are read by `txl.reading.Segments`: a window shorter than tgt_len as the
    beginning of a whole segment, so that it takes as long as one. Seconds are per token, the median of `repeats` in which
    the ways take turns; a nll is in nats. Raises ValueError for a number below 1, lengths that repeat and a text that is
    too short.
    """

    lengths: list[int]
    tokens: int
    repeats: int
    batch: int

    def __post_init__(self):
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths: must be one number or more, each once, got {self.lengths}")
        counts = {"tokens": self.tokens, "repeats": self.repeats, "batch": self.batch}
        for name, value in [*(("lengths", length) for length in self.lengths), *counts.items()]:
            if not 1 <= value < 2**31:
                raise ValueError(f"{name}: must be at least 1 and below 2^31, got {value}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        lengths = sorted(self.lengths)
        first = -(-lengths[-1] // subject.tgt_len) * subject.tgt_len  # ours reads whole segments before it
        n_ours = self._n_ours(subject.split, first)
        found.pop("mem_len", None)  # each length is one
        found |= {"tokens": self.tokens, "tokens_ours": n_ours, "repeats": self.repeats, "batch": self.batch}
        found |= {"batch_size": 1, "device": str(subject.device), "threads": torch.get_num_threads(), "by_length": []}
        done, whole = 0, self.repeats * sum(first + n_ours + self.tokens * length for length in lengths)
        for length in lengths:
            windows = Windows(subject, length=length, batch=self.batch, first=first, n_target=self.tokens)
            ours = Recurrence(subject, length=length, first=first, n_target=n_ours)
            taken: dict[str, list[Taken]] = {"vanilla": [], "ours": []}
            for _ in range(self.repeats):
                for way, times in zip((windows, ours), taken.values(), strict=True):
                    for n_step in timed(way.read(), subject.device, times, way.n_warming):
                        yield (done + min(way.n_read, n_step * way.step)) / whole
                    done += way.n_read
                found["by_length"] = [row for row in found["by_length"] if row["length"] != length]
                found["by_length"].append(self._row(length, taken))
            yield done / whole

    def _n_ours(self, split: Split, first: int) -> int:
        """The tokens that our way reads for the clock."""
        left = len(split.tokens) - 1 - first
        if left < self.tokens:
            words = f"{self.tokens} targets after {first} tokens (the longest of measure.lengths, in whole segments)"
            raise ValueError(
                f"measure.tokens: {words} are more than split={split.name} has; take fewer, or less length"
            )
        return min(left, max(self.tokens, OURS))

    def _row(self, length: int, taken: "dict[str, list[Taken]]") -> dict[str, Any]:
        """What is known of a length by now."""
        row: dict[str, Any] = {"length": length, "repeats": len(taken["ours"])}
        for name, times in taken.items():
            cpu, wall = (statistics.median(getattr(one, clock) for one in times) for clock in ("cpu", "wall"))
            nll = float(times[0].nll[: self.tokens].double().mean())
            row[name] = {"cpu_seconds": cpu, "wall_seconds": wall, "nll": nll}
        for clock in ("cpu", "wall"):
            row[f"{clock}_slowdown"] = row["vanilla"][f"{clock}_seconds"] / row["ours"][f"{clock}_seconds"]
        return row

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        rows = found["by_length"]
        columns = {"lengths": "length", "wall_slowdown": "wall_slowdown", "cpu_slowdown": "cpu_slowdown"}
        nll = {f"{name}_nll": [row[name]["nll"] for row in rows] for name in ("vanilla", "ours")}
        return {name: [row[key] for row in rows] for name, key in columns.items()} | nll

    def draw(self, found: dict[str, Any], path: Path) -> None:
        rows, clock = found.get("by_length", []), "cpu" if found.get("device") == "cpu" else "wall"
        lengths = [row["length"] for row in rows]
        with picture(path, columns=2) as axes:
            seconds_axis, nll_axis = axes[0]
            for name, label in {"vanilla": "sliding window", "ours": "memory"}.items():
                seconds = [1e3 * row[name][f"{clock}_seconds"] for row in rows]
                seconds_axis.plot(lengths, seconds, marker="o", label=label)
                nll_axis.plot(lengths, [row[name]["nll"] for row in rows], marker="o", label=label)
            for row in rows:
                at = (row["length"], 1e3 * row["vanilla"][f"{clock}_seconds"])
                words = f"{row[f'{clock}_slowdown']:,.0f}×"
                seconds_axis.annotate(words, at, textcoords="offset points", xytext=(0, 7), ha="center")
            unit = "CPU milliseconds" if clock == "cpu" else "milliseconds"
            seconds_axis.set(title="Time, and the window's slowdown", ylabel=f"{unit} per token", yscale="log")
            nll_axis.set(title=f"nll of the same {found.get('tokens', 0)} targets", ylabel="nats per token")
            seconds_axis.margins(0.12)
            for axis in axes[0]:
                axis.set(xlabel="context length L (tokens)", xscale="log")
                axis.set_xticks(lengths, [str(length) for length in lengths])
                axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
                axis.grid(alpha=0.3)
                axis.legend()


@dataclass(frozen=True)
class Taken:
    """CPU and wall seconds per token of one reading, and the nll of its targets."""

    cpu: float
    wall: float
    nll: Float[Tensor, "n"]


def timed(
    steps: Iterator[Float[Tensor, "_"]], device: torch.device, taken: list[Taken], n_warming: int = 0
) -> Iterator[int]:
    """Takes all steps, each the nll of some targets, and notes what those after the first `n_warming` took.

    Yields the number of steps done every `BURST` seconds or so; what happens meanwhile does not count. The device's part does.
    """
    wait = (lambda: None) if device.type == "cpu" else getattr(torch, device.type).synchronize
    n_step, parts, cpu, wall = 0, [], 0.0, 0.0
    for n_step, _ in enumerate(itertools.islice(steps, n_warming), 1):
        yield n_step
    going = True
    while going:
        going = False
        wait()
        cpu_before, before = time.process_time(), time.perf_counter()
        for nll in steps:
            parts.append(nll)
            if going := time.perf_counter() - before > BURST:
                break
        wait()
        cpu, wall = cpu + time.process_time() - cpu_before, wall + time.perf_counter() - before
        yield n_step + len(parts)
    nll = torch.cat(parts).cpu()
    taken.append(Taken(cpu / len(nll), wall / len(nll), nll))


class Windows:
    """The vanilla way: for each of the `n_target` targets after place `first` the last `length` tokens, read from nothing."""

    n_warming = 0

    def __init__(self, subject: Subject, *, length: int, batch: int, first: int, n_target: int):
        self.subject, self.length, self.batch = subject, length, batch
        self.places = np.arange(first, first + n_target)
        self.step, self.n_read = batch * length, n_target * length  # tokens
        self.model = subject.model(mem_len=None)
        self.readers: dict[int, Cache | Segments] = {}  # by how many windows: the projected distances are made once

    def read(self) -> Iterator[Float[Tensor, "b"]]:
        """The nll of the targets, `batch` windows side by side."""
        return (self.nll(self.places[part : part + self.batch]) for part in range(0, len(self.places), self.batch))

    def nll(self, places: np.ndarray) -> Float[Tensor, "b"]:
        """The nll of the token after each place."""
        split, device, length = self.subject.split, self.subject.device, self.length
        begins = places - (length - 1)
        both, starts = gather(split.tokens, begins, length + 1), marked(split.borders, begins, length)
        if len(places) not in self.readers:
            tgt_len = max(length, self.subject.tgt_len)
            self.readers[len(places)] = reader_of(self.model, reach=0, room=length, tgt_len=tgt_len)
        reader = self.readers[len(places)]
        if isinstance(reader, Cache):
            reader.clear()
        starts = None if starts is None else to_device(starts, device)
        with torch.inference_mode(), autocast(device, self.subject.precision):
            hidden = reader.read(both[:, :-1], starts=starts, stair=length)
            return self.model.softmax.nll(hidden[:, -1:], both[:, -1:])[:, 0]


class Recurrence:
    """Our way: the text from its beginning to `n_target` tokens after place `first`, a whole number of segments."""

    def __init__(self, subject: Subject, *, length: int, first: int, n_target: int):
        self.subject, self.model = subject, subject.model(mem_len=length)
        self.lane = ScoredLane(0, first, first + n_target)
        self.step, self.n_read, self.n_warming = subject.tgt_len, first + n_target, first // subject.tgt_len

    def read(self) -> Iterator[Float[Tensor, "i"]]:
        """The nll of each segment, those that only warm the memory first."""
        read, stair = Plan([self.lane], self.step), stair_of(self.model, self.step)
        found = losses(self.model, self.subject.split, read, stair=stair, precision=self.subject.precision)
        return (nll[0] for _, nll in found)
