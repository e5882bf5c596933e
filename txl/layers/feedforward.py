"""The position-wise feed-forward network."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


class FeedForward(nn.Module):
    """FF(h) = W_2 drop(activation(W_1 h + b_1)) + b_2    (Vaswani et al. 2017, section 3.3).

    Raises ValueError for an unknown activation.
    """

    def __init__(self, *, d_model: int, d_inner: int, dropout: float | int, activation: str):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation: must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        self.activation = ACTIVATIONS[activation]
        self.inner = nn.Linear(d_model, d_inner)
        self.outer = nn.Linear(d_inner, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i m"]:
        inner = self.activation(self.inner(hidden))
        return self.outer(self.dropout(inner) if self.training else inner)
