"""`measure=tokens`: what each token costs, in a file with a row for each; and where two checkpoints differ most."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from txl.data.vocab import fingerprint
from txl.instruments.rows import check_format, write_rows
from txl.instruments.showing import beside, canvas, readable
from txl.instruments.subject import Subject
from txl.instruments.taking import token_nll
from txl.model import TransformerXL

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COSTLIEST = (0.01, 0.05, 0.1, 0.25, 0.5)  # shares of the tokens
BINS = 60
DRAWN, WIDTH = 16, 26  # tokens that are listed in the picture, and the characters shown on each side of one


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Writes the nll of each token to a file, and lists the costliest or, against another checkpoint, those that they differ on most.

        nll_p = -log p(x_p | the tokens before that it sees),    difference_p = nll_p - nll_against_p    (nats)

    The mean of the column `nll` is the figure of `evaluate.py` (Dai et al. 2019, section 4). A row for each token that was
    read, in order: position (in the split), id, text, nll and, `against` another checkpoint, nll_against and difference,
    above zero where the other one does better. `top` tokens are listed with `around` tokens on each side. `max_segments`
    ends each lane after as many times tgt_len tokens. Raises ValueError for a number out of bounds, for `against` a
    checkpoint that cannot be read or whose tokens are others, and for parquet without the package that writes it.
    """

    format: Literal["parquet", "jsonl"]
    against: str | None
    top: int
    around: int
    max_segments: int | None

    def __post_init__(self):
        for name, least in {"top": 1, "around": 0, "max_segments": 1}.items():
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise ValueError(f"{name}: must be at least {least} and below 2^31, got {value}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads with both models side by side, so that what is interrupted can be compared as far as it goes."""
        path = beside(out, f".{self.format}")
        check_format(self.format)
        readers = [(subject, subject.model())]
        if self.against is not None:
            readers.append(rival(subject, self.against))
        columns = [np.full(len(subject.split.tokens) - 1, np.nan) for _ in readers]
        reads = [
            token_nll(model, reader, nll, max_segments=self.max_segments)
            for (reader, model), nll in zip(readers, columns, strict=True)
        ]
        try:
            yield from side_by_side(reads)
        finally:  # interrupted too
            self._keep(subject, columns, found, path)

    def _keep(self, subject: Subject, columns: list[np.ndarray], found: dict[str, Any], path: Path) -> None:
        """Writes the rows that were read, and what there is to say of them."""
        read = np.flatnonzero(~np.isnan(columns[0]))
        table = {"nll": columns[0]}
        if self.against is not None:
            table |= {"nll_against": columns[1], "difference": columns[0] - columns[1]}
        write_rows(path, self.format, subject.split, read, table)
        found |= {"file": path.name, "tokens": len(read), "against": self.against}
        for name, values in table.items():
            found[name] = described(values[~np.isnan(values)])
        found["costliest"] = loss_shares(columns[0][read])
        found["listed_by"] = "difference" if self.against is not None else "nll"
        size = np.nan_to_num(np.abs(table[found["listed_by"]]), nan=-1.0)
        places = np.argsort(-size[read], kind="stable")[: self.top]
        found["listed"] = [self._listed(subject, int(place), table) for place in read[places] if size[place] >= 0]

    def _listed(self, subject: Subject, place: int, table: dict[str, np.ndarray]) -> dict[str, Any]:
        """A token with its losses and the text around it."""
        position, tokens, decode = place + 1, subject.split.tokens, subject.vocab.decode
        return {
            "position": position,
            "before": readable(decode(tokens[max(0, position - self.around) : position])),
            "text": readable(decode(tokens[position : position + 1])),
            "after": readable(decode(tokens[position + 1 : position + 1 + self.around])),
            **{name: float(values[place]) for name, values in table.items()},
        }

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """How the losses are spread, what the costliest tokens sum to, and the tokens that are listed."""
        with canvas(path, size=(8.0, 7.5)) as figure:
            top, bottom = figure.subfigures(2, 1, height_ratios=(2, 3))
            left, right = top.subplots(1, 2)
            for name in ("nll", "nll_against"):
                draw_spread(left, found.get(name), "this" if name == "nll" else "the other")
            left.set(xlabel="nll (nats)", ylabel="tokens", title=f"{found['tokens']:,} tokens")
            if found["listed_by"] == "difference":
                draw_spread(right, found["difference"], "difference")
                right.set(xlabel="nll - nll_against (nats)", ylabel="tokens", title="left of 0: this is better")
            else:
                shares = found["costliest"]
                right.bar([f"{float(share):.0%}" for share in shares], list(shares.values()))
                right.set(xlabel="costliest tokens", ylabel="their share of the loss", ylim=(0, 1))
            draw_list(bottom.subplots(), found["listed"][:DRAWN], found["listed_by"])

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The means: `nll` is the figure."""
        means = {name: found[name].get("mean") for name in ("nll", "nll_against", "difference") if name in found}
        return {**means, "tokens": found["tokens"], "file": found["file"]}


def rival(subject: Subject, name: str) -> tuple[Subject, TransformerXL]:
    """The other checkpoint and its model. Raises ValueError where it cannot be read, or reads other tokens."""
    try:
        other = subject.other(name)
        model = other.model()
    except ValueError as error:
        raise ValueError(f"measure.against: {str(error).removeprefix('checkpoint: ')}") from error
    if fingerprint(other.vocab) != fingerprint(subject.vocab):
        raise ValueError(f"measure.against: the vocabulary of {name} is another; its tokens cannot be compared")
    if not np.array_equal(other.split.tokens, subject.split.tokens):
        split = subject.split.name
        raise ValueError(f"measure.against: split={split} of {name} is another text; data.{split} gives both the same")
    return other, model


def side_by_side(reads: list[Iterator[float]]) -> Iterator[float]:
    """Goes on with the one that is behind; yields the share of all that is done."""
    shares = [0.0] * len(reads)
    while min(shares) < 1.0:
        behind = shares.index(min(shares))
        shares[behind] = next(reads[behind], 1.0)
        yield sum(shares) / len(shares)


def described(values: np.ndarray) -> dict[str, Any]:
    """Mean, quantiles and a histogram; nothing of nothing."""
    if not len(values):
        return {}
    counts, edges = np.histogram(values, bins=BINS)
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(values, QUANTILES).tolist(), strict=True))
    histogram = {"edges": edges.tolist(), "counts": counts.tolist()}
    return {"mean": float(values.mean()), "quantiles": quantiles, "histogram": histogram}


def loss_shares(nll: np.ndarray) -> dict[str, float]:
    """The part of all nats that falls on the costliest tokens, by their share of the tokens."""
    if not len(nll) or not nll.sum():
        return {}
    sums = np.cumsum(np.sort(nll)[::-1])
    return {str(share): float(sums[max(1, round(share * len(nll))) - 1] / sums[-1]) for share in COSTLIEST}


def draw_spread(axes: Any, what: dict[str, Any] | None, label: str) -> None:
    """A histogram with its mean."""
    if what:
        mean = f"{label}: mean {what['mean']:.3f}"
        steps = axes.stairs(what["histogram"]["counts"], what["histogram"]["edges"], label=mean, baseline=0.5)
        axes.axvline(what["mean"], color=steps.get_edgecolor(), linestyle=":")
        axes.set_yscale("log")
        axes.legend(fontsize=8)


def draw_list(axes: Any, listed: list[dict[str, Any]], by: str) -> None:
    """A bar for each token that is listed, with the text around it."""
    values = [row[by] for row in listed]
    axes.barh(range(len(listed)), values, color=["tab:red" if value > 0 else "tab:green" for value in values])
    before, after = (lambda text: text[-WIDTH:].rjust(WIDTH)), (lambda text: text[:WIDTH].ljust(WIDTH))
    shown = [{name: row[name].replace("\n", "↵") for name in ("before", "text", "after")} for row in listed]
    labels = [f"{before(row['before'])}[{row['text'][:WIDTH]}]{after(row['after'])}" for row in shown]
    axes.set_yticks(range(len(listed)), labels, family="monospace", fontsize=7, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    names = {"nll": "the costliest tokens", "difference": "where the two differ most (red: this is worse)"}
    axes.set(xlabel=f"{by} (nats)", title=names[by])
