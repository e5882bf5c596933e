"""Attention of a segment over its memory and itself."""

from collections.abc import Callable

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from txl import ops


class Attention(nn.Module):
    """Multi-head attention whose queries come from the segment, keys and values from memory and segment.

        q = W_q h,   [k ; v] = W_kv [memory ; h],   out = W_o softmax(logits(q, k)) v        (Dai et al. 2019, section 3.2)

    The logits are the position scheme's. None of the projections has a bias. `span` (keys, the query's own included)
    limits how far a query sees; where `documents` numbers the document of each key, it sees those of its own only.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_head: int,
        d_head: int,
        dropatt: float | int,
        position: Callable[..., nn.Module],
        span: int | None,
    ):
        super().__init__()
        self.n_head, self.dropatt, self.span = n_head, dropatt, span
        self.q_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.position = position(n_head=n_head, d_head=d_head, d_model=d_model)

    def forward(
        self,
        hidden: Float[Tensor, "b i m"],
        context: Float[Tensor, "b j m"],
        encoding: Float[Tensor, "r m"],
        documents: Int[Tensor, "b j"] | None = None,
    ) -> Float[Tensor, "b i m"]:
        q = rearrange(self.q_net(hidden), "b i (h d) -> h b i d", h=self.n_head)
        k, v = rearrange(self.kv_net(context), "b j (two h d) -> two h b j d", two=2, h=self.n_head).contiguous()
        query, bias = self.position(q.contiguous(), encoding)
        dropatt = self.dropatt if self.training else 0.0
        attended = ops.attention(query, k, v, bias, span=self.span, documents=documents, dropatt=dropatt)
        return self.o_net(rearrange(attended, "h b i d -> b i (h d)"))
