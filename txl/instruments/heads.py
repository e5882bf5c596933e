"""The picture of attention: a map for each head, and what sums them up."""

from pathlib import Path
from typing import Any

import numpy as np

from txl.instruments.showing import canvas

ROWS, COLUMNS = 6, 8  # of maps, at the most
SHADES = {"compressed": "tab:purple", "memory": "tab:blue", "segment": "lightgray"}
SUMS = [["mass", "share"], ["terms", "terms"]]


def draw_heads(path: Path, found: dict[str, Any], weights: np.ndarray | None) -> None:
    """Draws the figures of some layers and their attention weights, [layer, head, i, j]; without any, only axes.

    Of more layers and heads than there is room for, some are drawn, evenly spaced.
    """
    n_layer, n_head = (1, 1) if weights is None else weights.shape[:2]
    n_row, n_column = min(n_layer, ROWS), min(n_head, COLUMNS)
    above = 0.4 + max(1.3, 7.0 / n_column * 0.6) * n_row if weights is not None else 0.4
    with canvas(path, size=(8.0, above + 5.0)) as figure:
        top, bottom = figure.subfigures(2, 1, height_ratios=(above, 5))
        sums = bottom.subplot_mosaic(SUMS)
        if weights is None:
            top.suptitle("no layer was read")
            return
        layers = found["layers"]
        draw_maps(top, found, weights, evenly(n_layer, n_row), evenly(n_head, n_column))
        draw_mass(sums["mass"], layers)
        draw_shares(sums["share"], layers)
        draw_terms(sums["terms"], layers)


def evenly(count: int, drawn: int) -> list[int]:
    """So many of the first numbers, the first and the last among them."""
    return [round(step * (count - 1) / max(1, drawn - 1)) for step in range(drawn)]


def draw_maps(figure: Any, found: dict[str, Any], weights: np.ndarray, rows: list[int], columns: list[int]) -> None:
    """The square roots of the weights, so that small ones show: key 0 is the segment's first, those below 0 are memory.

    A dotted line parts the compressed rows from the others.
    """
    n_query, n_key = weights.shape[2:]
    axes = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    extent = (n_query - n_key - 0.5, n_query - 0.5, n_query - 0.5, -0.5)
    look = dict(extent=extent, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest")
    for line, row in zip(axes, rows, strict=True):
        for one, column in zip(line, columns, strict=True):
            image = one.imshow(np.sqrt(weights[row, column].astype(np.float32)), **look)
            one.axvline(-0.5, color="white", linewidth=0.7)
            if found["keys"].get("compressed"):
                one.axvline(-0.5 - found["keys"]["memory"], color="white", linewidth=0.7, linestyle=":")
            one.tick_params(labelsize=7)
        line[0].set_ylabel(f"layer {found['layers'][row]['layer']}\nquery", fontsize=8)
    for one, column in zip(axes[0], columns, strict=True):
        one.set_title(f"head {column}", fontsize=8)
    for one in axes[-1]:
        one.set_xlabel("key (below 0: memory)" if len(columns) < 5 else "key", fontsize=8)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.1**0.5, 0.5, 0.5**0.5, 1], shrink=0.8, aspect=30)
    bar.ax.set_yticklabels(["0", "0.1", "0.25", "0.5", "1"], fontsize=7)
    bar.set_label("attention weight", fontsize=8)


def draw_mass(axes: Any, layers: list[dict[str, Any]]) -> None:
    """How the mass of a layer adds up with the distance."""
    from matplotlib import colormaps

    named = evenly(len(layers), min(len(layers), ROWS))
    for index, layer in enumerate(layers):
        mass = np.cumsum(np.mean(layer["mass_by_distance"], axis=0))
        color = colormaps["viridis"](index / max(1, len(layers) - 1) * 0.9)
        label = f"layer {layer['layer']}" if index in named else None
        axes.plot(1 + np.arange(len(mass)), mass, color=color, label=label)
    axes.legend(fontsize=7)
    axes.set_xscale("log")
    axes.set(xlabel="1 + distance (keys)", ylabel="mass up to there", ylim=(0, 1.03), title="mass by distance")
    axes.grid(alpha=0.3)


def draw_shares(axes: Any, layers: list[dict[str, Any]]) -> None:
    """What of each layer's attention falls on memory and segment; a dot is a head."""
    names, below = [str(layer["layer"]) for layer in layers], np.zeros(len(layers))
    for part, color in SHADES.items():
        if part in layers[0]["share"]:
            shares = np.array([np.mean(layer["share"][part]) for layer in layers])
            axes.bar(names, shares, bottom=below, color=color, label=part)
            below = below + shares
    for name, layer in zip(names, layers, strict=True):
        heads = 1 - np.array(layer["share"]["segment"])
        axes.plot([name] * len(heads), heads, ".", color="black", markersize=4)
    axes.legend(fontsize=7, loc="upper center", ncols=3)
    axes.set(xlabel="layer (a dot: a head's memory)", ylabel="share of the attention", ylim=(0, 1.2))
    axes.set_title("what it falls on")
    axes.tick_params(axis="x", labelsize=10 if len(layers) < 10 else 6)


def draw_terms(axes: Any, layers: list[dict[str, Any]]) -> None:
    """How much each term tells keys apart: its standard deviation over the keys of a query."""
    meanings = {"a": "a: query, key", "b": "b: query, distance", "c": "c: key alone", "d": "d: distance alone"}
    terms, width, drawn = list(layers[0]["terms"]), 0.8 / len(layers[0]["terms"]), []
    for index, term in enumerate(terms):
        sizes = [np.sqrt(np.mean(layer["terms"][term]["variance"])) for layer in layers]
        axes.bar(np.arange(len(layers)) + (index - (len(terms) - 1) / 2) * width, sizes, width, label=meanings[term])
        drawn += [size for size in sizes if size > 0]
    axes.set_xticks(range(len(layers)), [str(layer["layer"]) for layer in layers])
    axes.legend(fontsize=8, ncols=len(terms))
    axes.set(xlabel="layer", ylabel="deviation over the keys", title="the terms of the logits")
    if drawn:  # untrained biases are zero
        axes.set(yscale="log", ylim=(min(drawn) / 3, max(drawn) * 8))
    axes.grid(alpha=0.3, axis="y")
