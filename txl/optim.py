"""What is decayed, and learning rates as plain functions of the step."""

import math
from collections.abc import Sequence

from torch import nn


def parameter_groups(model: nn.Module) -> list[dict]:
    """Matrices and tables, which weight decay concerns, and the rest (biases, norms, u, v), which it spares."""
    named = list(model.named_parameters())
    spared = [parameter for name, parameter in named if parameter.ndim < 2 or name.endswith(("r_w_bias", "r_bias"))]
    spared_ids = {id(parameter) for parameter in spared}
    decayed = [parameter for _, parameter in named if id(parameter) not in spared_ids]
    return [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]


def warmed_up(step: int, warmup: int) -> float:
    """The share of the learning rate at the update after `step` updates: linear, as the authors count it, but never 0."""
    if warmup < 0:
        raise ValueError(f"schedule.warmup: must be at least 0, got {warmup}")
    return min(1.0, max(step, 1) / warmup) if warmup else 1.0


def _check_lr_min(lr: float | int, lr_min: float | int) -> None:
    if not 0 <= lr_min <= lr:
        raise ValueError(f"schedule.lr_min: must lie between 0 and optimizer.lr, {lr}; got {lr_min}")


def constant(step: int, *, lr: float | int, steps: int, valid_nll: Sequence[float], warmup: int = 0) -> float:
    """lr, after a linear warm-up over `warmup` updates."""
    return lr * warmed_up(step, warmup)


def cosine(
    step: int,
    *,
    lr: float | int,
    steps: int,
    valid_nll: Sequence[float],
    warmup: int = 0,
    lr_min: float | int = 0.0,
    after_warmup: bool = False,
) -> float:
    """lr_min + (lr - lr_min) (1 + cos(pi step / steps)) / 2, after a linear warm-up.

    As in the authors' PyTorch code, the cosine counts all `steps` from the first, the warm-up included; with `after_warmup`
    it counts those behind the warm-up, as in their TensorFlow code and NVIDIA's.
    """
    _check_lr_min(lr, lr_min)
    rising = lr * warmed_up(step, warmup)
    if step < warmup:
        return rising
    passed, whole = (step - warmup, steps - warmup) if after_warmup else (step, steps)
    return lr_min + (lr - lr_min) * (1 + math.cos(math.pi * min(passed / max(whole, 1), 1.0))) / 2


def inverse_square_root(
    step: int, *, lr: float | int, steps: int, valid_nll: Sequence[float], warmup: int = 0
) -> float:
    """lr sqrt(warmup / step), after a linear warm-up, so that lr is the peak (Vaswani et al. 2017, section 5.3).

    Without a warm-up: lr / sqrt(step).
    """
    return lr * warmed_up(step, warmup) * min(1.0, math.sqrt(max(warmup, 1) / max(step, 1)))


def plateau(
    step: int,
    *,
    lr: float | int,
    steps: int,
    valid_nll: Sequence[float],
    warmup: int = 0,
    factor: float | int = 0.5,
    patience: int = 0,
    lr_min: float | int = 0.0,
) -> float:
    """lr, multiplied by `factor` each time that more than `patience` validations in a row brought no new best nll.

    A function of the figures so far, `valid_nll` (nats, oldest first), so that nothing but them has to be saved.
    """
    if not 0 < factor < 1:
        raise ValueError(f"schedule.factor: must lie between 0 and 1, got {factor}")
    if patience < 0:
        raise ValueError(f"schedule.patience: must be at least 0, got {patience}")
    _check_lr_min(lr, lr_min)
    best, waited, scale = math.inf, 0, 1.0
    for nll in valid_nll:
        best, waited = (nll, 0) if nll < best else (best, waited + 1)
        if waited > patience:
            scale, waited = scale * factor, 0
    return max(lr_min, lr * scale) * warmed_up(step, warmup)
