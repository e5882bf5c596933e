"""curves.png: how a run went, in four panels against the tokens seen."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAIN, VALID = "#9aa7b5", "#c8402f"
Points = list[tuple[int, float | int]]  # tokens seen, and a value
EDGES = {"left": 0.075, "right": 0.985, "bottom": 0.085, "top": 0.9, "hspace": 0.38, "wspace": 0.2}


def draw_curves(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Train and valid nll with the best valid figure, learning rate, gradient norm, tokens per second; any rows will do."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever calls us: a notebook, say

    with rc_context({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.0, 5.4))
        axes = figure.subplots(2, 2)
        figure.subplots_adjust(**EDGES)  # a layout engine would take as long as all the rest
        nll, rate, norm, speed = axes.flat
        losses(nll, rows)
        one_curve(rate, rows, "train/lr", "learning rate")
        one_curve(norm, rows, "train/grad_norm", "gradient norm, before clipping", log=True)
        one_curve(speed, rows, "tokens_per_second", "tokens/s", shorten=True)
        last = max((row["tokens"] for row in rows), default=0)
        for axis in axes.flat:
            axis.grid(alpha=0.25)
            axis.set_xlim(0, max(1.02 * last, 1))
            axis.xaxis.set_major_formatter(lambda value, _: short(value))
        for axis in axes[1]:
            axis.set_xlabel("tokens seen")
        folder = path.resolve().parent
        figure.suptitle(f"{folder.parent.name}/{folder.name}", fontsize=11, fontweight="bold")
        figure.savefig(path, dpi=100)


def losses(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Train and valid nll; the best valid figure is marked, and written in its other units too."""
    train, valid = points(rows, "train/nll"), points(rows, "valid/nll")
    for name, color, found in (("train", TRAIN, train), ("valid", VALID, valid)):
        if found:
            axis.plot(*zip(*found, strict=True), color=color, label=name, **marked(found))
    axis.set_title("nats per token", loc="left")
    if train or valid:
        axis.set_ylim(*limits(train, valid))
        axis.legend(loc="upper right", frameon=False)
    best = min((row for row in rows if is_number(row.get("valid/nll"))), key=lambda row: row["valid/nll"], default=None)
    if best is not None:
        axis.plot(best["tokens"], best["valid/nll"], "o", color=VALID, markersize=6)
        axis.set_title(
            f"best valid {best['valid/nll']:.4f}{in_other_units(best)}", loc="right", color=VALID, fontsize=9
        )


def in_other_units(row: dict[str, Any]) -> str:
    """= 2.101 bits per byte, or a perplexity where bytes are unknown."""
    if is_number(row.get("valid/bits_per_byte")):
        return f" = {row['valid/bits_per_byte']:.3f} bits per byte"
    return f" = ppl {row['valid/ppl']:.4g}" if is_number(row.get("valid/ppl")) else ""


def one_curve(
    axis: Any, rows: Sequence[dict[str, Any]], name: str, title: str, *, log: bool = False, shorten: bool = False
) -> None:
    found = points(rows, name)
    axis.set_title(title, loc="left")
    if log:
        found = [(tokens, value) for tokens, value in found if value > 0]
    if not found:
        return
    axis.plot(*zip(*found, strict=True), color="#2f6f9f", **marked(found))
    values = [value for _, value in found]
    if log and max(values) > 10 * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    if log or shorten:
        axis.yaxis.set_major_formatter(lambda value, _: short(value))


def marked(found: Points) -> dict[str, Any]:
    """Few points are marked: one alone would not be seen otherwise."""
    return {"linewidth": 1.4, "marker": "." if len(found) < 30 else None}


def points(rows: Sequence[dict[str, Any]], name: str) -> Points:
    """The values of a name against tokens, but for those that are no finite number."""
    return [(row["tokens"], row[name]) for row in rows if is_number(row.get(name))]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def limits(*curves: Points) -> tuple[float, float]:
    """From just below the lowest value to what nearly all lie below after a tenth of the way, with some room.

    The first losses, and a spike, would otherwise press all that one looks for into the lowest part.
    """
    lowest, tops = math.inf, []
    for curve in filter(None, curves):
        later = sorted(value for _, value in curve[len(curve) // 10 :])
        tops.append(later[math.ceil(0.98 * len(later)) - 1])
        lowest = min(lowest, later[0])
    top = max(tops)
    room = max(top - lowest, 0.05 * abs(top), 1e-3)
    return lowest - 0.08 * room, top + 0.15 * room


def short(value: float | int) -> str:
    """1,500,000 as 1.5M."""
    if abs(value) >= 1e12:
        return f"{value:.0e}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
