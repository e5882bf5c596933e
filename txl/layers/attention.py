"""Attention of a segment over its memory and itself."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from txl import ops


class Attention(nn.Module):
    """Multi-head attention whose queries come from the segment, keys and values from memory and segment.

        q = W_q h,   [k ; v] = W_kv [memory ; h],   out = W_o softmax(logits(q, k)) v        (Dai et al. 2019, section 3.2)

    The logits are the position scheme's. None of the projections has a bias. Which keys a query sees is the caller's to say:
    `reach`, `stair` and `documents` as in `txl.ops.attention`.
    """

    def __init__(
        self, *, d_model: int, n_head: int, d_head: int, dropatt: float | int, position: Callable[..., nn.Module]
    ):
        super().__init__()
        self.n_head, self.dropatt = n_head, dropatt
        self.q_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.position = position(n_head=n_head, d_head=d_head, d_model=d_model)

    def keys_values(self, rows: Float[Tensor, "b j m"]) -> Float[Tensor, "two h b j d"]:
        """What the rows of memory or segment are to all later queries."""
        # by hand, here and below: for one token einops would cost as much as the product
        heads = self.kv_net(rows).unflatten(2, (2, self.n_head, -1))  # b j two h d
        return heads.permute(2, 3, 0, 1, 4)

    def forward(
        self,
        segment: Float[Tensor, "b i m"],
        keys_values: Float[Tensor, "two h b j d"],
        r: Float[Tensor, "h r d"],
        documents: Int[Tensor, "b j"] | None = None,
        *,
        reach: int | None = None,
        stair: int = 1,
    ) -> Float[Tensor, "b i m"]:
        """Attends from each row of the segment to the memory's keys and values, which come first, and to the segment's."""
        q = self.q_net(segment).unflatten(2, (self.n_head, -1)).permute(2, 0, 1, 3)  # h b i d
        by_content, by_distance = self.position(q)
        window = dict(reach=reach, stair=stair, documents=documents)
        dropatt = self.dropatt if self.training else 0.0
        attended = ops.attention(by_content, *keys_values, by_distance, r, **window, dropatt=dropatt)
        return self.o_net(attended.permute(1, 2, 0, 3).flatten(2))  # h b i d -> b i (h d)
