"""A segment's attention with all weights in sight, and the figures of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl import ops
from txl.layers.memory import CompressiveMemory
from txl.model import TransformerXL, document_numbers
from txl.runtime import autocast


@dataclass(frozen=True)
class Look:
    """What one layer does with a segment: attention weights, the terms of the logits, which keys a query sees; what comes out."""

    weights: Float[Tensor, "h b i j"]
    terms: dict[str, Float[Tensor, "h b i j"]]
    keep: Bool[Tensor, "b i j"]
    hidden: Float[Tensor, "b i m"]


def look(
    model: TransformerXL,
    tokens: Int[Tensor, "b i"],
    mems: list[Float[Tensor, "b _ m"]] | None = None,
    starts: Bool[Tensor, "b i"] | None = None,
    precision: str = "fp32",
) -> Iterator[Look]:
    """Reads a segment as `model.states` does, layer by layer, with all weights in sight; the model is to be in eval mode."""
    device = next(model.parameters()).device
    with torch.inference_mode(), autocast(device, precision):
        hidden = model.embed(tokens.to(device))
        memories = model.memory.start(mems, hidden, len(model.layers))
        n_query, n_key = tokens.shape[1], memories[0].shape[1] + tokens.shape[1]
        window = dict(memory=n_key - n_query, reach=model.reach, device=device)
        keep, documents = ~ops.hidden_keys(range(n_query), range(n_key), **window).expand(len(tokens), -1, -1), None
        if starts is not None:
            documents = document_numbers(memories[0], starts.to(device))
            memories = [memory.masked_fill(memory.isnan(), 0.0) for memory in memories]
            keep = keep & (documents[:, None, :] == documents[:, n_key - n_query :, None])
        encoding = model.position.encode(n_key, hidden)
    for layer, memory in zip(model.layers, memories, strict=True):
        with torch.inference_mode(), autocast(device, precision):
            attention, position = layer.attention, layer.attention.position
            rows, hidden = position.at_layer(memory, n_query), position.at_layer(hidden, 0)
            segment = layer.normed(hidden)
            projected = [attention.keys_values(part) for part in (layer.normed(rows), segment)]
            keys_values, r = torch.cat(projected, dim=3), position.project(encoding)
            terms = position.terms(attention.queries(segment), keys_values[0], r)
            weights = ops.masked_softmax(sum(terms.values()), keep)
            hidden = layer.attend(hidden, segment, keys_values, r, documents, reach=model.reach)
        yield Look(weights, terms, keep, hidden)


def rows_of_memory(model: TransformerXL, one: Look) -> dict[str, slice]:
    """Which keys are compressed rows, rows of the memory, and the segment's own."""
    n_query, n_key = one.weights.shape[2:]
    if not isinstance(model.memory, CompressiveMemory):
        return {"memory": slice(0, n_key - n_query), "segment": slice(n_key - n_query, n_key)}
    coarse = max(0, n_key - n_query - model.memory.mem_len)
    parts = {"compressed": slice(0, coarse), "memory": slice(coarse, n_key - n_query)}
    return {**parts, "segment": slice(n_key - n_query, n_key)}


def described(one: Look, parts: dict[str, slice]) -> dict[str, Any]:
    """The figures of a layer, each a list over its heads."""
    weights, keep = one.weights[:, 0].cpu().double(), one.keep[0].cpu()
    n_query, n_key = keep.shape
    distance = (n_key - n_query + torch.arange(n_query)[:, None] - torch.arange(n_key)).clamp(min=0)
    mass = torch.zeros(len(weights), n_key, dtype=torch.float64)
    mass.index_add_(1, distance[keep], weights[:, keep]).div_(n_query)
    seen = keep.sum(dim=-1)
    terms = {}
    for name, values in one.terms.items():
        values = values[:, 0].cpu().double().masked_fill(~keep, 0.0)
        mean = (values.sum(dim=-1) / seen)[..., None]
        variance = ((values - mean).square() * keep).sum(dim=-1) / seen
        size = values.abs().sum(dim=(-2, -1)) / seen.sum()
        terms[name] = {"mean_absolute": size.tolist(), "variance": variance.mean(dim=-1).tolist()}
    return {
        "share": {name: weights[..., part].sum(dim=-1).mean(dim=-1).tolist() for name, part in parts.items()},
        "entropy": torch.special.entr(weights).sum(dim=-1).mean(dim=-1).tolist(),
        "terms": terms,
        "mass_by_distance": mass.tolist(),
    }
