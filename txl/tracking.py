"""What a run leaves for people to see: metrics.jsonl, curves.png, a progress bar or lines, and W&B where it is wanted."""

import contextlib
import errno
import json
import math
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from txl.runtime import write_whole

INIT_TIMEOUT, FINISH_TIMEOUT = 10, 10  # seconds that a tracker has to start, to end
PATIENCE = 12.0  # seconds that a run waits for it
REDRAW = 30.0  # seconds between two pictures of a run that goes on: one takes as long as many updates of a small model


class Metrics:
    """metrics.jsonl: one JSON object a line, on disk when `log` returns.

    Opened at a step, it drops the lines after it, and valid figures after the step `measured`: a run that goes on from there
    will write them again. Lines that a full
    disk refuses are kept and written with a later one; a warning says so once, and training goes on.
    """

    def __init__(self, path: Path, *, step: int, measured: int | None = None):
        measured = step if measured is None else measured
        kept = [row for row in read_metrics(path) if row["step"] <= (measured if "valid/nll" in row else step)]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_whole(path, lambda file: file.write(text.encode()))
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting, self._warned = b"", False
        self._drawn = -math.inf

    def log(self, row: Mapping[str, Any]) -> None:
        self._waiting += (json.dumps(row) + "\n").encode()
        self._write()

    def _write(self) -> None:
        try:
            whole = os.fstat(self._file.fileno()).st_size
            written = self._file.write(self._waiting)
            if written < len(self._waiting):
                os.ftruncate(self._file.fileno(), whole)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._waiting = b""
        except OSError as error:
            self._warn(f"{self._path} cannot be written ({error.strerror}); its lines are kept until it can")

    def draw(self, path: Path, *, last: bool = False) -> None:
        """Draws the curves of all that was logged so far, unless that was just done; the `last` time in any case."""
        now = time.monotonic()
        if now - self._drawn < REDRAW and not last:
            return
        self._drawn = now
        try:
            draw_curves(path, read_metrics(self._path))
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror})")

    def _warn(self, words: str) -> None:
        if not self._warned:
            self._warned = True
            print(f"warning: {words}; training goes on", file=sys.stderr)

    def close(self) -> None:
        if self._waiting:
            self._write()
        self._file.close()


class NoMetrics:
    """For the processes that write nothing."""

    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def draw(self, path: Path, *, last: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a crash cut short is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [
        row for row in rows if isinstance(row, dict) and {type(row.get(key)) for key in ("step", "tokens")} == {int}
    ]


def draw_curves(path: Path, rows: list[dict[str, Any]]) -> None:
    """curves.png: train and valid nll, learning rate and gradient norm against the tokens seen."""
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever calls us: a notebook, say

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, names in zip(axes, (("train/nll", "valid/nll"), ("train/lr",), ("train/grad_norm",)), strict=True):
        for name in names:
            points = [(row["tokens"], row[name]) for row in rows if name in row]
            axis.plot(
                *zip(*points, strict=True), marker="." if len(points) < 30 else None, label=name
            ) if points else None
        axis.set_xlabel("tokens seen")
        axis.set_title(" and ".join(names))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("nats per token")
    axes[0].legend() if axes[0].lines else None
    figure.savefig(path, dpi=100)


class NoTracker:
    """`tracker=none`: nothing beside the run's own files."""

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        pass

    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class WandbTracker:
    """`tracker=wandb`: Weights & Biases, into the run's folder without an account unless `mode=online`.

    A run that goes on after a kill is one run there too; `tokens` is the x-axis of all its curves.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: Literal["offline", "online", "disabled"] = "offline",
        entity: str | None = None,
        tags: list[str] | None = None,
    ):
        self.project, self.mode, self.entity, self.tags = project, mode, entity, tags
        self._run = None

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            tags=self.tags,
            mode=self.mode,
            id=_lasting_id(folder),  # a run that goes on is one run there too
            resume="allow",
            name=name,
            dir=folder.resolve(),  # W&B writes from a process of its own, in a folder of its own
            config=dict(config),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def finish(self) -> None:
        self._run.finish()


def _lasting_id(folder: Path) -> str:
    """The id under which W&B knows the run of this folder: made once."""
    file = folder / "wandb_id"
    with contextlib.suppress(OSError):
        if known := re.fullmatch(r"[0-9a-z]{8,64}", file.read_text().strip()):
            return known[0]
    write_whole(file, lambda opened: opened.write(uuid.uuid4().hex.encode()))
    return file.read_text()


class Background:
    """A tracker that training neither waits for nor dies from: it works in a thread of its own.

    Whatever it raises is told in one warning, and the run goes on without it; one that hangs is left behind at the end.
    """

    def __init__(self, tracker: Any):
        self._tracker, self._calls = tracker, queue.SimpleQueue()
        self._doing, self._abandoned = "starting", False
        self._thread = threading.Thread(target=self._work, daemon=True, name="tracker")
        self._thread.start()

    def _work(self) -> None:
        dead = False
        while True:
            name, arguments, named = self._calls.get()
            self._doing = name
            try:
                if not dead:
                    getattr(self._tracker, name)(*arguments, **named)
            except BaseException as error:  # it may even want to exit
                dead = True
                words = " ".join(f"{type(error).__name__}: {error}".split())
                print(f"warning: tracker: {name} failed ({words}); training goes on without it", file=sys.stderr)
            if name == "finish":
                return

    def start(self, **named: Any) -> None:
        self._calls.put(("start", (), named))

    def log(self, row: Mapping[str, Any]) -> None:
        self._calls.put(("log", (dict(row),), {}))

    def abandon(self) -> None:
        """From now on it is not waited for."""
        self._abandoned = True

    def finish(self) -> None:
        self._calls.put(("finish", (), {}))
        if self._abandoned:
            return
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            print(f"warning: tracker: {self._doing} hangs; the run ends without it", file=sys.stderr)


def begin(tracker: Any) -> Any:
    """The tracker as training uses it."""
    return tracker if isinstance(tracker, NoTracker) else Background(tracker)


class Speed:
    """Tokens per second of the updates alone: what runs inside `paused` does not count."""

    def __init__(self):
        self._tokens, self._started = 0, time.monotonic()

    def add(self, n_token: int) -> None:
        self._tokens += n_token

    def take(self) -> dict[str, float]:
        """The speed since this was last asked for."""
        now = time.monotonic()
        speed = self._tokens / max(now - self._started, 1e-9)
        self._tokens, self._started = 0, now
        return {"tokens_per_second": speed}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        self._started += time.monotonic() - before


class Display:
    """Progress on standard error: a bar on a terminal; elsewhere a line each time that something is logged."""

    def __init__(self, *, steps: int, step: int, quiet: bool = False):
        self.steps = steps
        self._console = Console(stderr=True, quiet=quiet)
        self._quiet = quiet
        self._bar = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=steps, completed=step, text="")
        self._started, self._first = time.monotonic(), step

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def show(self, row: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        words = {
            "train/nll": "train nll",
            "valid/nll": "valid nll",
            "valid/bits_per_byte": "bits per byte",
            "valid/ppl": "ppl",
        }
        text = "  ".join(f"{word} {row[name]:.4f}" for name, word in words.items() if row.get(name) is not None)
        if "tokens_per_second" in row:
            text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        if self._bar and "train/nll" in row:
            self._bar.update(self._task, text=text)
        elif self._bar:
            self._bar.console.print(f"step {row['step']}/{self.steps}  {text}", highlight=False)
        else:
            done = max(1, row["step"] - self._first)
            left = (time.monotonic() - self._started) / done * (self.steps - row["step"])
            print(f"step {row['step']}/{self.steps}  {text}  ETA {left:.0f} s", file=sys.stderr, flush=True)


def figures_table(figures: Mapping[str, Mapping[str, Any]], *, stderr: bool = False) -> None:
    """Prints figures, a line each: nll, ppl, per word too where it is known, bits per byte, and the tokens that they are of."""
    by_word = ["ppl_per_word"] if any("ppl_per_word" in one for one in figures.values()) else []
    table = Table("", "nll", "ppl", *(name.replace("_", " ") for name in by_word), "bits per byte", "tokens")
    for name, one in figures.items():
        perplexities = [
            _rounded(one.get(key)) if key == "ppl" or one.get("words") else "-" for key in ("ppl", *by_word)
        ]
        bits = "-" if one["bits_per_byte"] is None else f"{one['bits_per_byte']:.4f}"
        table.add_row(name, f"{one['nll']:.4f}", *perplexities, bits, f"{one['tokens']:,}")
    Console(stderr=stderr, highlight=False).print(table)


def _rounded(ppl: float | None) -> str:
    return "beyond 1e304" if ppl is None else f"{ppl:.3f}" if ppl < 1e5 else f"{ppl:.4g}"
