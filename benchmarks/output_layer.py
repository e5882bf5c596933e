"""Time and memory of an embedding and an output layer, forward and backward: ours, the authors', torch's.

    python -m benchmarks.output_layer [--authors FOLDER] [--targets zipf|uniform]

FOLDER is a checkout of kimiyoung/transformer-xl; without it the authors' rows are left out. Times are medians of rounds in
which all layers take turns, as the ratio to the first row; memory is the peak of what torch allocates beyond the parameters,
gradients included, recorded in one pass of a process of its own.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import find_authors, medians, peak
from txl.layers.softmax import AdaptiveSoftmax, FullSoftmax

Loss = Callable[[Tensor, Tensor], Tensor]


class Ours(nn.Module):
    """A softmax of this project on its own embedding."""

    def __init__(self, softmax: nn.Module):
        super().__init__()
        self.softmax = softmax
        softmax.reset(init_std=0.02, proj_init_std=0.01)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.softmax.nll(self.softmax.embed(tokens[None]), targets[None])[0]


class Authors(nn.Module):
    """The authors' adaptive embedding and softmax, joined as their model joins them; theirs is the initialisation too."""

    def __init__(self, words: int, width: int, cutoffs: list[int], div_val: int):
        super().__init__()
        from mem_transformer import AdaptiveEmbedding  # found in their checkout, once `main` has looked there
        from proj_adaptive_softmax import ProjectedAdaptiveLogSoftmax

        self.embedding = AdaptiveEmbedding(words, width, width, cutoffs, div_val=div_val)
        self.softmax = ProjectedAdaptiveLogSoftmax(words, width, width, cutoffs, div_val=div_val)
        for table, layer in zip(self.embedding.emb_layers, self.softmax.out_layers, strict=True):
            layer.weight = table.weight
        for cluster in range(1, 1 + len(cutoffs) if div_val > 1 else 1):
            self.softmax.out_projs[cluster] = self.embedding.emb_projs[cluster]
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.softmax(self.embedding(tokens), targets, keep_order=True)


class TorchAdaptive(nn.Module):
    """torch's adaptive softmax, whose tables cannot be shared with the embedding."""

    def __init__(self, words: int, width: int, cutoffs: list[int]):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(width, words, cutoffs, div_value=1.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return -self.softmax(self.embedding(tokens), targets).output


class TorchFull(nn.Module):
    """One tied table, F.linear and F.cross_entropy."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.normal_(self.embedding.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return F.cross_entropy(F.linear(hidden, self.embedding.weight, self.bias), targets, reduction="none")


def layers(options: argparse.Namespace) -> dict[str, Callable[[], nn.Module]]:
    """What each row measures; the first is what the others are compared with."""
    words, width, cutoffs = options.words, options.width, options.cutoffs
    sizes = dict(n_token=words, d_model=width, d_embed=width, tie_weight=True, tie_projs=True)
    ours = {
        "ours, div_val 1": lambda: Ours(AdaptiveSoftmax(**sizes, cutoffs=cutoffs)),
        "ours, div_val 4": lambda: Ours(AdaptiveSoftmax(**sizes, cutoffs=cutoffs, div_val=4)),
        "ours, full softmax": lambda: Ours(FullSoftmax(**sizes)),
        "torch, AdaptiveLogSoftmaxWithLoss": lambda: TorchAdaptive(words, width, cutoffs),
        "torch, F.cross_entropy": lambda: TorchFull(words, width),
    }
    if options.authors is None:
        return ours
    authors = {f"authors, div_val {div_val}": lambda d=div_val: Authors(words, width, cutoffs, d) for div_val in (1, 4)}
    return authors | ours


def batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Tokens and targets: ids by Zipf's law, p(id) ~ 1 / (id + 1), or all alike."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, options.words + 1, dtype=torch.float64)
    shares = 1 / ranks if options.targets == "zipf" else torch.ones_like(ranks)
    tokens, targets = torch.multinomial(shares, 2 * options.tokens, replacement=True, generator=generator).chunk(2)
    return tokens, targets


def step(layer: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    """The gradients are dropped at its end: not all layers hold theirs at a time."""
    layer(tokens, targets).mean().backward()
    layer.zero_grad(set_to_none=True)


def times(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The median seconds of process time and of wall time of each layer."""
    tokens, targets = batch(options)
    calls = {name: partial(step, make(), tokens, targets) for name, make in layers(options).items()}
    return medians(calls, options.rounds)


@torch.no_grad()
def agree(options: argparse.Namespace) -> None:
    """Raises AssertionError unless ours and the authors' losses are the same, token by token, on the same weights."""
    tokens, targets = batch(options)
    for div_val in (1, 4):
        theirs, ours = layers(options)[f"authors, div_val {div_val}"](), layers(options)[f"ours, div_val {div_val}"]()
        softmax, layers_of_theirs = ours.softmax, theirs.softmax.out_layers
        tables, biases = [layer.weight for layer in layers_of_theirs], [layer.bias for layer in layers_of_theirs]
        if div_val == 1:  # theirs are one
            sizes = list(map(len, softmax.out_biases))
            tables, biases = tables[0].split(sizes), biases[0].split(sizes)
        pairs = [
            *zip(softmax.weights, tables, strict=True),
            *zip(softmax.out_biases, biases, strict=True),
            (softmax.cluster_weight, theirs.softmax.cluster_weight),
            (softmax.cluster_bias, theirs.softmax.cluster_bias),
            *zip(softmax.emb_projs, theirs.embedding.emb_projs, strict=True),
            *zip(softmax.out_projs, theirs.softmax.out_projs, strict=False),  # theirs are None where div_val is 1
        ]
        for parameter, value in pairs:
            parameter.copy_(value)
        torch.testing.assert_close(ours(tokens, targets), theirs(tokens, targets), rtol=1e-5, atol=1e-5)


def table(options: argparse.Namespace, arguments: list[str]) -> str:
    """The rows as Markdown."""
    spent = times(options)
    cpu_base, wall_base = next(iter(spent.values()))
    lines = [
        "| layer | process time | faster | wall time | faster | peak MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (cpu, wall) in spent.items():
        command = [sys.executable, "-m", "benchmarks.output_layer", *arguments, "--memory", name]
        mebibytes = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        columns = [name, f"{cpu:.2f} s", f"{cpu_base / cpu:.1f}x", f"{wall:.2f} s", f"{wall_base / wall:.1f}x"]
        lines.append(f"| {' | '.join(columns)} | {mebibytes:,.0f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", help="a checkout of kimiyoung/transformer-xl")
    parser.add_argument("--targets", choices=["zipf", "uniform"], default="zipf")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=267_735)
    parser.add_argument("--width", type=int, default=410, help="d_model and d_embed")
    parser.add_argument("--cutoffs", type=int, nargs="+", default=[20_000, 40_000, 200_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", help="print the peak memory of this row, in MiB, and nothing else")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.authors is not None:
        find_authors(f"{options.authors}/pytorch")
    if options.memory is not None:
        print(peak(partial(step, layers(options)[options.memory](), *batch(options))))
        return
    if options.authors is not None:
        agree(options)
    print(table(options, arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
