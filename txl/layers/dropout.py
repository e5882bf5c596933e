"""The dropouts of the Penn Treebank literature, beside the ordinary one: on words, on weights, and variational."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


def word_dropout(
    embedding: Float[Tensor, "b i m"], tokens: Int[Tensor, "b i"], n_token: int, rate: float | int
) -> Float[Tensor, "b i m"]:
    """Drops whole words, all their occurrences at once: E[x] z_x, z_x = 0 or 1 / (1 - rate) (Gal and Ghahramani 2016, section 4.2)."""
    kept = torch.empty(n_token, 1, dtype=embedding.dtype, device=embedding.device).bernoulli_(1 - rate) / (1 - rate)
    return embedding * F.embedding(tokens.to(embedding.device, non_blocking=True), kept)


def variational_dropout(hidden: Float[Tensor, "b i m"], rate: float | int) -> Float[Tensor, "b i m"]:
    """One mask for all tokens of a row: h_i z, z = 0 or 1 / (1 - rate) (Gal and Ghahramani 2016, section 4.1)."""
    kept = torch.empty_like(hidden[:, :1]).bernoulli_(1 - rate) / (1 - rate)
    return hidden * kept


class WeightDropLinear(nn.Linear):
    """A linear map some of whose weights are dropped for a whole segment: (W z) h + b (DropConnect, Wan et al. 2013, section 3)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, wdrop: float | int):
        super().__init__(in_features, out_features, bias=bias)
        self.wdrop = wdrop

    def forward(self, rows: Float[Tensor, "*lead m"]) -> Float[Tensor, "*lead f"]:
        return F.linear(rows, F.dropout(self.weight, self.wdrop, self.training), self.bias)


def linear(in_features: int, out_features: int, *, bias: bool, wdrop: float | int = 0.0) -> nn.Linear:
    """A linear map, with dropout on its weights where there is any."""
    if wdrop:
        return WeightDropLinear(in_features, out_features, bias=bias, wdrop=wdrop)
    return nn.Linear(in_features, out_features, bias=bias)
