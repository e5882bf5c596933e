"""Streams: a split cut into lanes, each read segment by segment, at a position that can be saved and set."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Inputs and their next tokens; `begins` is true where the lanes start, so that no memory is carried in."""

    tokens: Int[Tensor, "b i"]
    targets: Int[Tensor, "b i"]
    begins: bool


def gather(tokens: np.ndarray, starts: np.ndarray, length: int) -> Int[Tensor, "b _"]:
    """`length` tokens from each start, copied off the memory map."""
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


class Lanes:
    """Endless training segments: `batch_size` contiguous lanes, read side by side in order, again and again.

    Of N tokens each lane has (N - 1) // batch_size targets, its last one being the first token of the next lane; the
    remainder, fewer than batch_size, is left out. The last segment of a lane may be shorter than `tgt_len`. Raises
    ValueError for a split too short for one segment a lane.
    """

    def __init__(self, tokens: np.ndarray, *, batch_size: int, tgt_len: int):
        self.tokens, self.batch_size, self.tgt_len = tokens, batch_size, tgt_len
        self.lane_len = (len(tokens) - 1) // batch_size
        if self.lane_len < tgt_len:
            raise ValueError(
                f"data.train: {len(tokens)} tokens are too few for batch_size={batch_size} lanes of one segment of "
                f"tgt_len={tgt_len}; that takes at least {batch_size * tgt_len + 1}"
            )
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self) -> Segment:
        start = self.position
        length = min(self.tgt_len, self.lane_len - start)
        both = gather(self.tokens, np.arange(self.batch_size) * self.lane_len + start, length + 1)
        self.position = (start + length) % self.lane_len
        return Segment(tokens=both[:, :-1], targets=both[:, 1:], begins=start == 0)

    def state_dict(self) -> dict[str, int]:
        """Where the lanes stand: the tokens read of each, and how long each is."""
        return {"position": self.position, "lane_len": self.lane_len}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there. Raises ValueError where the lanes were of another length."""
        if state["lane_len"] != self.lane_len:
            raise ValueError(
                f"resume: batch_size or data changed: the run read lanes of {state['lane_len']} tokens, "
                f"these have {self.lane_len}"
            )
        self.position = state["position"]


@dataclass(frozen=True)
class ScoredSegment:
    """A segment of an evaluation; `scored` is false on the padding of lanes that have ended."""

    tokens: Int[Tensor, "b i"]
    targets: Int[Tensor, "b i"]
    scored: Bool[Tensor, "b i"]


def scoring_segments(tokens: np.ndarray, *, batch_size: int, tgt_len: int):
    """Every token but the first as a target exactly once, whatever batch_size and tgt_len: the lanes may end unevenly.

    The targets are cut into `batch_size` contiguous lanes of equal length, but for the last ones, which are filled up;
    lanes that would hold nothing but padding are dropped.
    """
    n_target = len(tokens) - 1
    lane_len = -(-n_target // batch_size)
    starts = np.arange(0, n_target, lane_len)
    padded = np.concatenate([tokens, np.zeros(len(starts) * lane_len - n_target, dtype=tokens.dtype)])
    for offset in range(0, lane_len, tgt_len):
        length = min(tgt_len, lane_len - offset)
        both = gather(padded, starts + offset, length + 1)
        place = torch.from_numpy(starts + offset)[:, None] + torch.arange(length)
        yield ScoredSegment(tokens=both[:, :-1], targets=both[:, 1:], scored=place < n_target)
