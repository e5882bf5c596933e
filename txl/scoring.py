"""What a given text costs: each token but the first, as `evaluate.py` scores the tokens of a split."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl.data.encoding import Encoder, Split
from txl.data.vocab import BPE
from txl.evaluation import figure, token_nll
from txl.generation import check_known
from txl.instruments.showing import readable
from txl.model import TransformerXL
from txl.printing import Shades, exact, standard_output


@dataclass(frozen=True)
class Scored:
    """A text by token: the number, the bytes and the nll (nats; not-a-number for the first) of each; and the figures."""

    tokens: list[int]
    pieces: list[bytes]
    nll: np.ndarray
    figures: dict[str, Any]


def score(model: TransformerXL, text: bytes, encoder: Encoder, *, resets: bool, tgt_len: int, precision: str) -> Scored:
    """Reads a text from its beginning, as one lane.

        total_nll = sum_{t > 0} -log p(x_t | x_{<t}),    in nats; the other figures are those of `evaluation.figure`

    Of a text of less than two tokens there are no figures. Raises ValueError for what the vocabulary lacks.
    """
    check_known(encoder.vocab, text)
    split = Split.of("prompt", text, encoder.vocab, separator=encoder.separator, resets=resets)
    tokens = split.tokens.tolist()
    pieces = [encoder.vocab.decode([token]) for token in tokens]
    nll, n_target = np.full(len(tokens), np.nan), len(tokens) - 1
    if n_target < 1:
        return Scored(tokens, pieces, nll, {"total_nll": None, "nll": None, "tokens": 0})
    for _ in token_nll(model, split, nll[1:], tgt_len=tgt_len, batch_size=1, precision=precision):
        pass
    total = float(nll[1:].sum())
    n_word = split.count_words(1, len(tokens)) if isinstance(encoder.vocab, BPE) else None
    figures = figure(total, n_target, split.count_bytes(1, len(tokens)), n_word)
    return Scored(tokens, pieces, nll, {"total_nll": total, **figures})


def score_all(
    model: TransformerXL,
    texts: list[bytes],
    encoder: Encoder,
    *,
    resets: bool,
    tgt_len: int,
    precision: str,
    format: str,
    shades: Shades,
    named: bool,
) -> list[dict[str, Any]]:
    """Writes a line for each text, as soon as it is read, with the text behind if `named`; returns the figures."""
    found, stream = [], standard_output()
    for text in texts:
        scored = score(model, text, encoder, resets=resets, tgt_len=tgt_len, precision=precision)
        line = _row(text, scored) if format == "jsonl" else _line(text, scored, shades, named=named)
        stream.write(line + b"\n")
        stream.flush()
        found.append(scored.figures)
    return found


def _row(text: bytes, scored: Scored) -> bytes:
    rows = zip(scored.tokens, scored.pieces, scored.nll.tolist(), strict=True)
    each = [{"id": token, "text": exact(piece), "nll": None if nll != nll else nll} for token, piece, nll in rows]
    return json.dumps({"text": exact(text), **scored.figures, "each": each}).encode()


def _line(text: bytes, scored: Scored, shades: Shades, *, named: bool) -> bytes:
    """For people: the figures; and the text, where it is one of many (`named`) or in colours."""
    names = ("total_nll", "nll", "ppl", "bits_per_byte")
    values = {name: scored.figures.get(name) for name in names}
    shown = [f"{name} {'-' if value is None else f'{value:.4f}':<9}" for name, value in values.items()]
    line = "  ".join([*shown, f"tokens {scored.figures['tokens']}"]).encode()
    if shades.system is not None:
        losses = [nll for piece, nll in zip(scored.pieces, scored.nll.tolist(), strict=True) for _ in piece]
        painted, _ = shades.painted(b"".join(scored.pieces), losses)
        return line + (b"  " if named else b"\n") + painted
    return line + b"  " + readable(text).encode() if named else line
