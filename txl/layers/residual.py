"""Residual and norm around a part of a layer, in both orders, for the plain Transformer and for Transformer-XL alike."""

from jaxtyping import Float
from torch import Tensor, nn


def normed(rows: Float[Tensor, "*lead m"], norm: nn.Module, pre_norm: bool) -> Float[Tensor, "*lead m"]:
    """What the part reads: LN(x) in pre-norm, x itself in post-norm."""
    return norm(rows) if pre_norm else rows


def added(
    hidden: Float[Tensor, "*lead m"], update: Float[Tensor, "*lead m"], norm: nn.Module, pre_norm: bool
) -> Float[Tensor, "*lead m"]:
    """What goes on, given what the part returned.

    post-norm:  LN(x + f(x))      (Vaswani et al. 2017, section 3.1)
    pre-norm:   x + f(LN(x))      (Xiong et al. 2020, section 3.1)
    """
    hidden = hidden + update
    return hidden if pre_norm else norm(hidden)
