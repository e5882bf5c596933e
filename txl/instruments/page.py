"""`measure=page`: a run on one HTML page, which needs nothing but itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl.instruments import html
from txl.instruments.showing import beside
from txl.instruments.subject import Subject
from txl.instruments.taking import picture, token_nll
from txl.runtime import write_whole

SMOOTH = 50  # tokens that a point of the curve is the mean of


@dataclass(frozen=True, kw_only=True)
class Page:
    """Gathers a run on one page: figures, settings, curves, sample, what was measured so far, and text coloured by its loss.

        colour_p = nll_p / ln(n_token),    nll_p = -log p(x_p | the tokens before that it sees)    (nats)

    White stands for a certainty, full colour for a guess among all tokens alike. The text is the first `length` tokens of
    the split. Whatever is in the checkpoint's folder is shown, and nothing that is not. The page loads nothing and runs
    nothing; all that comes from the run is escaped. Raises ValueError for a length below 2: the first token has no loss.
    """

    length: int

    def __post_init__(self):
        if not 2 <= self.length < 2**31:
            raise ValueError(f"length: must be at least 2 and below 2^31, got {self.length}")

    def run(self, subject: Subject, found: dict[str, Any], out: Path) -> Iterator[float]:
        """Reads the text that is coloured, and as much more as the lanes bring along; then writes the page."""
        path = beside(out, ".html")
        nll = np.full(len(subject.split.tokens) - 1, np.nan)
        n_segment = -(-(self.length - 1) // subject.tgt_len)
        try:
            yield from token_nll(subject.model(), subject, nll, max_segments=n_segment)
        finally:  # interrupted too
            losses = nll[: self.length - 1]
            read = losses[~np.isnan(losses)]
            found |= {"file": path.name, "tokens": len(read), "nll": float(read.mean()) if len(read) else None}
            found["losses"] = [None if np.isnan(loss) else loss for loss in losses.tolist()]
            page, found["gathered"] = html.page(subject, losses, out)
            write_whole(path, lambda file: file.write(page.encode("utf-8", "replace")))

    def draw(self, found: dict[str, Any], path: Path) -> None:
        """The loss along the text."""
        losses = np.array(found["losses"], dtype=np.float64)
        positions = np.arange(1, len(losses) + 1)
        with picture(path) as axes:
            axis = axes[0, 0]
            axis.plot(positions, losses, ".", markersize=2, color="tab:gray", label="each token")
            if len(losses) >= SMOOTH and not np.isnan(losses).any():
                means = np.convolve(losses, np.full(SMOOTH, 1 / SMOOTH), mode="valid")
                axis.plot(positions[SMOOTH - 1 :], means, color="tab:red", label=f"mean of the last {SMOOTH}")
            mean = "" if found["nll"] is None else f", mean {found['nll']:.3f}"
            axis.set(xlabel="position in the split (tokens)", ylabel="nll (nats)", title=f"loss along the text{mean}")
            axis.legend()
            axis.grid(alpha=0.3)

    def summary(self, found: dict[str, Any]) -> dict[str, Any]:
        """The file, what it holds, and the mean nll of the text that is coloured."""
        return {name: found[name] for name in ("file", "gathered", "nll", "tokens")}
