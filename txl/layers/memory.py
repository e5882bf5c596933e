"""What a layer attends to beside its own segment: the hidden states of the segments before, also compressed, or nothing.

`mem_len` is how many of them are kept as they are (None: no memory), `span` how many tokens a layer reaches back by all it
keeps; `keeps_inputs` says whether that is inputs alone, whose keys and values may then be kept in their place; `learns`
whether there is something to train by a loss of its own.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class SegmentMemory(nn.Module):
    """Keeps the last `mem_len` inputs of each layer, without their gradient (Dai et al. 2019, section 3.2).

        context_l = [SG(memory_l) ; h_l],    memory_l <- last mem_len rows of context_l

    What is kept are layer *inputs* (before normalisation, after dropout), projected to keys and values anew each time,
    because the weights change between segments. Oldest first, empty at the start of a text, `mem_len` in tokens.
    Raises ValueError for a mem_len below 1: `x[:, -0:]` would keep everything.
    """

    keeps_inputs, learns = True, False

    def __init__(self, *, mem_len: int):
        super().__init__()
        if not 1 <= mem_len < 2**31:
            words = f"must be at least 1 and below 2^31, got {mem_len}; for no memory choose model/memory=none"
            raise ValueError(f"model.memory.mem_len: {words}")
        self.mem_len = mem_len

    @property
    def span(self) -> int:
        """The tokens of the past that a layer attends to."""
        return self.mem_len

    def size(self, *, n_layer: int, d_model: int, init_std: float | int) -> None:
        """Nothing here depends on the model's sizes."""

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

    keeps_inputs, learns, span = True, False, 0

    def __init__(self, *, mem_len: int | None = None):
        super().__init__()
        self.mem_len = None

    def size(self, *, n_layer: int, d_model: int, init_std: float | int) -> None:
        """Nothing here depends on the model's sizes."""

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


class CompressiveMemory(SegmentMemory):
    """Keeps what leaves the memory in a coarser one, `rate` rows as one (Rae et al. 2020, section 3).

        old_l      = the first n rows of [memory_l ; h_l],  n = those beyond mem_len
        coarse_l  <- last compressed_len rows of [coarse_l ; f_l(old_l)],     memory_l <- last mem_len rows
        context_l  = [SG(coarse_l) ; SG(memory_l) ; h_l]

    f_l is a convolution of kernel and stride `rate`, learned for each layer, or the mean or the greatest value of each `rate`
    rows. Coarse rows count as one place each. Rows of n that are no whole group of `rate` are let go: choose tgt_len and
    mem_len as its multiples. What is learned is taught by its own loss alone (`reconstruction`), which reaches nothing else; its weight is
    `reconstruction`. mem_len in tokens, compressed_len in rows, that is in `rate` tokens each; what one layer keeps is one
    tensor, coarse rows first. Raises ValueError for a mem_len, compressed_len or rate below 1 or a weight below 0, and for
    documents that the memory is not to reach over, whose rows it would mix.
    """

    keeps_inputs = False

    def __init__(
        self,
        *,
        mem_len: int,
        compressed_len: int,
        rate: int,
        compression: Literal["convolution", "mean", "max"],
        reconstruction: float | int = 1.0,
    ):
        super().__init__(mem_len=mem_len)
        for name, value in {"compressed_len": compressed_len, "rate": rate}.items():
            if not 1 <= value < 2**31:
                raise ValueError(f"model.memory.{name}: must be at least 1 and below 2^31, got {value}")
        if not 0 <= reconstruction < float("inf"):
            raise ValueError(f"model.memory.reconstruction: must be at least 0, got {reconstruction}")
        self.compressed_len, self.rate, self.compression = compressed_len, rate, compression
        self.weight_of_loss, self.learns = reconstruction, compression == "convolution" and reconstruction > 0

    @property
    def span(self) -> int:
        """The tokens of the past that a layer attends to, those that are compressed counted one by one."""
        return self.mem_len + self.rate * self.compressed_len

    def size(self, *, n_layer: int, d_model: int, init_std: float | int) -> None:
        """Makes what compresses: for each layer a convolution, at first the mean of each group of rows plus N(0, init_std)."""
        n_convolution = n_layer if self.compression == "convolution" else 0
        self.convolutions = nn.ModuleList(
            nn.Conv1d(d_model, d_model, self.rate, stride=self.rate) for _ in range(n_convolution)
        )
        for convolution in self.convolutions:
            nn.init.normal_(convolution.weight, 0.0, init_std)
            nn.init.zeros_(convolution.bias)
            with torch.no_grad():
                convolution.weight += torch.eye(d_model, device=convolution.weight.device)[:, :, None] / self.rate

    def compress(self, layer: int, old: Float[Tensor, "b k m"]) -> Float[Tensor, "b c m"]:
        """f_l: as many rows as there are whole groups."""
        groups = rearrange(old[:, : old.shape[1] // self.rate * self.rate], "b (c k) m -> b m (c k)", k=self.rate)
        if groups.shape[2] == 0:
            return old[:, :0]
        if self.compression == "convolution":
            made = self.convolutions[layer](groups)
        else:
            made = (F.avg_pool1d if self.compression == "mean" else F.max_pool1d)(groups, self.rate)
        return rearrange(made, "b m c -> b c m").to(old.dtype)

    def parted(self, memory: Float[Tensor, "b k m"]) -> tuple[Float[Tensor, "b c m"], Float[Tensor, "b r m"]]:
        """The coarse rows of what a layer keeps, and the others; there are coarse ones only once the others are full."""
        coarse = max(0, memory.shape[1] - self.mem_len)
        return memory[:, :coarse], memory[:, coarse:]

    def leaving(
        self, memory: Float[Tensor, "b k m"], hidden: Float[Tensor, "b i m"]
    ) -> tuple[Float[Tensor, "b c m"], Float[Tensor, "b n m"], Float[Tensor, "b r m"]]:
        """What a layer keeps after a segment, before anything is compressed: coarse rows, those that leave, those that stay."""
        coarse, recent = self.parted(memory)
        rows = torch.cat([recent, hidden], dim=1).detach()
        n_old = max(0, rows.shape[1] - self.mem_len)
        return coarse, rows[:, :n_old], rows[:, n_old:]

    def keep(
        self,
        memories: list[Float[Tensor, "b _ m"]],
        inputs: list[Float[Tensor, "b i m"]],
        documents: Int[Tensor, "b j"] | None = None,
    ) -> list[Float[Tensor, "b _ m"]]:
        """The memory of each layer after a segment, from the memory before it and the layer's inputs."""
        if documents is not None:
            raise ValueError(
                "data.reset_at_document: a compressive memory makes one row of several, also of two documents; "
                "take model/memory=segment"
            )
        kept = []
        for layer, (memory, hidden) in enumerate(zip(memories, inputs, strict=True)):
            coarse, old, recent = self.leaving(memory, hidden)
            coarse = torch.cat([coarse, self.compress(layer, old)], dim=1)[:, -self.compressed_len :]
            kept.append(torch.cat([coarse, recent], dim=1).detach())
        return kept

    def reconstruction(
        self, layers: nn.ModuleList, memories: list[Float[Tensor, "b _ m"]], inputs: list[Float[Tensor, "b i m"]]
    ) -> Float[Tensor, ""]:
        """How far attention to the compressed rows is from attention to those that they stand for (section 3.2).

            sum_l weight mean((A(h_l, old_l) - A(h_l, f_l(old_l)))^2),    A(h, x) = softmax(W_q h (W_k x)^T / sqrt(d_head)) W_v x

        Attention by content alone, without positions. h, old and the layer's weights are constants here: only f learns.
        """
        total = inputs[0].new_zeros(())
        for index, (layer, memory, hidden) in enumerate(zip(layers, memories, inputs, strict=True)):
            _, old, _ = self.leaving(memory, hidden)
            old = old[:, : old.shape[1] // self.rate * self.rate]
            if old.shape[1]:
                rows = hidden.detach()
                wanted = attended_by_content(layer, rows, old)
                found = attended_by_content(layer, rows, self.compress(index, old))
                total = total + F.mse_loss(found, wanted)
            else:  # nothing leaves yet, but every parameter is to have a gradient
                total = total + 0.0 * sum(parameter.sum() for parameter in self.convolutions[index].parameters())
        return self.weight_of_loss * total


def attended_by_content(
    layer: nn.Module, hidden: Float[Tensor, "b i m"], rows: Float[Tensor, "b k m"]
) -> Float[Tensor, "h b i d"]:
    """What a layer's attention, its weights constants, finds in rows that are all as near: softmax(q k^T / sqrt(d_head)) v."""
    attention, norm = layer.attention, layer.attention_norm
    if layer.pre_norm:
        scale, shift = norm.weight.detach(), norm.bias.detach()
        hidden, rows = (F.layer_norm(x, x.shape[-1:], scale, shift, norm.eps) for x in (hidden, rows))
    q = rearrange(F.linear(hidden, attention.q_net.weight.detach()), "b i (h d) -> h b i d", h=attention.n_head)
    keys_values = F.linear(rows, attention.kv_net.weight.detach())
    k, v = rearrange(keys_values, "b k (two h d) -> two h b k d", two=2, h=attention.n_head)
    return F.scaled_dot_product_attention(q, k, v)
