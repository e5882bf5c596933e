"""The position-wise feed-forward network."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from txl.layers.dropout import linear


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Float[Tensor, "*lead f2"]) -> Float[Tensor, "*lead f"]:
    """The first half of the components gates the second: swish(x_1) x_2 (Shazeer 2020, section 2)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "swiglu": swiglu}


class FeedForward(nn.Module):
    """FF(h) = W_2 drop(activation(W_1 h + b_1)) + b_2    (Vaswani et al. 2017, section 3.3).

    With `swiglu` W_1 is twice as wide: d_inner gates and as many values. `wdrop` is dropout on W_1 and W_2. Raises
    ValueError for an unknown activation.
    """

    def __init__(self, *, d_model: int, d_inner: int, dropout: float | int, activation: str, wdrop: float | int = 0.0):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation: must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        self.activation = ACTIVATIONS[activation]
        self.inner = linear(d_model, 2 * d_inner if activation == "swiglu" else d_inner, bias=True, wdrop=wdrop)
        self.outer = linear(d_inner, d_model, bias=True, wdrop=wdrop)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i m"]:
        inner = self.activation(self.inner(hidden))
        return self.outer(self.dropout(inner) if self.training else inner)
