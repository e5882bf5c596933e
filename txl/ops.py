"""The pure functions under the model: sinusoids, the relative shift, the mask, attention by tiles."""

from collections.abc import Callable
from functools import lru_cache

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F


def sinusoids(distances: Float[Tensor, "r"], d_model: int) -> Float[Tensor, "r m"]:
    """Encodes each distance as d_model sines and cosines (Vaswani et al. 2017, section 3.5; sines first, as in Transformer-XL).

    R[x] = (sin(x w_0), ..., sin(x w_n), cos(x w_0), ..., cos(x w_n)),   w_k = 10000^(-2k / d_model)
    """
    frequencies = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=distances.dtype, device=distances.device) / d_model)
    angles = torch.outer(distances, frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


@lru_cache(maxsize=8)
def _cached_encoding(
    n_key: int, d_model: int, clamp_len: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    distances = torch.arange(n_key - 1, -2, -1, dtype=torch.float64, device="cpu")
    with torch.inference_mode(False), torch.no_grad():
        return sinusoids(distances.clamp(max=clamp_len or n_key), d_model).to(dtype).to(device)


@torch.compiler.assume_constant_result
def distance_encoding(
    n_key: int, d_model: int, clamp_len: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Sinusoids of the distances n_key - 1, ..., 1, 0 and of one more row, -1, which `relative_shift` needs and the mask hides.

    Distances beyond `clamp_len` count as `clamp_len`. Built on the CPU in float64, then rounded once: in bfloat16 only
    385 of the first 512 integers differ. Tables are kept, of the next power of two, since all segments ask for the same.
    """
    size = 1 << (n_key - 1).bit_length()
    return _cached_encoding(size, d_model, clamp_len, dtype, device)[size - n_key :]


def relative_shift(scores: Float[Tensor, "*lead i r"]) -> Float[Tensor, "*lead i j"]:
    """Turns scores by distance into scores by key (Dai et al. 2019, appendix B): out[i, j] = scores[i, j + (I - 1 - i)].

    Column c of `scores` belongs to the distance J - 1 - c, the last of its J + 1 columns to -1. Row by row in memory,
    out[i, j] stands I - 1 + i J + j places from the start, so that the shift is a view: no element is moved. Keys that
    lie ahead of their query get a neighbour's score; the causal mask hides them.
    """
    i, r = scores.shape[-2:]
    flat = scores.flatten(-2)
    return flat[..., i - 1 : i - 1 + i * (r - 1)].unflatten(-1, (i, r - 1))


def hidden_keys(
    queries: range, keys: range, span: int | None, device: torch.device | None = None
) -> Bool[Tensor, "i j"]:
    """True where a query must not see a key: keys ahead of it and, with a span, keys that lie `span` or more behind.

    Queries and keys are positions on one axis, that of the keys (the memory first, then the segment).
    """
    query = torch.arange(queries.start, queries.stop, device=device)
    key = torch.arange(keys.start, keys.stop, device=device)
    distance = query[:, None] - key[None, :]
    hidden = distance < 0
    return hidden if span is None else hidden | (distance >= span)


def attention(
    query: Float[Tensor, "h b i d"],
    key: Float[Tensor, "h b j d"],
    value: Float[Tensor, "h b j d"],
    bias: Callable[[range, range], Tensor],
    *,
    span: int | None = None,
    dropatt: float | int = 0.0,
    tile: int = 128,
) -> Float[Tensor, "h b i d"]:
    """Causal attention of a segment over its memory and itself, a tile of queries at a time.

        softmax_j(query_i . key_j + bias[i, j]) value_j    over the keys with 0 <= m + i - j < span

    The m = J - I first keys are the memory; `query` comes scaled. `bias(queries, keys)` returns the position scheme's
    term, [h b i j], for a range of queries and a range of keys; only keys inside the window are asked for. The softmax
    is taken in float32 at the least. `dropatt` is the dropout on the attention weights.
    """
    n_head, n_batch, n_query, _ = query.shape
    memory = key.shape[2] - n_query
    fold = "h b x d -> (h b) x d"
    key, value = rearrange(key, fold), rearrange(value, fold)
    outputs = []
    for start in range(0, n_query, tile):
        queries = range(start, min(start + tile, n_query))
        oldest = 0 if span is None else max(0, memory + start - span + 1)
        keys = range(oldest, memory + queries.stop)
        seen = slice(keys.start, keys.stop)
        scores = torch.baddbmm(
            rearrange(bias(queries, keys), "h b i j -> (h b) i j"),
            rearrange(query[:, :, queries.start : queries.stop], fold),
            rearrange(key[:, seen], "n j d -> n d j"),
        )
        hidden = hidden_keys(range(memory + queries.start, memory + queries.stop), keys, span, scores.device)
        scores = scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = F.dropout(weights, dropatt) if dropatt else weights
        outputs.append(torch.bmm(weights.to(value.dtype), value[:, seen]))
    return rearrange(torch.cat(outputs, dim=1), "(h b) i d -> h b i d", h=n_head, b=n_batch)
