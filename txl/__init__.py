"""Transformer-XL: segment recurrence with relative positions (Dai et al. 2019, arXiv:1901.02860).

One alphabet names the axes of every tensor, in signatures and in einops patterns alike:

    b batch    i query (a position of the segment)    j key (mem_len + tgt_len at the most)
    h head     d head width     m model width     f inner width     e embedding width     v token
    r relative distance (one more than the keys, see `ops.relative_shift`)

Importing `txl` loads no torch; `txl.TransformerXL` does.
"""

__version__ = "0.1.0"
__all__ = ["TransformerXL"]


def __getattr__(name):
    if name == "TransformerXL":
        from txl.model import TransformerXL

        return TransformerXL
    raise AttributeError(f"module 'txl' has no attribute {name!r}")
