"""A leaderboard of run folders: what differs between them, and how much of a difference the seed alone makes.

python -m txl.report outputs/NAME...                             every finished run in these folders
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
from txl.runs import FREE, key_of, result
from txl.runtime import naming, write_whole

SPLITS = ("valid", "test")
FIGURES = ("nll", "least", "most", "bits_per_byte")


def find(folders: Iterable[Path]) -> list[Path]:
    """The finished runs in or below folders. Raises ValueError for a folder without one."""
    found = []
    for folder in folders:
        runs = sorted(file.parent for file in folder.rglob("result.json") if result(file.parent) is not None)
        if not runs:
            raise ValueError(f"{folder} holds no finished run (no result.json)")
        found += runs
    return list(dict.fromkeys(found))


def leaderboard(runs: Iterable[Path]) -> list[dict[str, Any]]:
    """A row for the runs that differ in their seed alone, best valid nll first.

    Each has the settings in which it differs from others, a short label, the seeds, the parameters, and for valid and test
    the mean, the smallest and the largest nll (nats per token), the mean bits per byte and those of each run.
    """
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in dict.fromkeys(runs):
        values = flat(load_yaml(run / "config.yaml"))
        counted = {key: value for key, value in values.items() if key_of(key) not in FREE and key != "seed"}
        groups.setdefault(json.dumps(counted, sort_keys=True), []).append((values, result(run)))
    settings = [json.loads(key) for key in groups]
    rows = [_row(one, members) for one, members in zip(settings, groups.values(), strict=True)]
    labels = _labels([row["name"] for row in rows], settings)
    differing = _differing(settings)
    for row, label, one in zip(rows, labels, settings, strict=True):
        row |= {"label": label, "settings": {name: one[name] for name in differing if name in one}}
    return sorted(rows, key=lambda row: row["valid"]["nll"])


def _row(settings: Mapping[str, Any], members: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": ", ".join(dict.fromkeys(values["name"] for values, _ in members)),
        "seeds": sorted(values["seed"] for values, _ in members),
        "parameters": members[0][1]["parameters"],
    }
    for split in SPLITS:
        nll = [figures[split]["nll"] for _, figures in members]
        bits = [figures[split]["bits_per_byte"] for _, figures in members]
        row[split] = {"nll": statistics.fmean(nll), "least": min(nll), "most": max(nll)}
        row[split] |= {"bits_per_byte": None if None in bits else statistics.fmean(bits), "each": bits}
    return row


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
    """A class by its last name."""
    return str(value).rpartition(".")[2] if key.endswith("._target_") else value


def show(rows: list[dict[str, Any]], failed: Mapping[str, str] | None = None) -> None:
    """Prints a leaderboard; a spread in brackets where there is more than one seed. `failed`: what has no figures, and why."""
    table = Table("run", "parameters", "seeds", "valid nll", "test nll", "test bits per byte")
    for row in rows:
        spread = len(row["seeds"]) > 1
        cells = [
            f"{row[split]['nll']:.4f}" + (f" ({row[split]['least']:.4f} to {row[split]['most']:.4f})" if spread else "")
            for split in SPLITS
        ]
        bits = row["test"]["bits_per_byte"]
        cells.append("-" if bits is None else f"{bits:.4f}")
        table.add_row(row["label"], f"{row['parameters']:,}", str(len(row["seeds"])), *cells)
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=240)
    console.print(table)
    for label, reason in (failed or {}).items():
        console.print(f"failed: {label}: {reason}", soft_wrap=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A picture of a leaderboard: test bits per byte by row, a ring for each seed and the mean of several as a dot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.4 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        each, mean = row["test"]["each"], row["test"]["bits_per_byte"]
        if mean is None:
            continue
        axis.plot([min(each), max(each)], [place, place], color="tab:blue", alpha=0.5)
        axis.plot(each, [place] * len(each), "o", color="tab:blue", markerfacecolor="none")
        axis.plot([mean], [place], "o", color="tab:blue")
        axis.annotate(f"{mean:.3f}", (mean, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    labels = [textwrap.fill(row["label"].replace("$", r"\$"), 60) for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.set_xlabel("test bits per byte (lower is better; best valid figure first)")
    axis.grid(axis="x", alpha=0.3)
    kind = path.suffix.removeprefix(".") or "png"
    write_whole(path, lambda file: figure.savefig(file, dpi=100, format=kind))


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """A leaderboard for other programs."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["run", "parameters", "seeds", *(f"{split}/{figure}" for split in SPLITS for figure in FIGURES)])
    for row in rows:
        figures = [row[split][figure] for split in SPLITS for figure in FIGURES]
        table.writerow([row["label"], row["parameters"], " ".join(map(str, row["seeds"])), *figures])
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
        show(rows)
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
