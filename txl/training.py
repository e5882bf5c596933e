"""Training: `Run` is all that changes, `updates` the rule by which it does. Whoever loops decides when to log and save."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from txl import fitting
from txl.averaging import Average, NoAverage
from txl.data.streams import Lanes, Prefetched, Segment
from txl.ranks import ALONE, Ranks
from txl.runtime import autocast, to_device
from txl.sharding import average_the_rest, exchanging, gradient_norm, own_part

OVERFLOWS = 64  # of fp16 in a row: no scale is left to try


@dataclass(kw_only=True)
class Run:
    """The state of a training run; saved and set again as a whole, it goes on as if it had never stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lanes: Lanes | Prefetched
    scaler: torch.amp.GradScaler
    replica: nn.Module | None = None  # what is called in place of the model, see `txl.sharding`
    ranks: Ranks = ALONE
    average: Average = field(default_factory=lambda: Average(rule=NoAverage()))  # what figures are of
    mems: list[Tensor] | None = None  # carried from each segment to the next, of this process's lanes
    step: int = 0  # updates done
    tokens: int = 0  # targets seen, of all lanes
    seconds: float = 0.0
    bad_updates: int = 0  # skipped, because their loss or gradient was not finite
    valid_nll: list[float] = field(default_factory=list)  # of every validation, oldest first
    measured: int = 0  # the step of the last of them
    unlogged_nll: float = 0.0  # sum over the tokens since the last line of the log
    unlogged_tokens: int = 0
    unread: list["Update"] = field(default_factory=list)  # updates whose figures the device may not have finished

    PLAIN = {
        "step": int,
        "tokens": int,
        "seconds": float,
        "bad_updates": int,
        "valid_nll": list,
        "measured": int,
        "unlogged_nll": float,
        "unlogged_tokens": int,
    }

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
        self.measured = self.step
        return best

    def read_figures(self) -> None:
        """Waits for the figures of the updates since this was last called, and adds them up.

        Raises Diverged for the first whose loss or gradient is not finite.
        """
        unread, self.unread = self.unread, []
        if not unread:
            return
        for update, (nll, grad_norm) in zip(unread, torch.stack([one.figures for one in unread]).tolist(), strict=True):
            if not self.is_finite(nll, grad_norm):
                raise Diverged(
                    f"optimizer.lr: at update {update.step} the loss is {nll} and its gradient's norm {grad_norm} (learning "
                    f"rate {update.lr:.3g}); stopped before the weights took harm; try a lower rate, a longer "
                    "schedule.warmup or clip, or on_nonfinite=skip"
                )
            self.unlogged_nll += nll * update.n_token
            self.unlogged_tokens += update.n_token

    def is_finite(self, nll: float, grad_norm: float) -> bool:
        """Whether an update may be made of them; a gradient that overflows in fp16 is the scaler's business."""
        return math.isfinite(nll) and (math.isfinite(grad_norm) or self.scaler.is_enabled())

    def take_unlogged(self) -> dict[str, float]:
        """The mean nll since this was last asked for; the count begins anew."""
        self.read_figures()
        mean = self.unlogged_nll / max(1, self.unlogged_tokens)
        self.unlogged_nll, self.unlogged_tokens = 0.0, 0
        return {"train/nll": mean}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: of all lanes and processes, whatever their number, and of whole weights.

        Every process is to ask. Raises Diverged, as `read_figures` does, before anything is saved.
        """
        self.read_figures()
        on_cuda = self.device.type == "cuda"
        rng = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(self.device) if on_cuda else None}
        return {
            **{name: getattr(self, name) for name in self.PLAIN},
            "optimizer": fitting.optimizer_state(self.model, self.optimizer, self.ranks),
            "optimizer_kind": type(self.optimizer).__name__,
            "lanes": self.lanes.state_dict(),
            "scaler": self.scaler.state_dict(),
            "mems": None if self.mems is None else [self.ranks.whole_batch(memory) for memory in self.mems],
            "rng": self.ranks.gather(rng),
            **({"average": self.average.state_dict(self.model)} if self.average.count else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets all but the model's parameters; the random generators last.

        Nothing is set before all was looked at. Raises ValueError for what does not fit, with what it is.
        """
        kind = type(self.optimizer).__name__
        if state.get("optimizer_kind") != kind:
            raise ValueError(f"resume: optimizer: the run was trained with {state.get('optimizer_kind')}, not {kind}")
        for name, wanted in self.PLAIN.items():
            if type(state.get(name)) is not wanted:
                raise ValueError(f"resume: the checkpoint's {name} is no {wanted.__name__}")
        if not all(type(nll) is float for nll in state["valid_nll"]):
            raise ValueError("resume: the checkpoint's valid_nll are no numbers")
        optimizer = fitting.optimizer(self.model, self.optimizer, state.get("optimizer"))
        mems = fitting.mems(self.model, self.lanes, state.get("mems"), self.ranks.share(self.lanes.batch_size))
        rng = fitting.rng(state.get("rng"), self.ranks.rank)
        average = fitting.average(self.model, state.get("average"))
        settings = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        try:
            self.lanes.load_state_dict(state["lanes"])
            self.optimizer.load_state_dict(optimizer)
            if self.scaler.is_enabled() and state["scaler"]:  # else the run begins to scale only now
                self.scaler.load_state_dict(state["scaler"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"resume: the checkpoint's state of the run cannot be read ({error})") from error
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(
                setting
            )  # torch brings back the old weight decay and the like in silence; what is asked for holds
        for name in self.PLAIN:
            setattr(self, name, state[name])
        self.mems = None if mems is None else [memory.to(self.device) for memory in mems]
        self.average.load_state_dict(average, self.model)
        if rng is not None:
            torch.set_rng_state(rng["cpu"])
            if self.device.type == "cuda" and rng["device"] is not None:
                torch.cuda.set_rng_state(rng["device"], self.device)


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
    accumulate: int = 1,
    on_nonfinite: str = "stop",
    max_bad_updates: int = 0,
    scored: str = "full",
    wait: bool | None = None,
) -> Iterator[Update]:
    """Trains until `steps` updates are done, one update each time round.

    Each reads the next segment of every lane with the memory carried in, follows the gradient of the mean nll, clipped
    to the global norm `clip`, and carries the memory out; where the lanes begin again, the memory begins empty. The lanes
    are read in `accumulate` chunks, one after the other, whose gradients add up to that of all. Where `half` is `scored`, the
    nll is that of the recent half of each segment.

    A loss or gradient that is not finite never reaches the weights. With `stop` Diverged is raised, before the optimizer
    sees it, if it can `wait` for each update's figures: by default on a CPU. Elsewhere nothing is waited for: the optimizer
    gets zeros in place of such a gradient, and `Run.read_figures` raises, whenever something is logged or saved. With `skip`
    (which waits) the segment is passed over, the memory begins empty, and no update is counted; Diverged is raised after
    `max_bad_updates` of these. An update that overflows in fp16 is not counted either: its scale is lowered.
    """
    parameters = list(run.model.parameters())
    wait = on_nonfinite == "skip" or run.device.type == "cpu" if wait is None else wait
    overflows = 0
    run.model.train()
    while run.step < steps:
        before = run.lanes.state_dict()
        segment = next(run.lanes)
        rate = schedule(run.step, lr=lr, steps=steps, valid_nll=run.valid_nll)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.zero_grad(set_to_none=True)
        mems = None if segment.begins else run.mems
        loss, mems = backward(run, segment, mems, accumulate, precision, scored)
        run.scaler.unscale_(run.optimizer)
        norm = gradient_norm(parameters, math.inf if clip is None else clip)
        figures = torch.stack([run.ranks.mean_(loss), norm])
        n_token = segment.targets.numel() * run.ranks.size
        update = Update(step=run.step + 1, n_token=n_token, lr=rate, figures=figures)
        run.unread.append(update)
        if wait and on_nonfinite == "skip" and not run.is_finite(*figures.tolist()):
            run.unread.pop()
            run.bad_updates, run.mems = run.bad_updates + 1, None
            where = f"at update {update.step} the loss is {update.nll} and its gradient's norm {update.grad_norm}"
            if run.bad_updates > max_bad_updates:
                raise Diverged(f"max_bad_updates: {where}, and {max_bad_updates} segments were skipped already")
            run.ranks.say(f"warning: {where}: segment {before} skipped ({run.bad_updates} of {max_bad_updates})")
            continue
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
                    own_part(parameter.grad).masked_fill_(bad, 0.0)
        scale = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.mems = mems
        if run.scaler.get_scale() < scale:
            overflows += 1
            if overflows == OVERFLOWS:
                raise Diverged(
                    f"precision: at update {update.step} the gradient overflows in fp16 at any scale; try bf16"
                )
            continue
        overflows = 0
        run.step, run.tokens = run.step + 1, run.tokens + n_token
        run.average.update(run.model, run.step)
        yield update


def recent_half(nll: Float[Tensor, "b i"]) -> Float[Tensor, "b i2"]:
    """The nll of the tokens that have at least half of their segment before them (Dai et al. 2019, section 4.2, "half" losses)."""
    return nll[:, nll.shape[1] // 2 :]


def backward(
    run: Run, segment: Segment, mems: list[Tensor] | None, accumulate: int, precision: str, scored: str = "full"
) -> tuple[Float[Tensor, ""], list[Tensor]]:
    """Adds up the gradient of the mean nll, chunk of lanes by chunk of lanes, each with its own memory.

        grad L = sum_c grad (mean nll of chunk c + what the memory learns by) / accumulate

    The second part is there only for a memory that learns (`CompressiveMemory.reconstruction`). Processes exchange their gradients during the last chunk. Returns the mean nll of this process's lanes, in nats, and
    the new memory.
    """
    replica, n_lane, learns = run.replica or run.model, len(segment.tokens), run.model.memory.learns
    loss, kept = 0.0, []
    for chunk in range(accumulate):
        lanes = slice(chunk * n_lane // accumulate, (chunk + 1) * n_lane // accumulate)
        starts = None if segment.starts is None else to_device(segment.starts[lanes], run.device)
        carried = None if mems is None else [memory[lanes] for memory in mems]
        with exchanging(replica, chunk == accumulate - 1):
            with autocast(run.device, precision):  # the model moves the tokens itself
                made = (segment.tokens[lanes], carried, segment.targets[lanes])
                nll, new, *auxiliary = replica(*made, starts=starts, with_auxiliary=learns)
            part = (nll if scored == "full" else recent_half(nll)).mean() / accumulate
            run.scaler.scale(part + sum(auxiliary) / accumulate if learns else part).backward()
        loss = loss + part.detach()
        kept.append(new)
    average_the_rest(replica, run.ranks)
    return loss, kept[0] if accumulate == 1 else [torch.cat(layer) for layer in zip(*kept, strict=True)]
