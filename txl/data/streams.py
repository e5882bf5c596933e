"""Streams: a split cut into lanes, each read segment by segment, at a position that can be saved and set."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from txl.data.encoding import Split


@dataclass(frozen=True)
class Segment:
    """Inputs and their next tokens; `begins` is true where the lanes start, so that no memory is carried in.

    `starts`: the tokens that begin a document, where memory is not to reach from one into the next.
    """

    tokens: Int[Tensor, "b i"]
    targets: Int[Tensor, "b i"]
    begins: bool
    starts: Bool[Tensor, "b i"] | None = None


def gather(tokens: "np.ndarray | ShuffledDocuments", starts: np.ndarray, length: int) -> Int[Tensor, "b _"]:
    """`length` tokens from each start, copied off the memory map; zeros stand beyond the end."""
    rows = np.zeros((len(starts), length), dtype=np.int64)
    for row, start in zip(rows, starts, strict=True):
        found = tokens[start : start + length]
        row[: len(found)] = found
    return torch.from_numpy(rows)


def marked(borders: np.ndarray | None, places: np.ndarray, length: int) -> Bool[Tensor, "b i"] | None:
    """True at the borders (token numbers in order) among the `length` tokens from each place; None without borders."""
    if borders is None:
        return None
    marks = np.zeros((len(places), length), dtype=bool)
    for row, place in zip(marks, places, strict=True):
        first, last = np.searchsorted(borders, [place, place + length])
        row[borders[first:last] - place] = True
    return torch.from_numpy(marks)


class ShuffledDocuments:
    """The tokens of a split with its documents in another order in each pass, which `seed` and pass determine.

    Reads like an array. The tokens before the first of the `starts` are a document too.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, *, seed: int):
        self.tokens, self.seed = tokens, seed
        self._starts = np.concatenate([[0], starts[starts > 0]])
        self._lengths = np.diff(self._starts, append=len(tokens))
        self.shuffle(0)

    def shuffle(self, epoch: int) -> None:
        """Puts the documents into the order of a pass."""
        self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self._starts))
        self.starts = np.concatenate([[0], np.cumsum(self._lengths[self._order])[:-1]])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, _ = place.indices(len(self))
        parts = [self.tokens[:0]]
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            inside = start - int(self.starts[index])
            document, length = self._order[index], min(int(self._lengths[self._order[index]]) - inside, stop - start)
            begin = int(self._starts[document]) + inside
            parts.append(self.tokens[begin : begin + length])
            start, index = start + length, index + 1
        return np.concatenate(parts)


class Lanes:
    """Endless training segments: `batch_size` contiguous lanes, read side by side in order, again and again.

    Of N tokens each lane has (N - 1) // batch_size targets, its last one being the first token of the next lane; the
    remainder, fewer than batch_size, is left out. The last segment of a lane may be shorter than `tgt_len`. `borders` are
    the tokens beyond which no memory may reach; where the tokens are `ShuffledDocuments`, each pass has another order of
    them. `rows` picks some of the lanes, those of one process among several: it reads what the others leave.
    Raises ValueError for a split too short for one segment a lane.
    """

    def __init__(
        self,
        tokens: np.ndarray | ShuffledDocuments,
        *,
        batch_size: int,
        tgt_len: int,
        borders: np.ndarray | None = None,
        rows: slice = slice(None),
    ):
        self.tokens, self.batch_size, self.tgt_len, self.borders = tokens, batch_size, tgt_len, borders
        self.rows = rows
        self.lane_len = (len(tokens) - 1) // batch_size
        if self.lane_len < tgt_len:
            raise ValueError(
                f"data.train: {len(tokens)} tokens are too few for batch_size={batch_size} lanes of one segment of "
                f"tgt_len={tgt_len}; that takes at least {batch_size * tgt_len + 1}"
            )
        self.position = self.epoch = 0

    @classmethod
    def of(
        cls, split: Split, *, batch_size: int, tgt_len: int, shuffle_seed: int | None, rows: slice = slice(None)
    ) -> "Lanes":
        """The lanes of a split, its documents shuffled where there is a seed for it."""
        how = dict(batch_size=batch_size, tgt_len=tgt_len, rows=rows)
        if shuffle_seed is None:
            return cls(split.tokens, borders=split.borders, **how)
        tokens = ShuffledDocuments(split.tokens, split.starts, seed=shuffle_seed)
        lanes = cls(tokens, **how)
        lanes.borders = tokens.starts if split.resets else None
        return lanes

    def __iter__(self):
        return self

    def __next__(self) -> Segment:
        start = self.position
        length = min(self.tgt_len, self.lane_len - start)
        places = np.arange(self.batch_size)[self.rows] * self.lane_len + start
        both, starts = gather(self.tokens, places, length + 1), marked(self.borders, places, length)
        segment = Segment(tokens=both[:, :-1], targets=both[:, 1:], begins=start == 0, starts=starts)
        self.move(*divmod(self.epoch * self.lane_len + start + length, self.lane_len))
        return segment

    def move(self, epoch: int, position: int) -> None:
        """To a place in a pass."""
        if epoch != self.epoch and isinstance(self.tokens, ShuffledDocuments):
            self.tokens.shuffle(epoch)
            self.borders = None if self.borders is None else self.tokens.starts
        self.epoch, self.position = epoch, position

    def state_dict(self) -> dict[str, int]:
        """Where the lanes stand: the passes done, the tokens read of each, and how long each is."""
        return {"position": self.position, "epoch": self.epoch, "lane_len": self.lane_len}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there. Raises ValueError where the lanes were of another length, or there is no such place."""
        if state["lane_len"] != self.lane_len:
            raise ValueError(
                f"resume: batch_size or data changed: the run read lanes of {state['lane_len']} tokens, "
                f"these have {self.lane_len}"
            )
        if not all(type(state[name]) is int for name in state) or not 0 <= state["position"] < self.lane_len:
            raise ValueError(f"resume: the checkpoint's lanes stand at {state}")
        self.move(state["epoch"], state["position"])


class Prefetched:
    """Lanes whose next segment is prepared, in a thread, while the last one is in use; on CUDA in page-locked memory.

    What it saves and sets is the place of what was taken, not of what is prepared.
    """

    def __init__(self, lanes: Lanes, *, pin: bool):
        self.lanes, self.pin = lanes, pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lanes")
        self._state, self._ready = lanes.state_dict(), None

    @property
    def borders(self) -> np.ndarray | None:
        return self.lanes.borders

    @property
    def batch_size(self) -> int:
        return self.lanes.batch_size

    def __iter__(self):
        return self

    def __next__(self) -> Segment:
        ready = self._ready or self._thread.submit(self._prepare)
        segment, self._state = ready.result()
        self._ready = self._thread.submit(self._prepare)
        return segment

    def _prepare(self) -> tuple[Segment, dict[str, int]]:
        segment = next(self.lanes)
        if self.pin:
            starts = None if segment.starts is None else segment.starts.pin_memory()
            tokens, targets = segment.tokens.pin_memory(), segment.targets.pin_memory()
            segment = replace(segment, tokens=tokens, targets=targets, starts=starts)
        return segment, self.lanes.state_dict()

    def state_dict(self) -> dict[str, int]:
        """Where the next segment begins."""
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there; what was prepared is dropped."""
        if self._ready is not None:
            self._ready.result()
            self._ready = None
        self.lanes.load_state_dict(state)
        self._state = self.lanes.state_dict()


@dataclass(frozen=True)
class ScoredLane:
    """A stretch of a text as an evaluation reads it: from input `begin` on, with the targets of inputs `first` to `end` scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class ScoredSegment:
    """A segment of an evaluation; `scored` is false where a lane is only warmed, and on what fills up lanes that have ended.

    `places` are those of the inputs in the split; the target of each stands one further.
    """

    tokens: Int[Tensor, "b i"]
    targets: Int[Tensor, "b i"]
    scored: Bool[Tensor, "b i"]
    places: Int[Tensor, "b i"]
    starts: Bool[Tensor, "b i"] | None = None


def scoring_segments(
    tokens: np.ndarray, lanes: Sequence[ScoredLane], *, length: int, borders: np.ndarray | None = None
) -> Iterator[ScoredSegment]:
    """Reads lanes side by side, `length` tokens at a time, until the longest has ended."""
    begins, firsts, ends = (
        np.array([getattr(lane, name) for lane in lanes], dtype=np.int64) for name in ("begin", "first", "end")
    )
    longest = int((ends - begins).max(initial=0))
    for offset in range(0, longest, length):
        places, size = begins + offset, min(length, longest - offset)
        both = gather(tokens, places, size + 1)
        place = places[:, None] + np.arange(size)
        scored = (place >= firsts[:, None]) & (place < ends[:, None])
        yield ScoredSegment(
            tokens=both[:, :-1],
            targets=both[:, 1:],
            scored=torch.from_numpy(scored),
            places=torch.from_numpy(place),
            starts=marked(borders, places, size),
        )
