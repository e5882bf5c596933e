"""The plain Transformer, which Transformer-XL grew from: no memory, no distances, attention over anything.

A baseline, and a place to read the parts one by one. What both have in common is taken from the same files.
"""

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from txl import ops
from txl.layers.feedforward import FeedForward
from txl.layers.position import check_even
from txl.layers.residual import added, normed
from txl.layers.softmax import scaled_embedding

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "MultiHeadAttention",
    "ScaledEmbedding",
    "SinusoidalPositions",
    "causal_mask",
]


class ScaledEmbedding(nn.Module):
    """E[x] sqrt(d_model), with E drawn from N(0, 1 / d_model) so that its product has variance 1 (Vaswani et al. 2017, section 3.4).

    An output layer may use the same table: `weight`.
    """

    def __init__(self, *, n_token: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_token, d_model))
        nn.init.normal_(self.weight, 0.0, d_model**-0.5)

    def forward(self, tokens: Int[Tensor, "b i"]) -> Float[Tensor, "b i m"]:
        return scaled_embedding(tokens, self.weight)


class SinusoidalPositions(nn.Module):
    """drop(h_i + R_{start + i}), R_x the sinusoids of place x (`txl.ops.sinusoids`; Vaswani et al. 2017, sections 3.5 and 5.4).

    Nothing is learned, and any number of places will do. Raises ValueError for an odd d_model.
    """

    def __init__(self, *, d_model: int, dropout: float | int = 0.0):
        super().__init__()
        check_even("d_model", d_model)
        self.d_model = d_model
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, "b i m"], start: int = 0) -> Float[Tensor, "b i m"]:
        # on the CPU in float64, then rounded once: bfloat16 does not tell most places apart
        places = torch.arange(start, start + hidden.shape[1], dtype=torch.float64, device="cpu")
        return self.dropout(hidden + ops.sinusoids(places, self.d_model).to(hidden.dtype).to(hidden.device))


class MultiHeadAttention(nn.Module):
    """Attention of any queries over any keys and values (Vaswani et al. 2017, sections 3.2.1 and 3.2.2).

        q = W_q x + b_q,   k = W_k y + b_k,   v = W_v z + b_v,   out = W_o drop(A) v + b_o
        A = softmax(q k^T / sqrt(d_head))                               in each head, over the keys that the mask keeps

    The mask, boolean, is True where a query may see a key, in all heads. One without batch is for all rows of it; one for
    padded keys is [b 1 j]. A query that sees nothing gets zeros, without b_o. `d_head` is d_model / n_head unless it is
    given. `bias=False` leaves out all four b. Raises ValueError for a d_model that n_head does not divide where there is no
    d_head, for an n_head below 1, and for a mask that is not boolean or has another shape.
    """

    def __init__(
        self, *, d_model: int, n_head: int, d_head: int | None = None, dropatt: float | int = 0.0, bias: bool = True
    ):
        super().__init__()
        if n_head < 1:
            raise ValueError(f"model.n_head: must be at least 1, got {n_head}")
        if d_head is None and d_model % n_head:
            raise ValueError(f"model.n_head: must divide d_model, {d_model}, unless d_head is given; got {n_head}")
        self.n_head, self.d_head = n_head, d_model // n_head if d_head is None else d_head
        self.q_net = nn.Linear(d_model, n_head * self.d_head, bias=bias)
        self.k_net = nn.Linear(d_model, n_head * self.d_head, bias=bias)
        self.v_net = nn.Linear(d_model, n_head * self.d_head, bias=bias)
        self.o_net = nn.Linear(n_head * self.d_head, d_model, bias=bias)
        self.dropatt = nn.Dropout(dropatt)

    def forward(
        self,
        queries: Float[Tensor, "b i m"],
        keys: Float[Tensor, "b j m"],
        values: Float[Tensor, "b j m"],
        mask: Shaped[Tensor, "#i #j"] | Shaped[Tensor, "#b #i #j"] | None = None,
        *,
        return_weights: bool = False,
    ) -> Float[Tensor, "b i m"] | tuple[Float[Tensor, "b i m"], Float[Tensor, "b h i j"]]:
        """With `return_weights` also A, as it was before dropout."""
        if mask is not None:
            check_mask(mask, len(queries), queries.shape[1], keys.shape[1])
        q, k, v = self._heads(self.q_net(queries)), self._heads(self.k_net(keys)), self._heads(self.v_net(values))
        scores = einsum(q * self.d_head**-0.5, k, "b h i d, b h j d -> b h i j")
        weights = ops.masked_softmax(scores, mask[:, None] if mask is not None and mask.ndim == 3 else mask)
        attended = einsum(self.dropatt(weights).to(v.dtype), v, "b h i j, b h j d -> b h i d")
        output = self.o_net(rearrange(attended, "b h i d -> b i (h d)"))
        if keys.shape[1] == 0:
            output = torch.zeros_like(output)
        elif mask is not None:
            output = output.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
        return (output, weights) if return_weights else output

    def _heads(self, rows: Float[Tensor, "b k _"]) -> Float[Tensor, "b h k d"]:
        return rearrange(rows, "b k (h d) -> b h k d", h=self.n_head)


def check_mask(mask: Tensor, n_batch: int, n_query: int, n_key: int) -> None:
    """Raises ValueError for a mask that is not boolean, and for one of another shape than [#i #j] or [#b #i #j]."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask: must be boolean, True where a query may see a key; got {mask.dtype}")
    full = (n_batch, n_query, n_key)[-mask.ndim :]
    if mask.ndim not in (2, 3) or any(n != 1 and n != most for n, most in zip(mask.shape, full, strict=True)):
        shape = f"[{n_query}, {n_key}] or [{n_batch}, {n_query}, {n_key}]"
        raise ValueError(
            f"mask: must have the shape {shape}, or 1 where it is the same for all; got {list(mask.shape)}"
        )


def causal_mask(n: int, device: torch.device | None = None) -> Bool[Tensor, "i j"]:
    """True where query i may see key j, which is where j <= i."""
    return ~ops.hidden_keys(range(n), range(n), memory=0, reach=None, device=device)


class EncoderLayer(nn.Module):
    """Attention of a text over itself, then the feed-forward network, each with its residual and its norm.

    post-norm:  h <- LN(h + drop(A(h, h))),            h <- LN(h + drop(FF(h)))     (Vaswani et al. 2017, section 3.1)
    pre-norm:   h <- h + drop(A(LN(h), LN(h))),        h <- h + drop(FF(LN(h)))     (Xiong et al. 2020, section 3.1)

    A stack of pre-norm layers wants one more norm at its end. Raises ValueError for heads that do not fit
    (`MultiHeadAttention`) and for an unknown activation.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_head: int,
        d_inner: int,
        dropout: float | int = 0.0,
        dropatt: float | int = 0.0,
        pre_norm: bool = False,
        activation: str = "relu",
        d_head: int | None = None,
    ):
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = MultiHeadAttention(d_model=d_model, n_head=n_head, d_head=d_head, dropatt=dropatt)
        self.feedforward = FeedForward(d_model=d_model, d_inner=d_inner, dropout=dropout, activation=activation)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Float[Tensor, "b i m"],
        mask: Shaped[Tensor, "#i #i"] | Shaped[Tensor, "#b #i #i"] | None = None,
    ) -> Float[Tensor, "b i m"]:
        """Masks as in `MultiHeadAttention`; without one, all see all."""
        rows = normed(hidden, self.attention_norm, self.pre_norm)
        update = self.dropout(self.attention(rows, rows, rows, mask))
        hidden = added(hidden, update, self.attention_norm, self.pre_norm)
        update = self.dropout(self.feedforward(normed(hidden, self.feedforward_norm, self.pre_norm)))
        return added(hidden, update, self.feedforward_norm, self.pre_norm)


class DecoderLayer(nn.Module):
    """Attention of a text over what it has so far, attention over a source, and the feed-forward network.

    post-norm:  h <- LN(h + drop(A(h, h))),      h <- LN(h + drop(A'(h, source))),      h <- LN(h + drop(FF(h)))
    pre-norm:   h <- h + drop(A(LN(h), LN(h))),  h <- h + drop(A'(LN(h), source)),      h <- h + drop(FF(LN(h)))

    From the papers that `EncoderLayer` names, and with the same errors. The source is taken as its encoder left it.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_head: int,
        d_inner: int,
        dropout: float | int = 0.0,
        dropatt: float | int = 0.0,
        pre_norm: bool = False,
        activation: str = "relu",
        d_head: int | None = None,
    ):
        super().__init__()
        self.pre_norm = pre_norm
        heads = dict(d_model=d_model, n_head=n_head, d_head=d_head, dropatt=dropatt)
        self.attention, self.source_attention = MultiHeadAttention(**heads), MultiHeadAttention(**heads)
        self.feedforward = FeedForward(d_model=d_model, d_inner=d_inner, dropout=dropout, activation=activation)
        self.attention_norm, self.source_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.feedforward_norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Float[Tensor, "b i m"],
        source: Float[Tensor, "b j m"],
        mask: Shaped[Tensor, "#i #i"] | Shaped[Tensor, "#b #i #i"] | None = None,
        source_mask: Shaped[Tensor, "#i #j"] | Shaped[Tensor, "#b #i #j"] | None = None,
    ) -> Float[Tensor, "b i m"]:
        """Masks as in `MultiHeadAttention`; without `mask`, the causal one; without `source_mask`, all of the source."""
        mask = causal_mask(hidden.shape[1], hidden.device) if mask is None else mask
        rows = normed(hidden, self.attention_norm, self.pre_norm)
        update = self.dropout(self.attention(rows, rows, rows, mask))
        hidden = added(hidden, update, self.attention_norm, self.pre_norm)
        rows = normed(hidden, self.source_norm, self.pre_norm)
        update = self.dropout(self.source_attention(rows, source, source, source_mask))
        hidden = added(hidden, update, self.source_norm, self.pre_norm)
        update = self.dropout(self.feedforward(normed(hidden, self.feedforward_norm, self.pre_norm)))
        return added(hidden, update, self.feedforward_norm, self.pre_norm)
