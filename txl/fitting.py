"""A saved state of a run, held against the run that is to go on from it; it comes from a file, and a file from anyone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from txl.data.streams import Lanes, Prefetched
from txl.ranks import Ranks
from txl.sharding import for_saving, share_of


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each of the optimizer's groups, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """As torch's, but by the names of the parameters in place of their numbers; every process is to ask."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        names[parameter]: {
            key: for_saving(value, ranks) if isinstance(value, Tensor) else value for key, value in kept.items()
        }
        for parameter, kept in optimizer.state.items()
    }
    groups = zip(optimizer.param_groups, _names(model, optimizer), strict=True)
    return {"param_groups": [{**group, "params": own} for group, own in groups], "state": state}


def optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, Any]:
    """The saved state by torch's numbers. Raises ValueError unless its names and shapes are those of the model."""
    fault = "resume: optimizer: its saved state is of another optimizer or model"
    parameters, own = dict(model.named_parameters()), optimizer.state_dict()["param_groups"]
    names = _names(model, optimizer)
    if not (
        isinstance(saved, Mapping)
        and [group.get("params") for group in saved.get("param_groups", [])] == names
        and isinstance(saved.get("state"), Mapping)
        and saved["state"].keys() <= parameters.keys()
    ):
        raise ValueError(fault)
    numbers: dict[str, int] = {}
    for group, mine in zip(own, names, strict=True):
        numbers.update(zip(mine, group["params"], strict=True))
    state = {}
    for name, kept in saved["state"].items():
        for key, value in kept.items():
            if isinstance(value, Tensor) and not _broadcastable(value, parameters[name]):
                raise ValueError(f"{fault}: {key} of {name} is {tuple(value.shape)}, {value.dtype}")
        state[numbers[name]] = {
            key: share_of(value, parameters[name]) if isinstance(value, Tensor) else value
            for key, value in kept.items()
        }
    groups = [{**group, "params": mine["params"]} for group, mine in zip(saved["param_groups"], own, strict=True)]
    return {"state": state, "param_groups": groups}


def mems(model: nn.Module, lanes: Lanes | Prefetched, saved: Any, mine: slice) -> list[Tensor] | None:
    """The memory of this process's lanes; none where it would not be understood. Raises ValueError for another shape."""
    if saved is None:
        return None
    n_lane, width = lanes.batch_size, model.layers[0].attention_norm.weight.shape[0]
    if not isinstance(saved, list) or len(saved) not in (0, len(model.layers)):
        raise ValueError("resume: the checkpoint's memory is not that of the model's layers")
    for memory in saved:
        fits = isinstance(memory, Tensor) and memory.ndim == 3 and memory.layout == torch.strided
        if not fits or not memory.is_floating_point() or (memory.shape[0], memory.shape[2]) != (n_lane, width):
            raise ValueError(f"resume: the checkpoint's memory is not that of {n_lane} lanes, {width} wide")
    kept = [memory[mine].clone() for memory in saved]
    if lanes.borders is None and any(memory.isnan().any() for memory in kept):
        return None  # documents had borders when it was saved, and have none now: nothing would hide the ended ones
    return kept


def average(model: nn.Module, saved: Any) -> Mapping[str, Any] | None:
    """The saved average of the weights; None where there was none. Raises ValueError unless it is one of the model's."""
    if saved is None:
        return None
    fault = "resume: average: the checkpoint's is none of this model's weights"
    wanted = dict(model.named_parameters(remove_duplicate=False))
    if not (
        isinstance(saved, Mapping)
        and isinstance(saved.get("of"), str)
        and type(saved.get("count")) is int
        and 1 <= saved["count"] < 2**31
        and isinstance(saved.get("weights"), Mapping)
        and saved["weights"].keys() == wanted.keys()
    ):
        raise ValueError(fault)
    for name, own in wanted.items():
        given = saved["weights"][name]
        kind = (own.shape, own.dtype, torch.strided)
        good = isinstance(given, Tensor) and (given.shape, given.dtype, given.layout) == kind and not given.is_meta
        if not good or not given.isfinite().all():
            raise ValueError(f"{fault}: {name}")
    return saved


def rng(saved: Any, rank: int) -> dict[str, Any] | None:
    """What this process's generators were; None for a process that the run did not have before."""
    size = torch.get_rng_state().shape
    good = isinstance(saved, list) and all(
        isinstance(one, Mapping)
        and isinstance(one.get("cpu"), Tensor)
        and (one["cpu"].dtype, one["cpu"].shape) == (torch.uint8, size)
        and (one.get("device") is None or one["device"].dtype == torch.uint8)
        for one in saved
    )
    if not good:
        raise ValueError("resume: the checkpoint's random generators are none of torch's")
    return saved[rank] if rank < len(saved) else None


def _broadcastable(value: Tensor, parameter: Tensor) -> bool:
    """A dense number, or as many as the parameter has, or fewer of them that stand for rows or columns."""
    if value.layout != torch.strided or value.is_meta:
        return False
    shape = (1,) * (parameter.ndim - value.ndim) + tuple(value.shape)
    alike = len(shape) == parameter.ndim and all(map(lambda given, own: given in (1, own), shape, parameter.shape))
    return alike or value.numel() == 1
