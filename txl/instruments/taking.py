"""How a measurement is taken: with progress, until it is through or interrupted; what it has by then is kept."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from rich.console import Console
from rich.progress import Progress

from txl import evaluation
from txl.instruments.subject import Subject
from txl.model import TransformerXL
from txl.runtime import naming, write_json, write_whole
from txl.signals import Stopped

ENDINGS = (".png", ".npz", ".html", ".parquet", ".jsonl", ".safetensors")  # of what stands beside the JSON
EVERY = 10.0  # seconds between two lines of progress where there is no terminal


@runtime_checkable
class Instrument(Protocol):
    """What `evaluate.py measure=NAME` asks. Its keyword arguments are the keys `measure.*`."""

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Fills `found`, plain values for JSON, as it goes; yields the share that is done, at least once a second or so.

        Whenever it yields, `found` is worth keeping. Files of its own stand beside `out`, under its name.
        """

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """Draws what was found so far."""

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The few figures that are printed."""


def take(instrument: Instrument, subject: Subject, out: Path, *, received: Callable[[], int | None]) -> dict[str, Any]:
    """Runs an instrument, writes `out` (JSON) and a picture beside it, and prints the summary as a line of JSON.

    What was found by then is also written, `complete` being false, where it ends early: once a signal was received, which
    raises Stopped, or by an error. Raises ValueError for files that cannot be written.
    """
    found: dict[str, Any] = {"measure": type(instrument).__name__, "complete": False, **subject.settings}
    share, picture = 0.0, out.with_suffix(".png")

    def write() -> None:
        write_json(out, found)
        instrument.draw(found, picture)

    with naming(f"out: what belongs to {out}"):
        try:
            with shown_progress() as show:
                for share in instrument.run(subject, found, out):
                    show(share)
                    if received() is not None:
                        break
                else:
                    found["complete"] = True
        except Exception as error:
            if share == 0.0:
                raise
            write()
            words = f"{error}; what was found by then stands in {out}"
            raise (ValueError(words) if isinstance(error, ValueError) else error) from error
        try:
            write()
        finally:
            if found["complete"]:
                print(json.dumps({"measure": found["measure"], **instrument.summary(found)}), flush=True)
    if not found["complete"]:
        raise Stopped.by(received(), f"interrupted with {share:.0%} done; what there is stands in {out}")
    print(f"written to {out} and {picture.name}", file=sys.stderr)
    return found


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[float], None]]:
    """What shows a share between 0 and 1 on standard error: a bar on a terminal, elsewhere a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console) as bar:
            task = bar.add_task("measuring", total=1.0)
            yield lambda share: bar.update(task, completed=share)
        return
    started = last = time.monotonic()

    def line(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            left = (now - started) * (1 - share) / max(share, 1e-9)
            print(f"measured {share:.0%}  ETA {left:.0f} s", file=sys.stderr, flush=True)

    yield line


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (8, 4)) -> Iterator[Any]:
    """An array of axes, [rows, columns], to draw on; saved when it is left."""
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever calls us: a notebook, say

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, squeeze=False)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=100))


def token_nll(
    model: TransformerXL, subject: Subject, nll: np.ndarray, *, max_segments: int | None = None
) -> Iterator[float]:
    """`evaluation.token_nll` of what is measured, read as asked."""
    reading = dict(tgt_len=subject.tgt_len, batch_size=subject.batch_size, precision=subject.precision)
    return evaluation.token_nll(model, subject.split, nll, **reading, max_segments=max_segments)
