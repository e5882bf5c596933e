"""One model on several processes: a copy on each (DDP), or a share of every weight on each (FSDP2)."""

import contextlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from txl.ranks import Ranks


def spread(model: nn.Module, ranks: Ranks, device: torch.device, *, sharding: str) -> nn.Module:
    """What is called in place of the model, so that each process ends with the gradient of all lanes.

    `none`: each process holds the whole model. `full`: each holds a share of every matrix and of what the optimizer keeps
    of it, and sees a layer whole only while it computes with it (ZeRO, stage 3); u and v, which all layers share and which
    are tiny, stay whole.
    """
    if ranks.size == 1:
        return model
    if sharding == "full" and not model.memory.keeps_inputs:
        raise ValueError("sharding: full does not take model/memory=compressive, which reads weights of the layers")
    if sharding == "none":
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # the losses that the model returns are a view, which nobody changes in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (ranks.size,))
    kept = set(kept_whole(model))
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=kept)
    return fully_shard(model, mesh=mesh, ignored_params=kept)


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds only a share of the weights."""
    return isinstance(model, FSDPModule)


def kept_whole(model: nn.Module) -> list[nn.Parameter]:
    """u and v: what `full` sharding leaves whole."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith(("r_w_bias", "r_r_bias"))]


def exchanging(replica: nn.Module, exchange: bool) -> contextlib.AbstractContextManager:
    """Gradients are exchanged by the backward pass inside, or only added up here until one does."""
    if isinstance(replica, FSDPModule):
        replica.set_requires_gradient_sync(exchange)
    elif isinstance(replica, DistributedDataParallel) and not exchange:
        return replica.no_sync()
    return contextlib.nullcontext()


def average_the_rest(replica: nn.Module, ranks: Ranks) -> None:
    """Averages the gradients that the backward pass has not: those of u and v where the rest is sharded."""
    if isinstance(replica, FSDPModule):
        for parameter in kept_whole(replica):
            ranks.mean_(parameter.grad)


def whole(tensor: Tensor) -> Tensor:
    """A tensor, all of it; where it is shared out, every process is to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def for_saving(tensor: Tensor, ranks: Ranks) -> Tensor:
    """A tensor as the first process writes it: one that is shared out is put together on its host, one at a time.

    Every process is to ask; the others, which write nothing, keep nothing.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    together = tensor.full_tensor()
    return together.cpu() if ranks.main else together.new_empty(0)


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, to be changed in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole tensor, where `like` is shared out."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    device = like.to_local().device
    return distribute_tensor(tensor.to(device), like.device_mesh, like.placements, src_data_rank=None)


def gradient_norm(parameters: Iterable[nn.Parameter], clip: float) -> Tensor:
    """Clips the gradients to the global norm `clip` and returns the norm that they had, a plain tensor."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shared = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not shared:
        return nn.utils.clip_grad_norm_(parameters, clip)
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [whole(nn.utils.get_total_norm(some)) for some in (shared, plain) if some]
    norm = torch.stack(norms).norm()
    scale = (clip / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
    for gradient in gradients:
        own_part(gradient).mul_(scale)
    return norm
