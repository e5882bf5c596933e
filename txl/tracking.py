"""What a run leaves for people to see: metrics.jsonl, curves.png, a progress bar or lines, and W&B where it is wanted."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from txl.runtime import write_whole


class Metrics:
    """metrics.jsonl: one JSON object a line, on disk when `log` returns.

    Opened at a step, it drops the lines after it, which a run that goes on from there will write again.
    """

    def __init__(self, path: Path, *, step: int):
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_whole(path, lambda file: file.write(text.encode()))
        self._path, self._file = path, path.open("a")

    def log(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def draw(self, path: Path) -> None:
        """Draws the curves of all that was logged so far."""
        draw_curves(path, read_metrics(self._path))

    def close(self) -> None:
        self._file.close()


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
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
    pyplot.close(figure)


class NoTracker:
    """`tracker=none`: nothing beside the run's own files."""

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        pass

    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass


class WandbTracker:
    """`tracker=wandb`: Weights & Biases, into the run's folder without an account unless `mode=online`.

    Training never depends on it: where it fails, a warning says so once and the run goes on without.
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

    def _guarded(self, doing: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:
            self._run = None
            print(
                f"tracker: {doing} failed ({type(error).__name__}: {error}); training goes on without it",
                file=sys.stderr,
            )

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        def begin() -> Any:
            import wandb

            settings = wandb.Settings(console="off", silent=True, init_timeout=20, finish_timeout=30)
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                tags=self.tags,
                mode=self.mode,
                name=name,
                dir=folder.resolve(),  # W&B writes from a process of its own, in a folder of its own
                config=dict(config),
                settings=settings,
            )
            run.define_metric("tokens")
            run.define_metric("*", step_metric="tokens")
            return run

        self._run = self._guarded("starting W&B", begin)

    def log(self, row: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._guarded("logging to W&B", lambda: self._run.log(dict(row), step=row["step"]))

    def finish(self) -> None:
        if self._run is not None:
            self._guarded("finishing W&B", lambda: self._run.finish())
            self._run = None


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

    def __init__(self, *, steps: int, step: int):
        self.steps = steps
        self._console = Console(stderr=True)
        self._bar = None
        if self._console.is_terminal:
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
        perplexities = [_rounded(one.get(key)) for key in ("ppl", *by_word)]
        table.add_row(name, f"{one['nll']:.4f}", *perplexities, f"{one['bits_per_byte']:.4f}", f"{one['tokens']:,}")
    Console(stderr=stderr, highlight=False).print(table)


def _rounded(ppl: float | None) -> str:
    return "beyond 1e304" if ppl is None else f"{ppl:.3f}" if ppl < 1e5 else f"{ppl:.4g}"
