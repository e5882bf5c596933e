"""Reading with weights that no longer change: keys and values are kept instead of hidden states, and nothing is projected twice.

Where keys do not last, because they depend on where segments begin or are compressed, `Segments` reads as training does.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from txl.model import TransformerXL, growing

ABSENT = -1  # the document of rows that stand in for tokens that a shorter text does not have


def reach_of(model: TransformerXL) -> int:
    """The tokens before its own stair that a token sees: mem_len - 1 with same_length, else all that the memory spans."""
    return model.memory.span - (model.same_length and model.memory.span > 0)


def stair_of(model: TransformerXL, tgt_len: int) -> int:
    """The tokens that see the same past: one with same_length, else the segment."""
    return 1 if model.same_length and model.memory.mem_len is not None and model.keys_last else tgt_len


def cache_bytes(model: TransformerXL, n_token: int) -> int:
    """What the keys and values of so many tokens take, for one text."""
    weight = model.layers[0].attention.kv_net.weight
    return len(model.layers) * n_token * weight.shape[0] * weight.element_size()


class Cache:
    """The keys and values of what a model in eval mode has read, for several texts side by side, in buffers of a fixed size.

    A key or a value depends on its own row only, so that keeping it gives what projecting the kept row again would
    (Dai et al. 2019, section 3.2), as long as the weights stay. Each layer has one buffer in which the texts' rows stand in
    order of time, so that those in the window are a slice of it; once it is full, the last `reach` rows, which are all that
    a later token sees, move to its front. The projected distances are made once. `room` is the longest segment that will be
    read at a time, in tokens.
    """

    def __init__(self, model: TransformerXL, *, reach: int, room: int):
        assert model.keys_last, "the keys of this model depend on more than their own row: see Segments"
        self.model, self.reach, self.room = model, reach, room
        self.capacity = reach + max(room, reach // 4)
        self.stop = 0  # the rows that are filled
        self.padded = 0  # up to here some text has rows that it lacks
        self.borders = False  # whether the texts consist of documents
        self.keys_values: list[Float[Tensor, "two h b c d"]] = []
        self.r: list[Float[Tensor, "n r e"]] = []
        self.documents: Int[Tensor, "b c"] | None = None

    def read(
        self, tokens: Int[Tensor, "b i"], *, starts: Bool[Tensor, "b i"] | None = None, stair: int = 1
    ) -> Float[Tensor, "b i m"]:
        """Reads the next tokens of each text and returns the last layer's states, what `model(...)` predicts from.

        A token sees the keys from `reach` before its stair of `stair` tokens, counted from the segment's first. `starts` is
        true where a document begins; once given, it must be given each time. The model is to be in eval mode, and its type
        (autocast) the same in all calls.
        """
        n_token = tokens.shape[1]
        assert n_token <= self.room, f"{n_token} tokens are more than room={self.room}"
        if self.stop + n_token > self.capacity:
            self._move_to_front()
        hidden = self.model.embed(tokens)
        if not self.keys_values:
            self._allocate(hidden)
        place, stop = self.stop, self.stop + n_token
        first = max(0, place - self.reach)
        documents = self._number(first, place, stop, starts)
        for layer, kept, r in zip(self.model.layers, self.keys_values, self.r, strict=True):
            segment = layer.normed(hidden)
            kept[:, :, :, place:stop] = layer.attention.keys_values(segment)
            window, distances = kept[:, :, :, first:stop], r[:, r.shape[1] - 1 - (stop - first) :]
            attend = layer.attend
            if self.model.compiled:
                attend = layer.compiled_attend
                growing(3, window)
                growing(1, distances, documents)
            hidden = attend(hidden, segment, window, distances, documents, reach=self.reach, stair=stair)
        self.stop = stop
        return hidden

    def clear(self) -> None:
        """Forgets what was read; the buffers stay."""
        self.stop = self.padded = 0
        self.documents, self.borders = None, False

    @classmethod
    def join(cls, caches: Sequence["Cache"], copies: Sequence[int], *, room: int = 1) -> "Cache":
        """The texts of all caches, none with less room, side by side, each so many times.

        Where they differ in length, none sees what it lacks.
        """
        longest = max(cache.length for cache in caches)
        joined = cls(caches[0].model, reach=caches[0].reach, room=room)
        joined.r, joined.stop = caches[0].r, longest
        joined.padded = longest - min(cache.length for cache in caches)
        joined.borders = any(cache.borders for cache in caches)

        def gather(blank: Tensor, parts: list[Tensor], dim: int) -> Tensor:
            """Aligns rows at the end of the longest text, in a buffer that is blank where there are none."""
            row = 0
            for part, times in zip(parts, copies, strict=True):
                size, length = times * part.shape[dim], part.shape[dim + 1]
                place = blank.narrow(dim, row, size).narrow(dim + 1, longest - length, length)
                place.copy_(part.repeat_interleave(times, dim=dim))
                row += size
            return blank

        n_batch = sum(cache.n_batch * times for cache, times in zip(caches, copies, strict=True))
        for layer, kept in enumerate(caches[0].keys_values):
            two, n_head, _, _, d_head = kept.shape
            blank = kept.new_zeros(two, n_head, n_batch, joined.capacity + 2, d_head)
            parts = [cache.keys_values[layer][:, :, :, cache.stop - cache.length : cache.stop] for cache in caches]
            joined.keys_values.append(gather(blank, parts, dim=2))
        if joined.borders or joined.padded:
            blank = torch.full((n_batch, joined.capacity), ABSENT, device=kept.device)
            joined.documents = gather(blank, [cache._numbers() for cache in caches], dim=0)
        return joined

    @property
    def n_batch(self) -> int:
        return self.keys_values[0].shape[2]

    @property
    def length(self) -> int:
        """The rows that the next token can see."""
        return min(self.stop, self.reach)

    def _allocate(self, hidden: Float[Tensor, "b i m"]) -> None:
        longest = self.reach + self.room
        for layer in self.model.layers:
            row = layer.attention.keys_values(layer.normed(hidden[:, :1]))  # in the type that autocast gives it
            two, n_head, n_batch, _, d_head = row.shape
            # some rows more than are used, here and of r: no window or its distances are a whole buffer, for whose strides
            # torch.compile would make another program
            self.keys_values.append(row.new_empty(two, n_head, n_batch, self.capacity + 2, d_head))
            position = layer.attention.position
            self.r.append(position.project(position.encode(longest + 1, hidden)))

    def _numbers(self) -> Int[Tensor, "b j"]:
        """The document of each row that the next token can see."""
        if self.documents is None:
            return torch.zeros(self.n_batch, self.length, dtype=torch.int64, device=self.keys_values[0].device)
        return self.documents[:, self.stop - self.length : self.stop]

    def _move_to_front(self) -> None:
        kept = slice(self.stop - self.length, self.stop)
        for buffer in self.keys_values:
            buffer[:, :, :, : self.length] = buffer[:, :, :, kept].clone()
        if self.documents is not None:
            self.documents[:, : self.length] = self.documents[:, kept].clone()
        self.stop, self.padded = self.length, max(0, self.padded - kept.start)

    def _number(
        self, first: int, place: int, stop: int, starts: Bool[Tensor, "b i"] | None
    ) -> Int[Tensor, "b j"] | None:
        """The document of each key from `first` to `stop`, where it matters; those of the new rows are noted."""
        if starts is not None and self.documents is None:
            self.borders = True
            self.documents = torch.zeros(len(starts), self.capacity, dtype=torch.int64, device=starts.device)
        if self.documents is None or (not self.borders and self.padded <= first):
            self.documents = None
            return None
        last = self.documents[:, place - 1 : place] if place else torch.zeros_like(self.documents[:, :1])
        self.documents[:, place:stop] = last if starts is None else last + starts.long().cumsum(dim=1)
        return self.documents[:, first:stop]


class Segments:
    """Reads as training does, whatever the scheme: by segments of `tgt_len`, with hidden states as the memory.

    A segment of fewer tokens is read as the beginning of a whole one, which changes nothing but the places of
    `AbsolutePosition` and its kind; no other may follow it.
    """

    def __init__(self, model: TransformerXL, *, tgt_len: int):
        self.model, self.tgt_len = model, tgt_len
        self.mems: list[Float[Tensor, "b k m"]] | None = None

    def read(
        self, tokens: Int[Tensor, "b i"], *, starts: Bool[Tensor, "b i"] | None = None, stair: int | None = None
    ) -> Float[Tensor, "b i m"]:
        """Reads the next tokens of each text and returns the last layer's states; `stair` can only be the segment."""
        states = []
        for part in range(0, tokens.shape[1], self.tgt_len):
            segment = slice(part, part + self.tgt_len)
            marks = None if starts is None else starts[:, segment]
            states.append(self._segment(tokens[:, segment], marks))
        return torch.cat(states, dim=1)

    def _segment(self, tokens: Int[Tensor, "b i"], starts: Bool[Tensor, "b i"] | None) -> Float[Tensor, "b i m"]:
        return self.states(tokens, starts=starts)[-1]

    def states(
        self, tokens: Int[Tensor, "b i"], *, starts: Bool[Tensor, "b i"] | None = None
    ) -> list[Float[Tensor, "b i m"]]:
        """Reads a segment of at most tgt_len tokens and returns what enters each layer, and what leaves the last."""
        n_token, lacking = tokens.shape[1], self.tgt_len - tokens.shape[1]
        if lacking and not self.model.position.by_distance:
            tokens = torch.nn.functional.pad(tokens, (0, lacking))
            starts = None if starts is None else torch.nn.functional.pad(starts, (0, lacking))
        hidden, memories, inputs, documents = self.model.states(tokens, self.mems, starts=starts)
        self.mems = self.model.memory.keep(memories, inputs, documents)
        return [state[:, :n_token] for state in (*inputs, hidden)]


def reader_of(model: TransformerXL, *, reach: int, room: int, tgt_len: int) -> Cache | Segments:
    """The quickest way to read a text by segments of `tgt_len`."""
    return Cache(model, reach=reach, room=room) if model.keys_last else Segments(model, tgt_len=tgt_len)
