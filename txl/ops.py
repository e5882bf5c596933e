"""The pure functions under the model: sinusoids, the relative shift, the masks, attention by tiles."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl.tiles import EagerAttention, Tiles, as_autocast, draw_seed, hidden_keys, one_query, relative_shift

__all__ = ["attention", "distance_encoding", "hidden_keys", "masked_softmax", "relative_shift", "sinusoids"]


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


def distance_encoding(
    n_key: int, d_model: int, clamp_len: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Sinusoids of the distances n_key - 1, ..., 1, 0 and of one more row, -1, which `relative_shift` needs and the mask hides.

    Distances beyond `clamp_len` count as `clamp_len`. Built on the CPU in float64, then rounded once: in bfloat16 only
    385 of the first 512 integers differ. Tables are kept, of the next power of two, since all segments ask for the same.
    """
    if torch.compiler.is_compiling():  # part of the program, for any length
        distances = torch.arange(n_key - 1, -2, -1, dtype=torch.float64).clamp(max=clamp_len or n_key)
        return sinusoids(distances, d_model).to(dtype).to(device)
    size = 1 << (n_key - 1).bit_length()
    return _cached_encoding(size, d_model, clamp_len, dtype, device)[size - n_key :]


def masked_softmax(scores: Float[Tensor, "*lead i j"], keep: Bool[Tensor, "..."] | None) -> Float[Tensor, "*lead i j"]:
    """Attention weights over the keys that `keep`, which broadcasts to the scores, is true for (Vaswani et al. 2017, section 3.2.3).

        weights[i, j] = keep[i, j] exp(scores[i, j]) / sum_k keep[i, k] exp(scores[i, k])

    Taken in float32 at the least. Where a row keeps no key, all its weights are zero, and so are their gradients.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if keep is None:
        return scores.softmax(dim=-1)
    # the least number instead of -inf: a row of -inf alone is not-a-number on its way, which the search for such finds
    weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~keep, 0.0)


def attention(
    query: Float[Tensor, "h b i d"],
    key: Float[Tensor, "h b j d"],
    value: Float[Tensor, "h b j d"],
    by_distance: Float[Tensor, "h b i e"] | None = None,
    r: Float[Tensor, "h r e"] | None = None,
    *,
    reach: int | None = None,
    stair: int = 1,
    documents: Int[Tensor, "b j"] | None = None,
    dropatt: float | int = 0.0,
    keep: bool | None = None,
    tile: int | None = None,
) -> Float[Tensor, "h b i d"]:
    """Causal attention of a segment over its memory and itself, never holding all queries x keys at a time.

        softmax_j(query_i . key_j + by_distance_i . r_x) value_j,     x = J - 1 - (m + i - j)

    The m = J - I first keys are the memory; `query` and `by_distance` come scaled. Row x of `r` stands for a distance, from
    J - 1 down to 0, and then -1 (never seen, but finite); without `r` the second term is left out. A query sees the keys
    from `reach` before its stair of `stair` queries up to itself, all of them without a `reach`: (mem_len - 1, 1) is
    `same_length`, (mem_len, tgt_len) what segments of tgt_len see, however long the segment (`hidden_keys`). With
    `documents`, the number of the document that each key is in, it sees the keys of its own. The softmax is taken in
    float32 at the least. `dropatt` is the dropout on the attention weights.

    It is computed by tiles of `tile` queries, over the keys in their window only. With `keep` the weights wait for the
    backward pass; without it nothing of size queries x keys outlives its tile, and they are computed again (as in Rabe
    and Staats 2021, section 3). Both follow from the sizes where they are not given. Compiled, it is one operator that
    keeps nothing. There is no double backward.
    """
    query, key, value, by_distance, r = as_autocast(query, key, value, by_distance, r)
    if query.shape[2] == 1 and not dropatt and not torch.is_grad_enabled():
        return one_query(query, key, value, by_distance, r, documents, reach)
    given = (query.contiguous(), key, value, None if by_distance is None else by_distance.contiguous(), r, documents)
    options = (reach, stair, float(dropatt), tile)
    if torch.compiler.is_compiling():
        return torch.ops.txl.attention(*given, *options)[0]
    if not torch.is_grad_enabled():
        return Tiles(*given, *options).forward(draw_seed(dropatt))
    return EagerAttention.apply(*given, *options, keep)
