"""What a layer attends to beside its own segment: the hidden states of the segments before, or nothing."""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn


class SegmentMemory(nn.Module):
    """Keeps the last `mem_len` inputs of each layer, without their gradient (Dai et al. 2019, section 3.2).

        context_l = [SG(memory_l) ; h_l],    memory_l <- last mem_len rows of context_l

    What is kept are layer *inputs* (before normalisation, after dropout), projected to keys and values anew each time,
    because the weights change between segments. Oldest first, empty at the start of a text, `mem_len` in tokens.
    Raises ValueError for a mem_len below 1: `x[:, -0:]` would keep everything.
    """

    def __init__(self, *, mem_len: int):
        super().__init__()
        if not 1 <= mem_len < 2**31:
            words = f"must be at least 1 and below 2^31, got {mem_len}; for no memory choose model/memory=none"
            raise ValueError(f"model.memory.mem_len: {words}")
        self.mem_len = mem_len

    def start(
        self, mems: Sequence[Float[Tensor, "b _ m"]] | None, hidden: Float[Tensor, "b i m"], n_layer: int
    ) -> list[Float[Tensor, "b _ m"]]:
        """The memory of each layer before the segment `hidden`: what was carried, or nothing yet."""
        if not mems:
            return [hidden[:, :0].detach()] * n_layer
        assert len(mems) == n_layer, f"mems: a model of {n_layer} layers takes {n_layer} memories, not {len(mems)}"
        return list(mems)

    def keep(
        self,
        memories: list[Float[Tensor, "b _ m"]],
        inputs: list[Float[Tensor, "b i m"]],
        documents: Int[Tensor, "b j"] | None = None,
    ) -> list[Float[Tensor, "b _ m"]]:
        """The memory of each layer after a segment, from the memory before it and the layer's inputs.

        Where `documents` numbers the document of each row, rows of another than the last one's are not-a-number.
        """
        kept = []
        for memory, hidden in zip(memories, inputs, strict=True):
            leaving = max(0, memory.shape[1] + hidden.shape[1] - self.mem_len)
            kept.append(torch.cat([memory[:, leaving:], hidden[:, -self.mem_len :]], dim=1).detach())
        if documents is None:
            return kept
        ended = rearrange(documents[:, -self.mem_len :] != documents[:, -1:], "b j -> b j 1")
        return [memory.masked_fill(ended, float("nan")) for memory in kept]


class NoMemory(nn.Module):
    """Every segment stands alone: a plain Transformer with relative positions (the paper's rows without recurrence).

    `mem_len` is not used: it may stand in a preset, from which YAML cannot take it away when this option is chosen.
    """

    def __init__(self, *, mem_len: int | None = None):
        super().__init__()
        self.mem_len = None

    def start(
        self, mems: Sequence[Float[Tensor, "b _ m"]] | None, hidden: Float[Tensor, "b i m"], n_layer: int
    ) -> list[Float[Tensor, "b _ m"]]:
        """Nothing, whatever was carried."""
        return [hidden[:, :0].detach()] * n_layer

    def keep(
        self,
        memories: list[Float[Tensor, "b _ m"]],
        inputs: list[Float[Tensor, "b i m"]],
        documents: Int[Tensor, "b j"] | None = None,
    ) -> list[Float[Tensor, "b _ m"]]:
        """Nothing."""
        return []
