"""A leaderboard of run folders: what differs between them, and how much of a difference the seed alone makes.

python -m txl.report outputs/NAME...     every finished run in these folders
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from txl.config import load_yaml
from txl.resuming import flat
from txl.runs import FREE, key_of, result


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

    Each has the settings in which it differs from others, the seeds, and for valid and test the mean, the smallest and the
    largest nll (nats per token) and the mean bits per byte.
    """
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in runs:
        values = {key: value for key, value in flat(load_yaml(run / "config.yaml")).items() if key_of(key) not in FREE}
        key = json.dumps({key: value for key, value in values.items() if key != "seed"}, sort_keys=True)
        groups.setdefault(key, []).append((values, result(run)))
    settings = {key: json.loads(key) for key in groups}
    differing = sorted({name for one in settings.values() for name in one if _differs(name, settings.values())})
    rows = []
    for key, members in groups.items():
        row: dict[str, Any] = {
            "settings": {name: settings[key][name] for name in differing if name in settings[key]},
            "seeds": sorted(values["seed"] for values, _ in members),
        }
        for split in ("valid", "test"):
            nll = [figures[split]["nll"] for _, figures in members]
            row[split] = {"nll": statistics.fmean(nll), "least": min(nll), "most": max(nll)}
            row[split]["bits_per_byte"] = statistics.fmean(figures[split]["bits_per_byte"] for _, figures in members)
        rows.append(row)
    return sorted(rows, key=lambda row: row["valid"]["nll"])


def _differs(name: str, settings: Iterable[Mapping[str, Any]]) -> bool:
    return len({json.dumps(one.get(name, "absent")) for one in settings}) > 1


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a leaderboard; a spread in brackets where there is more than one seed."""
    table = Table("settings", "seeds", "valid nll", "test nll", "test bits per byte")
    for row in rows:
        spread = len(row["seeds"]) > 1
        cells = [
            f"{row[split]['nll']:.4f}" + (f" ({row[split]['least']:.4f} to {row[split]['most']:.4f})" if spread else "")
            for split in ("valid", "test")
        ]
        words = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        table.add_row(words, str(len(row["seeds"])), *cells, f"{row['test']['bits_per_byte']:.4f}")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=240)
    console.print(table)


def main(arguments: list[str]) -> int:
    if not arguments:
        print("give folders: python -m txl.report outputs/NAME...", file=sys.stderr)
        return 1
    try:
        show(leaderboard(find(map(Path, arguments))))
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
