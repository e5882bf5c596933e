"""Attention of a segment over its memory and itself."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from txl import ops
from txl.layers.dropout import linear


class Attention(nn.Module):
    """Multi-head attention whose queries come from the segment, keys and values from memory and segment.

        q = W_q h,   [k ; v] = W_kv [memory ; h],   out = W_o softmax(logits(q, k)) v        (Dai et al. 2019, section 3.2)

    The logits are the position scheme's. None of the projections has a bias. Which keys a query sees is the caller's to say:
    `reach`, `stair` and `documents` as in `txl.ops.attention`. `wdrop` is dropout on the weights of the projections.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_head: int,
        d_head: int,
        dropatt: float | int,
        position: Callable[..., nn.Module],
        wdrop: float | int = 0.0,
    ):
        super().__init__()
        self.n_head, self.dropatt, self.wdrop = n_head, dropatt, wdrop
        self.q_net = linear(d_model, n_head * d_head, bias=False, wdrop=wdrop)
        self.kv_net = linear(d_model, 2 * n_head * d_head, bias=False, wdrop=wdrop)
        self.o_net = linear(n_head * d_head, d_model, bias=False, wdrop=wdrop)
        self.position = position(n_head=n_head, d_head=d_head, d_model=d_model)

    def queries(self, segment: Float[Tensor, "b i m"]) -> Float[Tensor, "h b i d"]:
        """What the rows of the segment ask."""
        return self.q_net(segment).unflatten(2, (self.n_head, -1)).permute(2, 0, 1, 3)

    def keys_values(self, rows: Float[Tensor, "b j m"]) -> Float[Tensor, "two h b j d"]:
        """What the rows of memory or segment are to all later queries."""
        # by hand, here and below: for one token einops would cost as much as the product
        heads = self.kv_net(rows).unflatten(2, (2, self.n_head, -1))  # b j two h d
        return heads.permute(2, 3, 0, 1, 4)

    def forward(
        self,
        segment: Float[Tensor, "b i m"],
        keys_values: Float[Tensor, "two h b j d"],
        r: Float[Tensor, "n r e"],
        documents: Int[Tensor, "b j"] | None = None,
        *,
        reach: int | None = None,
        stair: int = 1,
    ) -> Float[Tensor, "b i m"]:
        """Attends from each row of the segment to the memory's keys and values, which come first, and to the segment's."""
        key, value = keys_values
        query, key, by_distance, r = self.position(self.queries(segment), key, r)
        window = dict(reach=reach, stair=stair, documents=documents)
        dropatt = self.dropatt if self.training else 0.0
        attended = ops.attention(query, key, value, by_distance, r, **window, dropatt=dropatt)
        return self.o_net(attended.permute(1, 2, 0, 3).flatten(2))  # h b i d -> b i (h d)
