"""Training, evaluation and generation, side by side: this project, its plain twin, and the authors' code.

    python -m benchmarks.speed [--peer FOLDER] [--rounds N] [--plot FILE]

FOLDER is the folder `pytorch` of a checkout of kimiyoung/transformer-xl; without it the plain twin alone stands beside ours.
The plain twin is this project with attention over all queries and keys at once, the relative term shifted by a padded copy,
and hidden states for a memory in evaluation and generation too. All take turns in one process, with the same weights; times
are medians of the process's CPU time. The peak is what torch allocates at a time in one step, beyond the parameters.
"""

import argparse

import torch

from benchmarks.measure import find_authors, medians, peak
from benchmarks.rows import block, evaluation, generation, products, step


def table(peer: str | None, rounds: int, scale: int) -> None:
    """Prints the figures; `scale` divides all lengths, to try the program."""
    small = dict(n_layer=4, d_model=256)
    wide = dict(n_layer=12, d_model=512)
    half, quarter, long, recall = 512 // scale, 256 // scale, 2048 // scale, 2100 // scale
    timed = {
        "attention block, d256, segment = memory = 512, batch 4": (
            block, dict(length=half, batch=4, d_model=256, same_length=False)),
        "the same, same_length": (block, dict(length=half, batch=4, d_model=256, same_length=True)),
        "step, 4 layers, d256, segment = memory = 512, batch 4": (step, dict(length=half, memory=half, batch=4, **small)),
        "step, 12 layers, d512, segment = memory = 256, batch 2": (
            step, dict(length=quarter, memory=quarter, batch=2, **wide)),
        "evaluation, same_length, memory 2100, segments of 80": (
            evaluation, dict(mem_len=recall, tgt_len=80, n_token=2 * recall, **small)),
        "generation, memory 1024, batch 1": (generation, dict(mem_len=long // 2, batch=1, tokens=8, **small)),
        "generation, memory 1024, batch 16": (generation, dict(mem_len=long // 2, batch=16, tokens=2, **small)),
        "generation, memory 2048, batch 16": (generation, dict(mem_len=long, batch=16, tokens=2, **small)),
    }  # fmt: skip
    first = "authors" if peer else "plain twin"
    print(f"| figure | {first}, CPU s | ours, CPU s | faster | in wall time | than the plain twin | products alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name, (make, sizes) in timed.items():
        calls = make(peer, **sizes)
        if make is step:
            calls["products"] = products(**sizes)
        cost = medians(calls, rounds, in_a_row=16 if make is generation else 1)
        (cpu, wall), (base, base_wall), (twin, _) = cost["ours"], cost[first], cost["plain twin"]
        share = f"{cost['products'][0] / cpu:.0%} of our time" if "products" in cost else ""
        row = [
            f"{base:.3f}",
            f"{cpu:.3f}",
            f"**{base / cpu:.1f}x**",
            f"{base_wall / wall:.1f}x",
            f"{twin / cpu:.1f}x",
            share,
        ]
        print(f"| {name} | {' | '.join(row)} |", flush=True)
    calls = step(peer, length=long, memory=long, batch=2, n_layer=2, d_model=256)
    held = {name: peak(call) for name, call in calls.items()}
    less = [f"{held[first]:.0f} MiB", f"{held['ours']:.0f} MiB", f"**{held[first] / held['ours']:.1f}x less**", ""]
    print(f"| peak memory of a step, 2 layers, d256, segment = memory = 2048, batch 2 | {' | '.join(less)} | "
          f"{held['plain twin'] / held['ours']:.1f}x less | |", flush=True)  # fmt: skip


def plot(peer: str | None, path: str, rounds: int, scale: int) -> None:
    """Draws CPU time and peak memory of a step (2 layers, d256, batch 1) against the lengths of segment and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = [128, 256, 512, 1024]
    panels = {
        "segment = memory (tokens)": [(length, length) for length in lengths],
        "memory (tokens), segments of 256": [(256, length) for length in lengths],
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    for column, (label, sizes) in zip(axes.T, panels.items(), strict=True):
        found: dict[str, list[tuple[float, float]]] = {}
        for length, memory in sizes:
            length, memory = length // scale, memory // scale
            calls = step(peer, length=length, memory=memory, batch=1, n_layer=2, d_model=256)
            cost = medians(calls, rounds)
            for name, call in calls.items():
                found.setdefault(name, []).append((1e3 * cost[name][0] / length, peak(call)))
        for axis, place, quantity in zip(column, (0, 1), ("CPU ms a token", "peak MiB of a step"), strict=True):
            for name, rows in found.items():
                axis.plot(lengths, [row[place] for row in rows], marker="o", label=name)
            axis.set(xlabel=label, ylabel=quantity, xscale="log", yscale="log", xticks=lengths, xticklabels=lengths)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the folder `pytorch` of the authors' code")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", help="draw the cost against the lengths into this file too")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this, to try the program")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    if asked.peer is not None:
        find_authors(asked.peer)
    table(asked.peer, asked.rounds, asked.scale)
    if asked.plot:
        plot(asked.peer, asked.plot, max(1, asked.rounds // 2), asked.scale)


if __name__ == "__main__":
    main()
