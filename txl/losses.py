"""The loss of an output layer, a chunk of the vocabulary at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from txl.tiles import as_autocast

# In logits, that is tokens times words:
PLAIN = 2**20  # up to here torch's own operations have less to start, and memory is no matter
KEPT = 2**28  # up to here the logits are kept for the backward pass (1 GiB in float32), beyond they are computed again
CHUNK = 2**21  # made at a time on a CPU, whose cache holds them
CHUNK_ON_DEVICE = 2**26  # made at a time on an accelerator, which wants few and large kernels


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
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    size = len(hidden) * len(weight)
    if chunk is None and size <= PLAIN:
        precision = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = F.linear(hidden, weight, bias).log_softmax(dim=1, dtype=precision)
        return -log_probs.gather(1, targets[:, None])[:, 0]
    if chunk is None:
        chunk = max(1, (CHUNK if device == "cpu" else CHUNK_ON_DEVICE) // len(hidden))
    keep = torch.is_grad_enabled() and size <= KEPT
    return _LinearNLL.apply(hidden, weight, bias, targets, chunk, keep)
