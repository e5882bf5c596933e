"""Training: `Run` is all that changes, `updates` the rule by which it does. Whoever loops decides when to log and save."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from txl.data.streams import Lanes, Prefetched
from txl.runtime import autocast, to_device


@dataclass(kw_only=True)
class Run:
    """The state of a training run; saved and set again as a whole, it goes on as if it had never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lanes: Lanes | Prefetched
    scaler: torch.amp.GradScaler
    mems: list[Tensor] | None = None  # carried from each segment to the next
    step: int = 0  # updates done
    tokens: int = 0  # targets seen
    seconds: float = 0.0
    valid_nll: list[float] = field(default_factory=list)  # of every validation, oldest first
    unlogged_nll: float = 0.0  # sum over the tokens since the last line of the log
    unlogged_tokens: int = 0
    unread: list["Update"] = field(default_factory=list)  # updates whose figures the device may not have finished

    PLAIN = ("step", "tokens", "seconds", "valid_nll", "unlogged_nll", "unlogged_tokens")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def note_valid(self, nll: float) -> bool:
        """Remembers a valid figure; true if it is the best so far. Raises Diverged if it, or an update's, is not finite."""
        self.read_figures()
        if not math.isfinite(nll):
            raise Diverged(f"optimizer.lr: after update {self.step} the valid nll is {nll}; try a lower rate, or clip")
        best = nll < min(self.valid_nll, default=math.inf)
        self.valid_nll.append(nll)
        return best

    def read_figures(self) -> None:
        """Waits for the figures of the updates since this was last called, and adds them up.

        Raises Diverged for the first whose loss or gradient is not finite.
        """
        unread, self.unread = self.unread, []
        if not unread:
            return
        scaled = self.scaler.is_enabled()  # then an overflowing gradient is the scaler's business: it skips the update
        for update, (nll, grad_norm) in zip(unread, torch.stack([one.figures for one in unread]).tolist(), strict=True):
            if not math.isfinite(nll) or not (math.isfinite(grad_norm) or scaled):
                raise Diverged(
                    f"optimizer.lr: at update {update.step} the loss is {nll} and its gradient's norm {grad_norm} (learning "
                    f"rate {update.lr:.3g}); stopped before the weights took harm; try a lower rate, a longer "
                    "schedule.warmup or clip"
                )
            self.unlogged_nll += nll * update.n_token
            self.unlogged_tokens += update.n_token

    def take_unlogged(self) -> dict[str, float]:
        """The mean nll since this was last asked for; the count begins anew."""
        self.read_figures()
        mean = self.unlogged_nll / max(1, self.unlogged_tokens)
        self.unlogged_nll, self.unlogged_tokens = 0.0, 0
        return {"train/nll": mean}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors of their own storage. Raises Diverged, as `read_figures` does, before anything is saved."""
        self.read_figures()
        on_cuda = self.device.type == "cuda"
        return {
            **{name: getattr(self, name) for name in self.PLAIN},
            "optimizer": self.optimizer.state_dict(),
            "optimizer_kind": type(self.optimizer).__name__,
            "lanes": self.lanes.state_dict(),
            "scaler": self.scaler.state_dict(),
            "mems": None if self.mems is None else [memory.clone() for memory in self.mems],
            "rng": {
                "cpu": torch.get_rng_state(),
                "device": torch.cuda.get_rng_state(self.device) if on_cuda else None,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets all but the model's parameters; the random generators last. Raises ValueError for what does not fit."""
        kind = type(self.optimizer).__name__
        if state["optimizer_kind"] != kind:
            raise ValueError(f"resume: optimizer: the run was trained with {state['optimizer_kind']}, not {kind}")
        for name in self.PLAIN:
            setattr(self, name, state[name])
        settings = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"resume: optimizer: its saved state is of another optimizer or model ({error})"
            ) from error
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(
                setting
            )  # torch brings back the old weight decay and the like in silence; what is asked for holds
        self.lanes.load_state_dict(state["lanes"])
        self.scaler.load_state_dict(state["scaler"])
        self.mems = None if state["mems"] is None else [memory.to(self.device) for memory in state["mems"]]
        if self.mems and self.lanes.borders is None and any(memory.isnan().any() for memory in self.mems):
            self.mems = (
                None  # documents had borders when it was saved, and have none now: nothing would hide the ended ones
            )
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and state["rng"]["device"] is not None:
            torch.cuda.set_rng_state(state["rng"]["device"], self.device)


@dataclass(frozen=True)
class Update:
    """What one update did, with its learning rate. Asking for its figures waits for the device."""

    step: int
    n_token: int
    lr: float
    figures: Float[Tensor, "two"]  # the mean nll (nats per token), the norm of the gradient before clipping

    @property
    def nll(self) -> float:
        return float(self.figures[0])

    @property
    def grad_norm(self) -> float:
        return float(self.figures[1])


class Diverged(ValueError):
    """The loss or its gradient is no longer finite; the parameters still are."""


def updates(
    run: Run,
    *,
    steps: int,
    lr: float | int,
    schedule: Callable[..., float],
    clip: float | int | None = None,
    precision: str = "fp32",
    wait: bool | None = None,
) -> Iterator[Update]:
    """Trains until `steps` updates are done, one update each time round.

    Each reads the next segment of every lane with the memory carried in, follows the gradient of the mean nll, clipped
    to the global norm `clip`, and carries the memory out; where the lanes begin again, the memory begins empty.
    Raises Diverged for a loss or gradient that is not finite, before the optimizer sees it, if it can `wait` for each
    update's figures: by default on a CPU. Elsewhere nothing is waited for: the optimizer gets zeros in place of such a
    gradient, and `Run.read_figures` raises, whenever something is logged or saved. So no bad figure reaches the weights.
    """
    parameters = list(run.model.parameters())
    wait = run.device.type == "cpu" if wait is None else wait
    run.model.train()
    while run.step < steps:
        before = run.lanes.state_dict()
        segment = next(run.lanes)
        mems = None if segment.begins else run.mems
        rate = schedule(run.step, lr=lr, steps=steps, valid_nll=run.valid_nll)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.zero_grad(set_to_none=True)
        with autocast(run.device, precision):
            starts = None if segment.starts is None else to_device(segment.starts, run.device)
            nll, mems = run.model(segment.tokens, mems, segment.targets, starts=starts)  # which moves the tokens itself
        loss = nll.mean()
        run.scaler.scale(loss).backward()
        run.scaler.unscale_(run.optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
        figures = torch.stack([loss.detach(), norm])
        update = Update(step=run.step + 1, n_token=nll.numel(), lr=rate, figures=figures)
        run.unread.append(update)
        if wait:
            try:
                run.read_figures()
            except Diverged:
                run.lanes.load_state_dict(before)
                raise
        elif not run.scaler.is_enabled():
            bad = ~figures.isfinite().all()
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(bad, 0.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.mems, run.step, run.tokens = mems, run.step + 1, run.tokens + nll.numel()
        yield update
