"""The pure functions under the model: sinusoids, the relative shift, the mask, attention by tiles, the loss by chunks."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

# Of `linear_nll`, in logits, that is tokens times words:
PLAIN = 2**20  # up to here torch's own operations have less to start, and memory is no matter
KEPT = 2**28  # up to here the logits are kept for the backward pass (1 GiB in float32), beyond they are computed again
CHUNK = 2**21  # made at a time on a CPU, whose cache holds them
CHUNK_ON_DEVICE = 2**26  # made at a time on an accelerator, which wants few and large kernels


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
    documents: Int[Tensor, "b j"] | None = None,
    dropatt: float | int = 0.0,
    tile: int = 128,
) -> Float[Tensor, "h b i d"]:
    """Causal attention of a segment over its memory and itself, a tile of queries at a time.

        softmax_j(query_i . key_j + bias[i, j]) value_j    over the keys with 0 <= m + i - j < span

    The m = J - I first keys are the memory; `query` comes scaled. `bias(queries, keys)` returns the position scheme's
    term, [h b i j], for a range of queries and a range of keys; only keys inside the window are asked for. With
    `documents`, the number of the document that each key is in, a query sees the keys of its own. The softmax is taken in
    float32 at the least. `dropatt` is the dropout on the attention weights.
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
        own = range(memory + queries.start, memory + queries.stop)
        hidden = hidden_keys(own, keys, span, scores.device)
        if documents is not None:
            foreign = documents[:, own.start : own.stop, None] != documents[:, None, seen]
            hidden = repeat(hidden | foreign, "b i j -> (h b) i j", h=n_head)
        scores = scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = F.dropout(weights, dropatt) if dropatt else weights
        outputs.append(torch.bmm(weights.to(value.dtype), value[:, seen]))
    return rearrange(torch.cat(outputs, dim=1), "(h b) i d -> h b i d", h=n_head, b=n_batch)


def _chunks(n_token: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, n_token)) for start in range(0, n_token, chunk))


def _place(targets: Int[Tensor, "n"], words: slice) -> tuple[Int[Tensor, "n 1"], Bool[Tensor, "n 1"]]:
    """The column of each target in a chunk of the vocabulary, and whether it has one there; without it, any column."""
    column = targets[:, None] - words.start
    return column.clamp(0, words.stop - words.start - 1), (column >= 0) & (targets[:, None] < words.stop)


class _LinearNLL(torch.autograd.Function):
    """`linear_nll`, a chunk of the vocabulary at a time; with `keep`, the logits wait for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "n d"],
        weight: Float[Tensor, "v d"],
        bias: Float[Tensor, "v"],
        targets: Int[Tensor, "n"],
        chunk: int,
        keep: bool,
    ) -> Float[Tensor, "n"]:
        precision = torch.promote_types(hidden.dtype, torch.float32)
        target_logit = hidden.new_full((len(hidden),), float("nan"), dtype=precision)  # stays so for no known word
        totals, kept = [], []
        for words in _chunks(len(weight), chunk):
            logits = torch.addmm(bias[words], hidden, weight[words].t())
            if keep:
                kept.append(logits)
            logits = logits.to(precision)
            totals.append(logits.logsumexp(dim=1))
            column, here = _place(targets, words)
            target_logit = torch.where(here, logits.gather(1, column), target_logit[:, None])[:, 0]
        total = torch.stack(totals).logsumexp(dim=0)
        ctx.save_for_backward(hidden, weight, bias, targets, total, *kept)
        ctx.chunk = chunk
        return total - target_logit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "n"]) -> tuple[Tensor | None, ...]:
        """The gradient of a logit is p(word) - [word is the target]: made of the logits, used and dropped chunk by chunk."""
        hidden, weight, bias, targets, total, *kept = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype) if for_hidden else None
        grad_weight = weight.new_empty(weight.shape) if for_weight else None
        grad_bias = bias.new_empty(bias.shape) if for_bias else None
        for index, words in enumerate(_chunks(len(weight), ctx.chunk)):
            logits = kept[index] if kept else torch.addmm(bias[words], hidden, weight[words].t())
            slope = (logits.to(total.dtype) - total[:, None]).exp_()
            column, here = _place(targets, words)
            slope.scatter_add_(1, column, -here.to(slope.dtype)).mul_(grad[:, None])
            if grad_bias is not None:
                grad_bias[words] = slope.sum(dim=0)
            slope = slope.to(hidden.dtype)
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[words])
            if grad_hidden is not None:
                grad_hidden += slope @ weight[words]
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def linear_nll(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, "v"],
    targets: Int[Tensor, "n"],
    *,
    chunk: int | None = None,
) -> Float[Tensor, "n"]:
    """The loss of an output layer in nats, without ever holding tokens x vocabulary twice.

        -log softmax(W h_n + bias)[target_n] = log sum_v exp(W_v . h_n + bias_v) - (W h_n + bias)[target_n]

    The products are taken in the inputs' type, or autocast's; sums and losses in float32 at the least. `chunk` (words at a
    time) follows from the sizes where it is not given.
    """
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden, weight, bias = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight, bias))
    size = len(hidden) * len(weight)
    if chunk is None and size <= PLAIN:
        precision = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = F.linear(hidden, weight, bias).log_softmax(dim=1, dtype=precision)
        return -log_probs.gather(1, targets[:, None])[:, 0]
    if chunk is None:
        chunk = max(1, (CHUNK if device == "cpu" else CHUNK_ON_DEVICE) // len(hidden))
    keep = torch.is_grad_enabled() and size <= KEPT
    return _LinearNLL.apply(hidden, weight, bias, targets, chunk, keep)
