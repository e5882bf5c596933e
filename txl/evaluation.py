"""Evaluation: the nll of a split, every token but its first scored exactly once."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from txl.data.encoding import Split
from txl.data.streams import ScoredLane, ScoredSegment, scoring_segments
from txl.data.vocab import BPE
from txl.model import TransformerXL
from txl.ranks import ALONE, Ranks
from txl.reading import cache_bytes, reach_of, reader_of, stair_of
from txl.runtime import autocast, to_device

# What is read at a time, in tokens: as many as keep the matrix products large; more only cost memory.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**10, 2**15
CACHE_ON_DEVICE = 2**33  # bytes of keys and values that warmed lanes may take
WARMING = 16  # a lane is warmed for no more than a sixteenth of what it reads


@dataclass(frozen=True)
class Plan:
    """How a split is read: `lanes` side by side, `length` tokens at a time. It decides the time, never the figure."""

    lanes: list[ScoredLane]
    length: int


def plan(
    model: TransformerXL,
    n_target: int,
    *,
    tgt_len: int,
    batch_size: int,
    max_segments: int | None = None,
    length: int | None = None,
    warmed: int | None = None,
    share: int = 1,
) -> Plan:
    """The fastest way to the figure of `batch_size` lanes that begin with an empty memory and are read by segments of `tgt_len`.

    What a token predicts depends on the tokens that it sees, itself and through the layers, and on nothing else. So a
    segment may have any `length` if each token sees what it would: with same_length the mem_len - 1 tokens before it,
    otherwise mem_len tokens before its own stair of tgt_len, of which a segment then holds a whole number. And each lane may
    be cut into `warmed` pieces, if each first reads, unscored, all that its first token sees through the n layers:
    n (mem_len - 1) tokens, or n mem_len + (n - 1)(tgt_len - 1) before a stair. An accelerator wants many tokens at a time,
    so there the pieces are as many as the warming is cheap; a CPU reads its lanes whole. Where `share` processes read, there
    are pieces for all of them. `length` (rounded up to whole stairs) and `warmed` override the choice; `max_segments` ends
    each lane after as many times tgt_len tokens.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    reach, stair = reach_of(model), stair_of(model, tgt_len)
    lane_len = -(-n_target // batch_size)
    scored_len = lane_len if max_segments is None else min(lane_len, max_segments * tgt_len)
    n_lane = -(-n_target // lane_len)
    n_layer = len(model.layers)
    slack = 0 if model.memory.keeps_inputs else stair + model.memory.rate  # the first rows to be compressed are others
    warming = _up(n_layer * (reach + slack) + (n_layer - 1) * (stair - 1), stair) if reach else 0
    if warmed is None and not model.keys_last and not reach:
        warmed = min(-(-scored_len // stair), (AT_ONCE if on_cpu else AT_ONCE_ON_DEVICE) // (stair * n_lane))
    if warmed is None and not on_cpu:
        affordable = scored_len if warming == 0 else scored_len // (WARMING * warming)
        room = CACHE_ON_DEVICE // (cache_bytes(model, reach + _up(tgt_len, stair)) * n_lane)
        warmed = min(affordable, room, AT_ONCE_ON_DEVICE // (n_lane * _up(tgt_len, stair)))
    piece = _up(-(-scored_len // max(1, warmed or 1, -(-share // n_lane))), stair)
    lanes = []
    for start in range(0, n_target, lane_len):
        stop = min(start + scored_len, n_target)
        for first in range(start, stop, piece):
            lanes.append(ScoredLane(max(start, first - warming), first, min(first + piece, stop)))
    if length is None:
        length = (AT_ONCE if on_cpu else AT_ONCE_ON_DEVICE) // -(-len(lanes) // share)
    return Plan(lanes, _up(max(1, length), stair))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def losses(
    model: TransformerXL, split: Split, read: Plan, *, stair: int, precision: str = "fp32"
) -> Iterator[tuple[ScoredSegment, Float[Tensor, "b i"]]]:
    """Reads a split segment by segment: each segment, and the nll of its targets in nats, on the model's device.

    Keys and values are kept from segment to segment, where they last. The model is to be in eval mode.
    """
    device = next(model.parameters()).device
    reader = reader_of(model, reach=reach_of(model), room=read.length, tgt_len=stair)
    for segment in scoring_segments(split.tokens, read.lanes, length=read.length, borders=split.borders):
        starts = None if segment.starts is None else to_device(segment.starts, device)
        with torch.inference_mode(), autocast(device, precision):
            hidden = reader.read(segment.tokens, starts=starts, stair=stair)
            nll = model.softmax.nll(hidden, segment.targets)
        yield segment, nll


def token_nll(
    model: TransformerXL,
    split: Split,
    nll: np.ndarray,
    *,
    tgt_len: int,
    batch_size: int,
    precision: str,
    max_segments: int | None = None,
) -> Iterator[float]:
    """Reads the split as `evaluate` does and writes the nll of token p + 1 (nats) to nll[p]; yields the share done.

    What is not read stays what it was: not-a-number, say.
    """
    read = plan(model, len(nll), tgt_len=tgt_len, batch_size=batch_size, max_segments=max_segments)
    wanted, done = sum(lane.end - lane.first for lane in read.lanes), 0
    for segment, values in losses(model, split, read, stair=stair_of(model, tgt_len), precision=precision):
        scored = segment.scored
        nll[segment.places[scored].numpy()] = values.cpu()[scored].to(torch.float64).numpy()
        done += int(scored.sum())
        yield done / wanted


def total_nll(
    model: TransformerXL,
    split: Split,
    read: Plan,
    *,
    stair: int,
    precision: str = "fp32",
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[float, int]:
    """The sum of the nll in nats (added up in float64) and the number of tokens that it is of.

    The host waits for the device once, at the end. Ends early once it is `interrupted`.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    adds_doubles = device.type != "mps"
    totals, n_token = torch.zeros((), dtype=torch.float64, device=device if adds_doubles else "cpu"), 0
    found = losses(model, split, read, stair=stair, precision=precision)
    while not interrupted() and (pair := next(found, None)) is not None:
        segment, nll = pair
        nll = nll.double() if adds_doubles else nll.cpu().double()
        totals += nll.where(to_device(segment.scored, nll.device), 0.0).sum()
        n_token += int(segment.scored.sum())
    model.train(was_training)
    return float(totals), n_token


def figure(total: float, n_token: int, n_bytes: int, n_word: int | None = None) -> dict[str, Any]:
    """Sums to figures: nll (nats per token), ppl = exp(nll) (None beyond 1e304), bits_per_token, bits_per_byte of text; what they are of.

    What is per byte or per word is None where the text has none: a line end alone, a script that parts no words.

    bits_per_byte = total / (ln 2 * bytes): the same text gives comparable figures whatever its tokens are. So does
    ppl_per_word = exp(total / words), given the number of words and line ends: it stands beside a word-level model's ppl.
    """
    nll = total / n_token
    per_word = {} if n_word is None else {"ppl_per_word": _exp(total / n_word) if n_word else None, "words": n_word}
    return {
        "nll": nll,
        "ppl": _exp(nll),
        "bits_per_token": nll / math.log(2),
        "bits_per_byte": total / math.log(2) / n_bytes if n_bytes else None,
        "tokens": n_token,
        "bytes": n_bytes,
        **per_word,
    }


def _exp(nll: float) -> float | None:
    return math.exp(nll) if nll < 700 else None


def evaluate(
    model: TransformerXL,
    split: Split,
    *,
    tgt_len: int,
    batch_size: int,
    precision: str,
    max_segments: int | None = None,
    ranks: Ranks = ALONE,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """The figure of a split, with the settings it was reached with; None if it was `interrupted` in any process.

    Stopped early by `max_segments`, its bytes are those of as many tokens from the start. Several processes read a part of
    the lanes each, and add up their nats and their tokens, not their means.
    """
    reading = {"tgt_len": tgt_len, "batch_size": batch_size}
    read = plan(model, len(split.tokens) - 1, max_segments=max_segments, share=ranks.size, **reading)
    read = replace(read, lanes=read.lanes[ranks.rank :: ranks.size])
    stair, total, n_token = stair_of(model, tgt_len), 0.0, 0
    gone = False

    def left(busy: bool = True) -> bool:
        """Whether it is interrupted in any process; those that are through go on asking, so that nobody is taken for hung."""
        nonlocal gone
        while not gone:
            working, gone = ranks.agree(busy, interrupted())
            if busy or not working:
                break
        return bool(gone)

    if read.lanes:
        total, n_token = total_nll(model, split, read, stair=stair, precision=precision, interrupted=left)
    if left(busy=False):
        return None
    total, n_token = ranks.total(total, n_token)
    n_token = int(n_token)
    n_word = split.count_words(1, 1 + n_token) if isinstance(split.vocab, BPE) else None
    return {
        **figure(total, n_token, split.count_bytes(1, 1 + n_token), n_word),
        "split": split.name,
        "mem_len": model.memory.mem_len,
        "clamp_len": model.position.clamp_len,
        "same_length": model.same_length,
        **reading,
    }
