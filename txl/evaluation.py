"""Evaluation: the nll of a split, every token but its first scored exactly once."""

import math
from typing import Any

import torch
from torch import nn

from txl.data.encoding import Split
from txl.data.streams import scoring_segments
from txl.data.vocab import BPE
from txl.runtime import autocast


@torch.inference_mode()
def total_nll(
    model: nn.Module,
    split: Split,
    *,
    tgt_len: int,
    batch_size: int,
    precision: str = "fp32",
    max_segments: int | None = None,
) -> tuple[float, int]:
    """The sum of the nll in nats (added up in float64) and the number of tokens that it is of.

    The memory is carried from segment to segment and starts empty in each lane. `max_segments` stops early.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, n_token, mems = 0.0, 0, None
    segments = scoring_segments(split.tokens, batch_size=batch_size, tgt_len=tgt_len, borders=split.borders)
    for index, segment in enumerate(segments):
        if index == max_segments:
            break
        with autocast(device, precision):
            starts = None if segment.starts is None else segment.starts.to(device)
            nll, mems = model(segment.tokens.to(device), mems, segment.targets.to(device), starts=starts)
        total += float(nll.cpu().double()[segment.scored].sum())
        n_token += int(segment.scored.sum())
    model.train(was_training)
    return total, n_token


def figure(total: float, n_token: int, n_bytes: int, n_word: int | None = None) -> dict[str, Any]:
    """Sums to figures: nll (nats per token), ppl = exp(nll) (None beyond 1e304), bits_per_token, bits_per_byte of text; what they are of.

    bits_per_byte = total / (ln 2 * bytes): the same text gives comparable figures whatever its tokens are. So does
    ppl_per_word = exp(total / words), given the number of words and line ends: it stands beside a word-level model's ppl.
    """
    nll = total / n_token
    per_word = {} if n_word is None else {"ppl_per_word": _exp(total / n_word), "words": n_word}
    return {
        "nll": nll,
        "ppl": _exp(nll),
        "bits_per_token": nll / math.log(2),
        "bits_per_byte": total / math.log(2) / n_bytes,
        "tokens": n_token,
        "bytes": n_bytes,
        **per_word,
    }


def _exp(nll: float) -> float | None:
    return math.exp(nll) if nll < 700 else None


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    tgt_len: int,
    batch_size: int,
    precision: str,
    max_segments: int | None = None,
) -> dict[str, Any]:
    """The figure of a split, with the settings it was reached with.

    Stopped early by `max_segments`, its bytes are those of as many tokens from the start.
    """
    reading = {"tgt_len": tgt_len, "batch_size": batch_size}
    total, n_token = total_nll(model, split, precision=precision, max_segments=max_segments, **reading)
    n_word = split.count_words(1, 1 + n_token) if isinstance(split.vocab, BPE) else None
    return {
        **figure(total, n_token, split.count_bytes(1, 1 + n_token), n_word),
        "split": split.name,
        "mem_len": model.memory.mem_len,
        "clamp_len": model.layers[0].attention.position.clamp_len,
        "same_length": model.same_length,
        **reading,
    }
