"""A leaderboard of run folders: what differs between them, and how much of a difference the seed alone makes.

python -m txl.report outputs/NAME...                             every finished run in these folders, and what became of others
python -m txl.report outputs/NAME... --plot FILE --csv FILE      the same as a picture, as a table for other programs
"""

import argparse
import csv
import io
import json
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from txl.config import load_yaml
from txl.resuming import flat
from txl.runs import ERROR, FREE, key_of, result
from txl.runtime import naming, write_whole
from txl.tracking import read_metrics

SPLITS = ("valid", "test")
FIGURES = ("nll", "least", "most", "bits_per_byte")
PANELS = 6  # keys that a picture shows the figure against, at the most


def find(folders: Iterable[Path]) -> list[Path]:
    """The finished runs in or below folders. Raises ValueError for a folder without one."""
    found = []
    for folder in folders:
        runs = sorted(file.parent for file in folder.rglob("result.json") if result(file.parent) is not None)
        if not runs:
            raise ValueError(f"{folder} holds no finished run (no result.json)")
        found += runs
    return list(dict.fromkeys(found))


def unfinished(folders: Iterable[Path]) -> dict[str, str]:
    """The runs in or below folders that have no figures, and why: the error of a sweep's point, or how far it came."""
    found = {}
    for folder in folders:
        for file in sorted([*folder.rglob(ERROR), *folder.rglob("overrides.json")]):
            run = file.parent
            if result(run) is not None or str(run) in found:
                continue
            if (run / ERROR).is_file():
                found[str(run)] = "failed: " + (run / ERROR).read_text(errors="replace").splitlines()[1]
            else:
                steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
                found[str(run)] = f"unfinished: logged up to update {max(steps, default=0)}"
    return found


def leaderboard(runs: Iterable[Path]) -> list[dict[str, Any]]:
    """A row for the runs that differ in their seed alone, best valid nll first.

    Each has the settings in which it differs from others, a short label, the seeds, the parameters, and for valid and test
    the mean, the smallest and the largest nll (nats per token), the mean bits per byte and those of each run; the mean
    seconds of training, the mean over its runs of the median tokens per second, and their valid curves.
    """
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]] = {}
    for run in dict.fromkeys(runs):
        values = flat(load_yaml(run / "config.yaml"))
        counted = {key: value for key, value in values.items() if key_of(key) not in FREE and key != "seed"}
        groups.setdefault(json.dumps(counted, sort_keys=True), []).append(
            (values, result(run), read_metrics(run / "metrics.jsonl"))
        )
    settings = [json.loads(key) for key in groups]
    rows = [_row(members) for members in groups.values()]
    labels = _labels([row["name"] for row in rows], settings)
    differing = _differing(settings)
    for row, label, one in zip(rows, labels, settings, strict=True):
        row |= {"label": label, "settings": {name: one[name] for name in differing if name in one}}
    return sorted(rows, key=lambda row: row["valid"]["nll"])


def _row(members: Sequence[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]) -> dict[str, Any]:
    speeds = [_speed(metrics) for _, _, metrics in members]
    row: dict[str, Any] = {
        "name": ", ".join(dict.fromkeys(values["name"] for values, _, _ in members)),
        "seeds": sorted(values["seed"] for values, _, _ in members),
        "parameters": members[0][1]["parameters"],
        "seconds": statistics.fmean(figures["seconds"] for _, figures, _ in members),
        "tokens_per_second": None if None in speeds else statistics.fmean(speeds),
        "curves": [
            [(line["tokens"], line["valid/nll"]) for line in metrics if "valid/nll" in line]
            for _, _, metrics in members
        ],
    }
    for split in SPLITS:
        nll = [figures[split]["nll"] for _, figures, _ in members]
        bits = [figures[split]["bits_per_byte"] for _, figures, _ in members]
        row[split] = {"nll": statistics.fmean(nll), "least": min(nll), "most": max(nll)}
        row[split] |= {"bits_per_byte": None if None in bits else statistics.fmean(bits), "each": bits}
    return row


def _speed(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    speeds = [line["tokens_per_second"] for line in metrics if "tokens_per_second" in line]
    return statistics.median(speeds) if speeds else None


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that have not the same value in all."""
    names = sorted({name for one in settings for name in one})
    return [name for name in names if len({json.dumps(one.get(name, "absent")) for one in settings}) > 1]


def _labels(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each row from the others: its name where names differ, and what differs between rows of one name."""
    labels = []
    for name, one in zip(names, settings, strict=True):
        peers = [other for peer, other in zip(names, settings, strict=True) if peer == name]
        differing = _differing(peers)
        # null says something only where no other row is without the key
        told = [key for key in differing if one.get(key) is not None or all(key in other for other in peers)]
        words = [f"{_short(key, differing)}={_value(key, one[key])}" for key in told]
        labels.append(" ".join([name, *words] if len(set(names)) > 1 or not words else words))
    return labels


def _short(key: str, among: Iterable[str]) -> str:
    """The last parts of a key that are enough to know it by: `mem_len`, or `eval.mem_len` beside `memory.mem_len`."""
    whole, others = key.removesuffix("._target_"), {other.removesuffix("._target_") for other in among}
    parts = whole.split(".")
    suffixes = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
    others -= {whole}
    return next((one for one in suffixes if not any(f".{other}".endswith(f".{one}") for other in others)), whole)


def _value(key: str, value: Any) -> Any:
    """A class by its last name; a number in four digits."""
    if type(value) is float:
        return float(f"{value:.4g}")
    return str(value).rpartition(".")[2] if key.endswith("._target_") else value


def show(rows: list[dict[str, Any]], without: Mapping[str, str] | None = None) -> None:
    """Prints a leaderboard; a spread in brackets where there is more than one seed. `without`: what has no figures, and why."""
    columns = ("valid nll", "test nll", "test bits per byte", "seconds", "tokens/s")
    table = Table("run", "parameters", "seeds", *columns)
    for row in rows:
        spread = len(row["seeds"]) > 1
        cells = [
            f"{row[split]['nll']:.4f}" + (f" ({row[split]['least']:.4f} to {row[split]['most']:.4f})" if spread else "")
            for split in SPLITS
        ]
        bits, speed = row["test"]["bits_per_byte"], row["tokens_per_second"]
        cells += ["-" if bits is None else f"{bits:.4f}", f"{row['seconds']:,.1f}"]
        cells.append("-" if speed is None else f"{speed:,.0f}")
        table.add_row(row["label"], f"{row['parameters']:,}", str(len(row["seeds"])), *cells)
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=240)
    if rows:
        console.print(table)
    for label, reason in (without or {}).items():
        console.print(f"{label}: {reason}", soft_wrap=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A picture of a leaderboard: test bits per byte by row, valid nll against each key that differs, and all valid curves.

    A row has one colour in all of them.
    """
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever calls us: a notebook, say

    keys = swept(rows)[:PANELS]
    heights = [1.2 + 0.4 * len(rows), *[2.7] * (-(-len(keys) // 2)), 3.3]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _draw_ranking(figure.add_subplot(grid[0, :]), rows)
    for place, key in enumerate(keys):
        _draw_against(figure.add_subplot(grid[1 + place // 2, place % 2]), rows, key)
    _draw_curves(figure.add_subplot(grid[-1, :]), rows)
    kind = path.suffix.removeprefix(".") or "png"
    write_whole(path, lambda file: figure.savefig(file, dpi=100, format=kind))


def swept(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that all rows have, with another value in some; of a part of another class, the class alone."""
    keys = [key for key in (rows[0]["settings"] if rows else {}) if all(key in row["settings"] for row in rows)]
    parts = [key.removesuffix("_target_") for key in keys if key.endswith("_target_")]
    return [key for key in keys if key.endswith("_target_") or not key.startswith(tuple(parts))]


def _draw_ranking(axis: Any, rows: list[dict[str, Any]]) -> None:
    """A ring for each seed, the mean of several as a dot."""
    for place, row in enumerate(rows):
        each, mean = row["test"]["each"], row["test"]["bits_per_byte"]
        if mean is None:
            continue
        axis.plot([min(each), max(each)], [place, place], color=f"C{place % 10}", alpha=0.5)
        axis.plot(each, [place] * len(each), "o", color=f"C{place % 10}", markerfacecolor="none")
        axis.plot([mean], [place], "o", color=f"C{place % 10}")
        axis.annotate(f"{mean:.3f}", (mean, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    labels = [textwrap.fill(_plain(row["label"]), 60) for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.set_xlabel("test bits per byte (lower is better; best valid figure first)")
    axis.grid(axis="x", alpha=0.3)


def _draw_against(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    """Valid nll by the value of a key, from the least to the most of its seeds."""
    values = [row["settings"][key] for row in rows]
    if numeric := all(type(value) in (int, float) for value in values):
        places = values
        if min(values) > 0 and max(values) >= 10 * min(values):
            axis.set_xscale("log")
    else:
        words = [_plain(_value(key, value)) for value in values]
        places = [words.index(word) for word in words]
        axis.set_xticks(places, [textwrap.shorten(word, 24) for word in words], fontsize=8)
    for number, (place, row) in enumerate(zip(places, rows, strict=True)):
        figure, color = row["valid"], f"C{number % 10}"
        axis.plot([place, place], [figure["least"], figure["most"]], color=color, alpha=0.5)
        axis.plot([place], [figure["nll"]], "o", color=color)
    if numeric and len(set(values)) == len(values):
        points = sorted(zip(values, (row["valid"]["nll"] for row in rows), strict=True))
        axis.plot(*zip(*points, strict=True), color="gray", alpha=0.4, zorder=0)
    axis.set_xlabel(_plain(key.removesuffix("._target_")))
    axis.set_ylabel("valid nll")
    axis.grid(alpha=0.3)


def _draw_curves(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Valid nll against the tokens seen, of every run; one colour a row."""
    for place, row in enumerate(rows):
        for number, points in enumerate(row["curves"]):
            if points:
                label = textwrap.shorten(_plain(row["label"]), 32) if number == 0 and place < 10 else None
                axis.plot(*zip(*points, strict=True), color=f"C{place % 10}", label=label, alpha=0.8)
    axis.set_xlabel("tokens seen")
    axis.set_ylabel("valid nll")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)


def _plain(words: Any) -> str:
    """Without a dollar's meaning."""
    return str(words).replace("$", r"\$")


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """A leaderboard for other programs."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    figures = [(split, figure) for split in SPLITS for figure in FIGURES]
    named = [f"{split}/{figure}" for split, figure in figures]
    table.writerow(["run", "parameters", "seeds", *named, "seconds", "tokens_per_second", *keys])
    for row in rows:
        settings = [row["settings"].get(key) for key in keys]
        cells = [*(row[split][figure] for split, figure in figures), row["seconds"], row["tokens_per_second"]]
        table.writerow([row["label"], row["parameters"], " ".join(map(str, row["seeds"])), *cells, *settings])
    write_whole(path, lambda file: file.write(text.getvalue().encode()))


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: list[str]) -> int:
    parser = _Arguments(prog="python -m txl.report", description="A leaderboard of the finished runs in folders.")
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="outputs/NAME, or any folder above runs"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture: .png .svg .pdf")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the table for other programs")
    try:
        asked = parser.parse_args(arguments)
        if not asked.folders:
            raise ValueError("give folders: python -m txl.report outputs/NAME...")
        if asked.plot is not None and asked.plot.suffix not in ("", ".png", ".svg", ".pdf"):
            raise ValueError(f"--plot: {asked.plot} is to end in .png, .svg or .pdf")
        rows = leaderboard(find(asked.folders))
        show(rows, unfinished(asked.folders))
        for option, write, file in (("--plot", plot, asked.plot), ("--csv", write_csv, asked.csv)):
            if file is not None:
                with naming(f"{option}: {file}"):
                    write(rows, file)
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
