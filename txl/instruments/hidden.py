"""`measure=hidden`: the states of each layer at each token of a text, in a file, for those who probe."""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl.data.streams import marked
from txl.data.vocab import Vocabulary
from txl.instruments.attention import encoded
from txl.instruments.showing import beside
from txl.instruments.subject import Subject
from txl.instruments.taking import picture
from txl.reading import Segments
from txl.runtime import autocast, put

STRETCHES = 100  # of the text, each with means of its own, at the most


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Writes h_t^n, what layer n makes of token t, as training has it: by segments of tgt_len, the memory carried.

        h_t^0 = what the first layer reads of x_t,    h_t^n = layer_n(h_t^{n-1}, the memory of layer n)    (section 3.2)

    What is read is `text` or the split, at most `max_tokens` of it from its first token on. The file (.safetensors or
    .npz) has the arrays `layer.n` [token, d_model] for the `layers` asked for (the last one is what the next token is
    predicted from), `tokens` [token], and `text`, the bytes that the tokens stand for, those of token t from `offsets[t]`
    to `offsets[t + 1]`; the metadata `measured`, an array of .npz, says as JSON what it is of. States lie
    on disk until all are written, so that memory does not grow with the text. The figures beside it are the norm of each
    layer's states and the cosine between a layer's and the one before it, means over the text and along it. Raises
    ValueError for a number out of bounds, a layer that there is not, a type that the file does not have or that cannot
    hold a state, and a text without tokens or with some that are unknown.
    """

    text: str | None
    max_tokens: int | None
    layers: list[int] | Literal["all"]
    format: Literal["safetensors", "npz"]
    dtype: Literal["float32", "float16", "bfloat16"]

    def __post_init__(self):
        if self.max_tokens is not None and not 1 <= self.max_tokens < 2**63:
            raise ValueError(f"max_tokens: must be at least 1 and below 2^63, or null for all; got {self.max_tokens}")
        if self.layers != "all" and (not self.layers or sorted(set(self.layers)) != self.layers):
            raise ValueError(f"layers: must be numbers in their order, or all; got {self.layers}")
        if self.format == "npz" and self.dtype == "bfloat16":
            raise ValueError("dtype: npz has no bfloat16; take float16, or format=safetensors")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads segment by segment; what was read when it ends, early too, goes into the file."""
        path, model = beside(out, f".{self.format}"), subject.model()
        tokens, starts = self._chosen(subject)
        chosen, n_token = self._layers(len(model.layers)), tokens.shape[1]
        d_model = model.layers[0].attention_norm.weight.shape[0]
        means = Means(len(model.layers) + 1, n_token, subject.tgt_len)
        found |= {"batch_size": 1, "file": path.name, "layers": chosen, "d_model": d_model, "dtype": self.dtype}
        found |= {"text": self.text} | means.found()
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            files = {n: room(Path(folder, str(n)), (n_token, d_model), getattr(torch, self.dtype)) for n in chosen}
            done, reader = 0, Segments(model, tgt_len=subject.tgt_len)
            try:
                for first in range(0, n_token, subject.tgt_len):
                    segment = slice(first, first + subject.tgt_len)
                    marks = None if starts is None else starts[:, segment]
                    states = read(reader, tokens[:, segment], marks, subject)
                    self._store(states, {n: file[segment] for n, file in files.items()})
                    means.add(states, first)
                    done = min(segment.stop, n_token)
                    yield done / n_token
            finally:  # interrupted too
                if done:
                    found |= {"tokens": done} | means.found()
                    about = {"run": str(subject.path.parent), **subject.settings, **found, "complete": done == n_token}
                    arrays = described(tokens[0, :done].tolist(), subject.vocab)
                    arrays |= {f"layer.{n}": file[:done] for n, file in files.items()}
                    written = Path(folder, f"whole.{self.format}")
                    del about["along"]
                    WRITERS[self.format](written, arrays, json.dumps(about))
                    put(written, path)

    def _store(self, states: list[Float[Tensor, "n m"]], places: dict[int, Float[Tensor, "n m"]]) -> None:
        """Copies the states of some layers to where they lie. Raises ValueError for those that their type cannot hold."""
        for n, place in places.items():
            if self.dtype == "float16" and (largest := float(states[n].abs().max())) > torch.finfo(place.dtype).max:
                raise ValueError(f"measure.dtype: float16 cannot hold {largest:.3g}, in layer {n}; take bfloat16")
            place.copy_(states[n])

    def _chosen(self, subject: Subject) -> tuple[Int[Tensor, "one n"], Bool[Tensor, "one n"] | None]:
        """The tokens to be read, and which of them begin a document, where memory ends there."""
        if self.text is not None:
            return encoded(subject.split.encoder, self.text)[:, : self.max_tokens], None
        tokens = np.asarray(subject.split.tokens[: self.max_tokens]).astype(np.int64)
        return torch.from_numpy(tokens)[None], marked(subject.split.borders, np.array([0]), len(tokens))

    def _layers(self, n_layer: int) -> list[int]:
        layers = list(range(n_layer + 1)) if self.layers == "all" else self.layers
        if not 0 <= layers[0] <= layers[-1] <= n_layer:
            raise ValueError(f"measure.layers: the model has 0, the embeddings, to {n_layer}; got {self.layers}")
        return layers

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The file, what it holds, and the mean norm of each layer's states."""
        return {name: found[name] for name in ("file", "tokens", "layers", "d_model", "dtype", "norm")}

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """The norm of each layer's states, and how like the layer before they are, along the text."""
        with picture(path, columns=2, size=(10.0, 4.0)) as axes:
            norm_axis, cosine_axis = axes[0]
            norm_axis.bar([str(n) for n in range(len(found["norm"]))], found["norm"])
            norm_axis.set(xlabel="layer (0: embeddings)", ylabel="mean norm of the state", title="size")
            along = found["along"]
            for n, values in enumerate(along["cosine"], start=1):
                cosine_axis.plot(along["position"], values, label=f"layers {n - 1} and {n}")
            cosine_axis.set(
                xlabel="position in the text (tokens)", ylabel="mean cosine", title="what a layer leaves as it is"
            )
            cosine_axis.grid(alpha=0.3)
            cosine_axis.legend(fontsize=7, ncols=-(-len(along["cosine"]) // 8))


class Means:
    """Mean norm of each layer's states, and mean cosine between those of a layer and of the one before, along a text."""

    def __init__(self, n_state: int, n_token: int, tgt_len: int):
        n_segment = -(-n_token // tgt_len)
        self.tgt_len, self.each = tgt_len, -(-n_segment // STRETCHES)  # segments that make a stretch
        n_stretch = -(-n_segment // self.each)
        self.tokens = np.zeros(n_stretch)
        self.norms, self.cosines = np.zeros((n_state, n_stretch)), np.zeros((n_state - 1, n_stretch))

    def add(self, states: list[Float[Tensor, "n m"]], first: int) -> None:
        """The states of a segment, the first token of which has this place."""
        stretch = first // self.tgt_len // self.each
        rows = torch.stack(states).float()
        cosines = torch.nn.functional.cosine_similarity(rows[1:], rows[:-1], dim=-1)
        self.tokens[stretch] += rows.shape[1]
        self.norms[:, stretch] += rows.norm(dim=-1).double().sum(dim=-1).cpu().numpy()
        self.cosines[:, stretch] += cosines.double().sum(dim=-1).cpu().numpy()

    def found(self) -> dict[str, Any]:
        """As plain values; `along` has a mean for each stretch that was begun, and where it begins."""
        begun = int((self.tokens > 0).sum())
        whole = max(1.0, float(self.tokens.sum()))
        counts = np.maximum(self.tokens[:begun], 1)
        return {
            "norm": (self.norms.sum(axis=1) / whole).tolist(),
            "cosine": (self.cosines.sum(axis=1) / whole).tolist(),
            "along": {
                "position": [stretch * self.each * self.tgt_len for stretch in range(begun)],
                "norm": (self.norms[:, :begun] / counts).tolist(),
                "cosine": (self.cosines[:, :begun] / counts).tolist(),
            },
        }


def described(tokens: list[int], vocab: Vocabulary) -> dict[str, Tensor]:
    """The tokens, the bytes that they stand for, and where those of each begin."""
    pieces = [vocab.decode([token]) for token in tokens]
    text = np.frombuffer(b"".join(pieces), dtype=np.uint8).copy()
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    arrays = {"tokens": np.array(tokens, dtype=np.int64), "text": text, "offsets": offsets}
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _write_safetensors(path: Path, arrays: dict[str, Tensor], about: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(arrays, path, {"measured": about})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _write_npz(path: Path, arrays: dict[str, Tensor], about: str) -> None:
    np.savez(path, measured=np.array(about), **{name: tensor.numpy() for name, tensor in arrays.items()})


WRITERS = {"safetensors": _write_safetensors, "npz": _write_npz}  # both take the arrays from disk as they write


def room(path: Path, shape: tuple[int, int], dtype: torch.dtype) -> Float[Tensor, "n m"]:
    """An array that lies in a file of its own. Raises OSError where the disk has no room for it: a hole would kill us later."""
    size = shape[0] * shape[1]
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).reshape(shape)


def read(
    reader: Segments, tokens: Int[Tensor, "one i"], starts: Bool[Tensor, "one i"] | None, subject: Subject
) -> list[Float[Tensor, "i m"]]:
    """The states of a segment, from the embeddings to the last layer's."""
    starts = None if starts is None else starts.to(subject.device)
    with torch.inference_mode(), autocast(subject.device, subject.precision):
        return [state[0] for state in reader.states(tokens.to(subject.device), starts=starts)]
