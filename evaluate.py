"""Measures a checkpoint on a split, or on another text: nll, perplexity, bits per byte.

python evaluate.py checkpoint=outputs/python_docs/default split=test
python evaluate.py checkpoint=RUN mem_len=512 same_length=true     read with another memory than in training
python evaluate.py checkpoint=RUN data.test=other.txt              score another text
python evaluate.py checkpoint=RUN measure=context                  ask something else: README has a list
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from txl import config as hydra_config
from txl.signals import StopSignals, leave

if TYPE_CHECKING:
    from txl.ranks import Ranks

FIGURE = "txl.settings.Figure"  # what is measured where nothing else is asked for


@hydra_config.entry_point("evaluate")
def main(cfg) -> dict:
    """Prints the figure as a line of JSON, writes it beside the checkpoint, and returns it.

    `processes` starts as many and waits for them; started by torchrun, this is one of several already.
    """
    from txl import ranks

    with StopSignals() as stop:
        stop.leave_at_once(leave)
        if ranks.started_by_torchrun():
            with ranks.joined(str(cfg.get("device"))) as mine:
                asked = mine.from_main(lambda: prepare(cfg))
                return work(asked, mine, stop)
        asked = prepare(cfg)
        if asked["processes"] == 1:
            return work(asked, ranks.ALONE, stop)
        stop.go_on()
        return ranks.launch(work, [asked], processes=asked["processes"], device=asked["device"], stop=stop)


def prepare(cfg) -> dict:
    """What is asked for, as plain values; `measured_by` are the overrides that chose the measure."""
    hydra_config.check(cfg)
    overrides = hydra_config.task_overrides() or []
    return {**hydra_config.plain(cfg), "measured_by": [one for one in overrides if re.match(r"\+*measure\b", one)]}


def work(asked: dict, ranks: "Ranks", stop: StopSignals) -> dict:
    """One process's part in the figure, or another measurement, which takes one process."""
    from txl import runs, tracking
    from txl.evaluation import evaluate
    from txl.instruments import taking
    from txl.instruments.subject import Subject, other_text
    from txl.runtime import memory_named, naming, write_json

    subject = Subject.of(asked, ranks)
    plain = asked["measure"]["_target_"] == FIGURE
    named = [] if plain else asked["measured_by"] or [f"measure={runs.short_hash(asked['measure'])}"]
    name = runs.evaluation_name(subject.path, asked, other_text(asked), named)
    out = subject.path.parent / "evaluate" / name if asked["out"] is None else Path(asked["out"])
    instrument = None if plain else hydra_config.build(asked["measure"])
    runs.check_out(out, subject.path, () if plain else taking.ENDINGS)
    if ranks.main:
        runs.make(out.parent, "out: the figure's folder (out=FILE names another)")
    with memory_named("tgt_len", "batch_size", "mem_len"):
        if instrument is not None:
            stop.go_on()
            return taking.take(instrument, subject, out, received=lambda: stop.received)
        figure = evaluate(
            subject.model(),
            subject.split,
            tgt_len=subject.tgt_len,
            batch_size=subject.batch_size,
            precision=subject.precision,
            ranks=ranks,
        )
    if ranks.main:
        print(json.dumps(figure), flush=True)
        with naming(f"out: {out}"):
            write_json(out, figure)
        tracking.figures_table({asked["split"]: figure}, stderr=True)
        ranks.say(f"written to {out}")
    return figure


if __name__ == "__main__":
    hydra_config.launch(main, stoppable=True)
