"""How attention is computed: tile by tile, forward and backward, each tile over the keys in its window only."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TILE, ROOM = 64, 2**21  # queries at a time, and the scores at a time (of as many heads), which a CPU's cache holds
TILE_ON_DEVICE, ROOM_ON_DEVICE = 256, 2**28  # an accelerator wants few and large kernels
KEPT_SCORES = 2**24  # up to here (64 MiB in float32) weights wait for the backward pass, beyond they are computed again


def relative_shift(scores: Float[Tensor, "*lead i r"]) -> Float[Tensor, "*lead i j"]:
    """Turns scores by distance into scores by key (Dai et al. 2019, appendix B): out[i, j] = scores[i, j + (I - 1 - i)].

    Column c of `scores` belongs to the distance J - 1 - c, the last of its J + 1 columns to -1. Row by row in memory,
    out[i, j] stands I - 1 + i J + j places from the start, so that the shift is a view: no element is moved. Keys that
    lie ahead of their query get a neighbour's score; the causal mask hides them.
    """
    i, r = scores.shape[-2:]
    flat = scores.flatten(-2)
    return flat[..., i - 1 : i - 1 + i * (r - 1)].unflatten(-1, (i, r - 1))


def hidden_keys(
    queries: range, keys: range, *, memory: int, reach: int | None, stair: int = 1, device: torch.device | None = None
) -> Bool[Tensor, "i j"]:
    """True where a query of the segment must not see a key: keys ahead of it and, with a `reach`, keys too far behind.

        query i sees key j   where   floor(i / stair) stair - reach <= j - memory <= i

    Key `memory` is that of the segment's first query.
    """
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :] - memory
    hidden = key > query
    return hidden if reach is None else hidden | (key < query // stair * stair - reach)


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors in autocast's type, where it is on."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def draw_seed(dropatt: float | int) -> int:
    """What both passes draw the same dropout from."""
    return int(torch.randint(2**62, (), device="cpu")) if dropatt else 0


class Tiles:
    """The passes of `attention`, tile by tile. A tile is a range of heads, of queries, and the keys that these see."""

    def __init__(
        self,
        query: Float[Tensor, "h b i d"],
        key: Float[Tensor, "h b j d"],
        value: Float[Tensor, "h b j d"],
        by_distance: Float[Tensor, "h b i e"] | None,
        r: Float[Tensor, "h r e"] | None,
        documents: Int[Tensor, "b j"] | None,
        reach: int | None,
        stair: int,
        dropatt: float,
        tile: int | None,
    ):
        self.query, self.key, self.value, self.by_distance, self.r = query, key, value, by_distance, r
        self.documents, self.reach, self.stair, self.dropatt = documents, reach, stair, dropatt
        self.precision = torch.promote_types(query.dtype, torch.float32)
        n_head, n_batch, n_query, _ = query.shape
        self.memory = key.shape[2] - n_query
        on_cpu = query.device.type == "cpu"
        largest, room = (TILE, ROOM) if on_cpu else (TILE_ON_DEVICE, ROOM_ON_DEVICE)
        n_key = key.shape[2] if reach is None else min(key.shape[2], reach + stair + (tile or largest))
        fitting = max(16, room // (n_batch * (n_key + 1)))
        self.tile = min(n_query, tile or min(fitting, largest))
        self.heads = min(n_head, max(1, room // (n_batch * self.tile * (n_key + 1))))

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        n_head, _, n_query, _ = self.query.shape
        for head in range(0, n_head, self.heads):
            for start in range(0, n_query, self.tile):
                stop = min(start + self.tile, n_query)
                oldest = 0 if self.reach is None else self.memory + start // self.stair * self.stair - self.reach
                yield (
                    slice(head, min(head + self.heads, n_head)),
                    slice(start, stop),
                    slice(max(0, oldest), self.memory + stop),
                )

    @property
    def size(self) -> int:
        """The scores of all tiles."""
        n_batch = self.query.shape[1]
        return sum(_length(heads) * n_batch * _length(queries) * _length(keys) for heads, queries, keys in self)

    def buffers(self, count: int) -> list[Float[Tensor, "n"]]:
        """Room for the scores of any one tile, used for all of them: fresh memory costs more than the sums done in it."""
        n_batch = self.query.shape[1]
        size = max(_length(heads) * n_batch * _length(queries) * (_length(keys) + 1) for heads, queries, keys in self)
        return [self.query.new_empty(size) for _ in range(count)]

    def scores(self, tile: tuple[slice, slice, slice], buffers: list[Tensor]) -> Float[Tensor, "n i j"]:
        """The logits of a tile, heads and batch in one; what must not be seen is -inf. They stand in the second buffer."""
        heads, queries, keys = tile
        query, key = self.query[heads, :, queries].flatten(0, 1), self.key[heads, :, keys].flatten(0, 1)
        shape = (len(query), _length(queries), _length(keys))
        scores = buffers[1][: math.prod(shape)].view(shape)
        if self.r is None:
            torch.bmm(query, key.mT, out=scores)
        else:
            skewed, by_distance, r = self._by_distance(tile, buffers[0])
            torch.bmm(by_distance, r.mT, out=skewed)
            shifted = relative_shift(skewed.view(shape[0], shape[1], shape[2] + 1))
            torch.baddbmm(shifted, query, key.mT, out=scores)
        self._hide(scores, tile)
        return scores

    def _by_distance(
        self, tile: tuple[slice, slice, slice], buffer: Tensor
    ) -> tuple[Float[Tensor, "h n r"], Float[Tensor, "h n e"], Float[Tensor, "h r e"]]:
        """Room for the scores by distance, and the two factors that they are the product of."""
        heads, queries, keys = tile
        by_distance = self.by_distance[heads, :, queries].flatten(1, 2)
        r = self.r[heads, self._distances(tile)]
        shape = (*by_distance.shape[:2], _length(keys) + 1)
        return buffer[: math.prod(shape)].view(shape), by_distance, r

    def _distances(self, tile: tuple[slice, slice, slice]) -> slice:
        """The rows of r from the greatest distance in a tile to -1 behind its last query."""
        _, queries, keys = tile
        first = self.query.shape[2] - queries.stop + keys.start
        return slice(first, first + _length(keys) + 1)

    def _hide(self, scores: Float[Tensor, "n i j"], tile: tuple[slice, slice, slice]) -> None:
        heads, queries, keys = tile
        n_query, n_key = scores.shape[1:]
        rows, window = range(queries.start, queries.stop), dict(memory=self.memory, stair=self.stair)
        if n_query > 1:  # the keys of the tile's own queries, some ahead of some
            own = range(keys.stop - n_query, keys.stop)
            ahead = hidden_keys(rows, own, reach=None, device=scores.device, **window)
            scores[:, :, n_key - n_query :].masked_fill_(ahead, -math.inf)
        if self.reach is not None:  # the keys that the first query sees and the last one does not
            seen_by_all = self.memory + (queries.stop - 1) // self.stair * self.stair - self.reach
            if seen_by_all > keys.start:
                behind = hidden_keys(
                    rows, range(keys.start, seen_by_all), reach=self.reach, device=scores.device, **window
                )
                scores[:, :, : seen_by_all - keys.start].masked_fill_(behind, -math.inf)
        if self.documents is not None:
            of_query = self.documents[:, self.memory + queries.start : self.memory + queries.stop]
            foreign = of_query[:, :, None] != self.documents[:, None, keys]
            scores.unflatten(0, (_length(heads), -1)).masked_fill_(foreign, -math.inf)

    def weights(self, scores: Float[Tensor, "n i j"], out: Tensor | None) -> Float[Tensor, "n i j"]:
        """The softmax of the scores; in `out`, a buffer, if its type allows."""
        if out is None or out.dtype != self.precision:
            return torch.softmax(scores, dim=-1, dtype=self.precision)
        return torch.softmax(scores, dim=-1, out=out[: scores.numel()].view_as(scores))

    def dropout(self, weights: Float[Tensor, "n i j"], generator: torch.Generator) -> Float[Tensor, "n i j"]:
        """0 or 1 / (1 - dropatt) for each weight."""
        return torch.empty_like(weights).bernoulli_(1 - self.dropatt, generator=generator).div_(1 - self.dropatt)

    def generator(self, seed: int) -> torch.Generator | None:
        return torch.Generator(self.query.device).manual_seed(seed) if self.dropatt else None

    def forward(self, seed: int, kept: list[Tensor] | None = None) -> Float[Tensor, "h b i d"]:
        """The result; the weights of each tile are appended to `kept`, where it is given."""
        buffers, generator = self.buffers(2), self.generator(seed)
        output = torch.empty_like(self.query)
        for tile in self:
            heads, queries, keys = tile
            weights = self.weights(self.scores(tile, buffers), buffers[0] if kept is None else None)
            if kept is not None:
                kept.append(weights)
            if self.dropatt:
                weights = weights * self.dropout(weights, generator)
            value = self.value[heads, :, keys].flatten(0, 1)
            attended = torch.bmm(weights.to(value.dtype), value)
            output[heads, :, queries] = attended.unflatten(0, (_length(heads), -1))
        return output

    def backward(
        self, grad: Float[Tensor, "h b i d"], seed: int, kept: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The gradients of query, key, value, by_distance and r, with the weights that `forward` kept or made anew.

        With W the weights, O the result and S the scores:  dV = W^T dO,  dW = dO V^T,  dS = W (dW - sum_j W dW),
        dQ = dS K,  dK = dS^T Q, and alike for the second product, by distance.
        """
        buffers, generator = self.buffers(2 if kept else 3), self.generator(seed)
        grads = [None if x is None else torch.zeros_like(x) for x in (self.query, self.key, self.value)]
        grad_query, grad_key, grad_value = grads
        grad_by_distance = None if self.r is None else torch.empty_like(self.by_distance)
        grad_r = None if self.r is None else torch.zeros_like(self.r)
        for index, tile in enumerate(self):
            heads, queries, keys = tile
            groups = (_length(heads), -1)
            query, key, value, grad_output = (
                x.flatten(0, 1)
                for x in (
                    self.query[heads, :, queries],
                    self.key[heads, :, keys],
                    self.value[heads, :, keys],
                    grad[heads, :, queries],
                )
            )
            weights = kept[index] if kept else self.weights(self.scores(tile, buffers), buffers[2])
            factor = self.dropout(weights, generator) if self.dropatt else None
            dropped = (weights if factor is None else weights * factor).to(value.dtype)
            grad_value[heads, :, keys] += torch.bmm(dropped.mT, grad_output).unflatten(0, groups)
            slope = buffers[1][: weights.numel()].view(weights.shape)
            slope = torch.bmm(grad_output, value.mT, out=slope).to(self.precision)
            slope = slope if factor is None else slope.mul_(factor)
            torch._softmax_backward_data(slope, weights, -1, self.precision, grad_input=slope)
            slope = slope.to(query.dtype)
            grad_query[heads, :, queries] = torch.bmm(slope, key).unflatten(0, groups)
            grad_key[heads, :, keys] += torch.bmm(slope.mT, query).unflatten(0, groups)
            if self.r is not None:
                skewed, by_distance, r = self._by_distance(tile, buffers[0])
                flat = skewed.view(len(query), -1)
                flat[:, : query.shape[1] - 1], flat[:, -1] = 0, 0  # all that the shift leaves out
                relative_shift(skewed.view(*slope.shape[:2], -1)).copy_(slope)
                grad_by_distance[heads, :, queries] = torch.bmm(skewed, r).unflatten(1, (-1, query.shape[1]))
                grad_r[heads, self._distances(tile)] += torch.bmm(skewed.mT, by_distance)
        return grad_query, grad_key, grad_value, grad_by_distance, grad_r


def one_query(
    query: Float[Tensor, "h b one d"],
    key: Float[Tensor, "h b j d"],
    value: Float[Tensor, "h b j d"],
    by_distance: Float[Tensor, "h b one e"] | None,
    r: Float[Tensor, "h r e"] | None,
    documents: Int[Tensor, "b j"] | None,
    reach: int | None,
) -> Float[Tensor, "h b one d"]:
    """`attention` of a single query, as generation asks for it: its window is a slice, and there is nothing to skew."""
    n_head, n_batch, n_key, width = key.shape
    oldest = 0 if reach is None else max(0, n_key - 1 - reach)
    if oldest:
        key, value, n_key = key[:, :, oldest:], value[:, :, oldest:], n_key - oldest
    query, key = query.reshape(-1, 1, width), key.flatten(0, 1).mT
    if r is None:
        scores = torch.bmm(query, key)
    else:
        distances = torch.bmm(by_distance.squeeze(2), r[:, oldest:-1].mT)
        scores = torch.baddbmm(distances.view(-1, 1, n_key), query, key)
    if documents is not None:
        foreign = documents[:, None, oldest:] != documents[:, None, -1:]
        scores.unflatten(0, (n_head, -1)).masked_fill_(foreign, -math.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    attended = torch.bmm(weights.to(value.dtype), value.flatten(0, 1))
    return attended.view(n_head, n_batch, 1, width)


def _length(of: slice) -> int:
    return of.stop - of.start


class EagerAttention(torch.autograd.Function):
    """`attention` for eager training."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Float[Tensor, "h b i d"]:
        *given, keep = given
        tiles, ctx.seed = Tiles(*given), draw_seed(given[8])
        keep = tiles.size <= KEPT_SCORES if keep is None else keep
        kept = [] if keep else None
        output = tiles.forward(ctx.seed, kept)
        ctx.options = given[6:]
        ctx.save_for_backward(*given[:6], *(kept or ()))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "h b i d"]) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return *Tiles(*saved[:6], *ctx.options).backward(grad, ctx.seed, list(saved[6:])), *[None] * 6


GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? by_distance, Tensor? r, Tensor? documents"
OPTIONS = "SymInt? reach, SymInt stair, float dropatt, SymInt? tile"


@torch.library.custom_op("txl::attention", mutates_args=(), schema=f"({GIVEN}, {OPTIONS}) -> (Tensor, Tensor)")
def _operator(*given: Any) -> tuple[Tensor, Tensor]:
    """`attention` for compiled training: one node of the graph, whatever the number of tiles; and the dropout's seed."""
    seed = draw_seed(given[8])
    return Tiles(*given).forward(seed), torch.tensor(seed)


@torch.library.custom_op(
    "txl::attention_backward", mutates_args=(), schema=f"(Tensor grad, Tensor seed, {GIVEN}, {OPTIONS}) -> Tensor[]"
)
def _operator_backward(grad: Tensor, seed: Tensor, *given: Any) -> list[Tensor]:
    return [x for x in Tiles(*given).backward(grad, int(seed)) if x is not None]


@_operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given[0]), torch.empty((), dtype=torch.int64, device="cpu")


@_operator_backward.register_fake
def _(grad: Tensor, seed: Tensor, *given: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in given[:5] if x is not None]


def _keep_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    seed, *given = ctx.saved_tensors
    found = iter(torch.ops.txl.attention_backward(grad, seed, *given, *ctx.options))
    return *(None if x is None else next(found) for x in given[:5]), *[None] * 5


_operator.register_autograd(_backward, setup_context=_keep_for_backward)
