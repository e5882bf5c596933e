"""`measure=attention`: where the heads look, how much of it is memory, and what the logits are made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl.data.encoding import Encoder
from txl.data.streams import marked
from txl.data.text import Piece, utf8
from txl.instruments.heads import draw_heads
from txl.instruments.looking import Look, described, look, rows_of_memory
from txl.instruments.showing import beside, readable
from txl.instruments.subject import Subject
from txl.model import TransformerXL
from txl.runtime import autocast, write_whole


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Looks at the attention of one segment, layer by layer, after a memory filled by the text before it.

        w[i, j] = softmax_j(a + b + c + d),    share_i = sum_{j < m} w[i, j],    mass_x = mean_i w[i, m + i - x]

    The terms (a) to (d) are those of Dai et al. 2019, section 3.3; a scheme that lacks some shows those it has. What is
    read is `text` or, without one, at most `length` tokens of the split from `start` on, and what is looked at their last
    tgt_len; those before are read by as many at a time, the first segment being shorter where they are no multiple. Means
    are over the queries; entropy is in nats; a term's variance is that over the keys which a query sees, since what all
    of them share changes no weight. Keys of a compressed memory count as one place each. The maps and the terms stand
    beside the figures (.npz, [layer, head, i, j] in float16, terms not-a-number where a key is hidden). Raises ValueError
    for a number out of bounds, a layer that there is not, and a text without tokens or with some that are unknown.
    """

    text: str | None
    start: int
    length: int
    layers: list[int] | None

    def __post_init__(self):
        for name, least in {"start": 0, "length": 1}.items():
            if not least <= getattr(self, name) < 2**63:
                raise ValueError(f"{name}: must be at least {least} and below 2^63, got {getattr(self, name)}")
        if self.layers is not None and (not self.layers or sorted(set(self.layers)) != self.layers):
            raise ValueError(f"layers: must be numbers in their order, or null for all; got {self.layers}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Fills the memory, then goes through the layers."""
        path, model = beside(out, ".npz"), subject.model()
        tokens, starts = self._chosen(subject)
        chosen = self._layers(len(model.layers))
        cuts = [place for place in range(tokens.shape[1] - subject.tgt_len, 0, -subject.tgt_len)][::-1]
        steps = len(cuts) + len(model.layers)
        found |= {"file": path.name, "tokens_read": tokens.shape[1], "layers": []}
        arrays: dict[str, list[np.ndarray]] = {}
        try:
            mems = None
            for done, (first, stop) in enumerate(zip([0, *cuts], cuts, strict=False), start=1):
                mems = read(model, tokens[:, first:stop], mems, _part(starts, first, stop), subject)
                yield done / steps
            last = cuts[-1] if cuts else 0
            found["text"] = [readable(subject.vocab.decode([token])) for token in tokens[0, last:].tolist()]
            looks = look(model, tokens[:, last:], mems, _part(starts, last, None), subject.precision)
            for index, one in enumerate(looks):
                parts = rows_of_memory(model, one)
                found["keys"] = {name: part.stop - part.start for name, part in parts.items()}
                if index in chosen:
                    found["layers"].append({"layer": index, **described(one, parts)})
                    for name, values in _arrays(one).items():
                        arrays.setdefault(name, []).append(values)
                yield (len(cuts) + index + 1) / steps
        finally:  # interrupted too
            stacked = {name: np.stack(values) for name, values in arrays.items()}
            layers = np.array([row["layer"] for row in found["layers"]], dtype=np.int64)
            write_whole(path, lambda file: np.savez_compressed(file, layers=layers, **stacked))

    def _chosen(self, subject: Subject) -> tuple[Int[Tensor, "one n"], Bool[Tensor, "one n"] | None]:
        """The tokens to be read, and which of them begin a document, where memory ends there."""
        if self.text is not None:
            return encoded(subject.split.encoder, self.text), None
        there = len(subject.split.tokens)
        if self.start >= there:
            raise ValueError(f"measure.start: split={subject.split.name} has {there} tokens, counted from 0")
        tokens = np.asarray(subject.split.tokens[self.start : self.start + self.length]).astype(np.int64)
        starts = marked(subject.split.borders, np.array([self.start]), len(tokens))
        return torch.from_numpy(tokens)[None], starts

    def _layers(self, n_layer: int) -> list[int]:
        layers = list(range(n_layer)) if self.layers is None else self.layers
        if not 0 <= layers[0] <= layers[-1] < n_layer:
            raise ValueError(f"measure.layers: the model has the layers 0 to {n_layer - 1}; got {self.layers}")
        return layers

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """A map for each head, mass by distance, the shares and the size of the terms."""
        with np.load(path.with_suffix(".npz")) as arrays:
            draw_heads(path, found, arrays["weights"] if found["layers"] else None)

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """What falls on the memory in each layer, mean over its heads, and how wide the heads look (nats)."""
        layers = found["layers"]
        shares = {
            f"share_of_{name}": [float(np.mean(layer["share"][name])) for layer in layers]
            for name in layers[0]["share"]
            if name != "segment"
        }
        return {**shares, "entropy": [float(np.mean(layer["entropy"])) for layer in layers], "file": found["file"]}


def _part(starts: Bool[Tensor, "b i"] | None, first: int, stop: int | None) -> Bool[Tensor, "b _"] | None:
    return None if starts is None else starts[:, first:stop]


def encoded(encoder: Encoder, text: str) -> Int[Tensor, "one n"]:
    """A text of the user's as tokens. Raises ValueError for one without any, or with some that the vocabulary lacks."""
    try:
        tokens = encoder(Piece(utf8(text), begins=True, closes=False)).tokens.astype(np.int64)
    except ValueError as error:
        raise ValueError(f"measure.text: the checkpoint's vocabulary does not know it ({error})") from error
    if not len(tokens):
        raise ValueError("measure.text: holds no token of the checkpoint's vocabulary")
    return torch.from_numpy(tokens)[None]


def read(
    model: TransformerXL,
    tokens: Int[Tensor, "b i"],
    mems: list[Float[Tensor, "b _ m"]] | None,
    starts: Bool[Tensor, "b i"] | None,
    subject: Subject,
) -> list[Float[Tensor, "b _ m"]]:
    """The memory after a segment."""
    starts = None if starts is None else starts.to(subject.device)
    with torch.inference_mode(), autocast(subject.device, subject.precision):
        _, *kept = model.states(tokens.to(subject.device), mems, starts=starts)
        return model.memory.keep(*kept)


def _arrays(one: Look) -> dict[str, np.ndarray]:
    """What goes into the file."""
    terms = {f"term_{name}": values.float().masked_fill(~one.keep, torch.nan) for name, values in one.terms.items()}
    return {name: values[:, 0].cpu().half().numpy() for name, values in {"weights": one.weights, **terms}.items()}
