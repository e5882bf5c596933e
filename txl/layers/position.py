"""How a layer knows where a key lies. One option so far: distances, as in Transformer-XL."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from txl import ops


class RelativePosition(nn.Module):
    """Scores each key by its content and by its distance (Dai et al. 2019, section 3.3).

        logits[i, j] = ((q_i + u) . k_j  +  (q_i + v) . r_{m+i-j}) / sqrt(d_head),    r_x = W_r R_x
                          terms a and c       terms b and d

    The distance m + i - j runs over the m memories too, so r is as long as the keys. R holds fixed sinusoids; W_r, u and
    v are learned. `clamp_len` (tokens): every distance beyond it counts as it. Raises ValueError for a clamp_len below 1
    or an odd d_model.
    """

    def __init__(self, *, n_head: int, d_head: int, d_model: int, clamp_len: int | None = None):
        super().__init__()
        if clamp_len is not None and not 1 <= clamp_len < 2**31:
            raise ValueError(
                f"model.position.clamp_len: must be at least 1 and below 2^31, or null for no limit; got {clamp_len}"
            )
        if d_model % 2:
            raise ValueError(
                f"model.d_model: must be even, since sinusoids come in pairs of sine and cosine; got {d_model}"
            )
        self.n_head, self.d_model, self.clamp_len = n_head, d_model, clamp_len
        self.scale = d_head**-0.5
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.r_w_bias = nn.Parameter(torch.empty(n_head, d_head))  # u in the paper
        self.r_r_bias = nn.Parameter(torch.empty(n_head, d_head))  # v in the paper

    def share_biases(self, other: "RelativePosition") -> None:
        """Uses the u and v of another layer, as the authors' PyTorch code does for all layers (`untie_r` off)."""
        self.r_w_bias, self.r_r_bias = other.r_w_bias, other.r_r_bias

    def encode(self, n_key: int, like: Tensor) -> Float[Tensor, "r m"]:
        """R, the same for every layer: the sinusoids of the distances n_key - 1, ..., 0, -1."""
        return ops.distance_encoding(n_key, self.d_model, self.clamp_len, like.dtype, like.device)

    def project(self, encoding: Float[Tensor, "r m"]) -> Float[Tensor, "h r d"]:
        """r = W_r R, the keys that stand for distances."""
        return rearrange(self.r_net(encoding), "r (h d) -> h r d", h=self.n_head).contiguous()

    def forward(self, q: Float[Tensor, "h b i d"]) -> tuple[Float[Tensor, "h b i d"], Float[Tensor, "h b i d"]]:
        """What enters the dot product with the keys (terms a and c), and with the r of their distances (b and d)."""
        by_content = (q + self.r_w_bias[:, None, None]) * self.scale
        by_distance = (q + self.r_r_bias[:, None, None]) * self.scale
        return by_content, by_distance
