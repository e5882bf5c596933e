"""What a run leaves for people to see: metrics.jsonl, curves.png, a progress bar or lines, and a tracker's work, in the background."""

import contextlib
import errno
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from txl.curves import draw_curves
from txl.runtime import write_whole
from txl.trackers import Conclusion, NoTracker

REDRAW = 30.0  # seconds between two pictures of a run that goes on: one takes as long as many updates of a small model


class Metrics:
    """metrics.jsonl: one JSON object a line, on disk when `log` returns.

    Opened at a step, it drops the lines after it, and valid figures after the step `measured`: a run that goes on from there
    will write them again. Lines that a full disk refuses are kept and written with a later one; a warning says so once,
    and training goes on.
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


class Background:
    """A tracker that training neither waits for nor dies from: it works in a thread of its own.

    Whatever it raises is told in one warning, and the run goes on without it; one that hangs is left behind at the end.
    """

    def __init__(self, tracker: Any):
        self._tracker, self._calls = tracker, queue.SimpleQueue()
        self._doing, self._abandoned = "start", False
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
                self._warn(f"{name} failed ({words}); training goes on without it")
            if name == "finish":
                return

    def _warn(self, words: str) -> None:
        rescue = f"; later: {self._tracker.rescue}" if self._tracker.rescue else ""
        print(f"warning: tracker: {words}{rescue}", file=sys.stderr)

    def start(self, **named: Any) -> None:
        self._calls.put(("start", (), named))

    def log(self, row: Mapping[str, Any]) -> None:
        self._calls.put(("log", (dict(row),), {}))

    def conclude(self, conclusion: Conclusion) -> None:
        self._calls.put(("conclude", (conclusion,), {}))

    def abandon(self) -> None:
        """From now on it is not waited for."""
        self._abandoned = True

    def finish(self) -> None:
        self._calls.put(("finish", (), {}))
        if self._abandoned:
            return
        self._thread.join(self._tracker.patience)
        if self._thread.is_alive():
            self._warn(f"{self._doing} hangs; the run ends without it")


@contextlib.contextmanager
def tracked(tracker: Any, **run: Any) -> Iterator[Any]:
    """A tracker that has started on a run, as training uses it; at the end it is finished, and after Ctrl-C not waited for."""
    running = tracker if isinstance(tracker, NoTracker) else Background(tracker)
    running.start(**run)
    try:
        yield running
    except KeyboardInterrupt:
        running.abandon()
        raise
    finally:
        running.finish()


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
