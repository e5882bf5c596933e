"""Averages of the weights over the updates: figures and samples are made with them, training goes on with the weights themselves."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(kw_only=True, frozen=True)
class NoAverage:
    """The weights as they are after the last update."""

    of = "nothing"

    def share(self, step: int, count: int) -> float:
        return 0.0


@dataclass(kw_only=True, frozen=True)
class ExponentialAverage:
    """The moving average of the weights w, corrected for its beginning at zero (Kingma & Ba 2015, section 7.2).

        average_t = (1 - decay) (w_t + decay w_{t-1} + decay^2 w_{t-2} + ...) / (1 - decay^t)

    So the average of the first update is its weights, and those of the initialization never count. The idea to measure an
    average of the iterates is that of Polyak & Juditsky (1992). Raises ValueError for a decay outside [0, 1).
    """

    decay: float | int

    of = "all updates"  # an average of another set of updates begins anew

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: must be at least 0 and below 1, got {self.decay}")

    def share(self, step: int, count: int) -> float:
        """Of the weights after update number `step` in the average of `count` updates, this one included."""
        return (1 - self.decay) / (1 - self.decay**count)


@dataclass(kw_only=True, frozen=True)
class StochasticWeightAverage:
    """The mean of the weights after the updates start, start + every, ... (Izmailov et al. 2018, section 3.2).

        average_n = (average_{n-1} (n - 1) + w) / n

    Nothing is to be measured anew for it, as batch norms would be: the model has none. Raises ValueError for a `start` or
    an `every` below 1.
    """

    start: int
    every: int

    def __post_init__(self):
        for name in ("start", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")

    @property
    def of(self) -> str:
        return f"updates from {self.start} on"

    def share(self, step: int, count: int) -> float:
        """As above; 0 for an update that does not count."""
        return 1 / count if step >= self.start and (step - self.start) % self.every == 0 else 0.0


class Average:
    """What a rule has made of a model's weights so far, in their own precision.

    average <- average + share (weights - average)
    """

    def __init__(self, *, rule: NoAverage | ExponentialAverage | StochasticWeightAverage):
        self.rule, self.count = rule, 0  # updates in the average
        self.weights: dict[str, Tensor] = {}  # of each parameter, once an update has counted

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the weights after update number `step`, if that counts."""
        share = self.rule.share(step, self.count + 1)
        if not share:
            return
        if self.count == 0:
            self.weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
        else:
            torch._foreach_lerp_(list(self.weights.values()), list(model.parameters()), share)
        self.count += 1

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the average, if there is one yet; afterwards its own weights, the same bits."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _exchange(self, model: nn.Module) -> None:
        if self.count:
            for name, parameter in model.named_parameters():
                parameter.data, self.weights[name] = self.weights[name], parameter.data

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Plain values and tensors; weights by all names of the model, so that they can take the place of its own."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        every_name = model.named_parameters(remove_duplicate=False)
        weights = {name: self.weights[names[parameter]] for name, parameter in every_name}
        return {"of": self.rule.of, "count": self.count, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any] | None, model: nn.Module) -> None:
        """Sets what `txl.fitting` has looked at; the average of another rule's updates, or none, begins anew."""
        kept = state if state is not None and state["of"] == self.rule.of else {"count": 0, "weights": {}}
        self.count = kept["count"]
        self.weights = {
            name: kept["weights"][name].to(parameter.device, copy=True)
            for name, parameter in model.named_parameters()
            if self.count
        }
