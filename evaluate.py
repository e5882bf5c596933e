"""Measures a checkpoint on a split, or on another text: nll, perplexity, bits per byte.

python evaluate.py checkpoint=outputs/python_docs/default split=test
python evaluate.py checkpoint=RUN mem_len=512 same_length=true     read with another memory than in training
python evaluate.py checkpoint=RUN data.test=other.txt              score another text
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from txl import config as hydra_config
from txl.settings import TRAINED
from txl.signals import StopSignals, leave

if TYPE_CHECKING:
    from txl.ranks import Ranks


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
    """What is asked for, as plain values."""
    hydra_config.check(cfg)
    return hydra_config.plain(cfg)


def work(asked: dict, ranks: "Ranks", stop: StopSignals) -> dict:
    """One process's part in the figure."""
    from txl import checkpoint, runs, tracking
    from txl.evaluation import evaluate
    from txl.runtime import choose_device, memory_named, write_json

    name = asked["split"]
    path = checkpoint.locate(asked["checkpoint"])
    content = checkpoint.load(path)
    trained = content["config"]

    def setting(key: str, of_run):
        return of_run if asked[key] == TRAINED else asked[key]

    other = {key: value for key, value in asked["data"].items() if key != "_target_" and value != TRAINED}
    data = runs.other_text(trained["data"], other, name)
    vocab = checkpoint.vocabulary(content)
    corpus = checkpoint.construct(data, cache_dir=asked["cache_dir"])  # never a folder that a checkpoint names
    with ranks.main_first():
        split = corpus.split(name, vocab)
    if not other and corpus.text_hash(name) != content["texts"].get(name):
        ranks.say(f"warning: the text of split={name} is not the one of the run's time")

    out = path.parent / "evaluate" / runs.evaluation_name(path, asked, other)
    out = Path(asked["out"]) if asked["out"] is not None else out
    if ranks.main:
        runs.make(out.parent, "out: the figure's folder (out=FILE names another)")
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder")

    reading = {key: asked[key] for key in ("mem_len", "clamp_len", "same_length")}
    model_config = checkpoint.model_config(trained["model"], **reading)
    device = choose_device(asked["device"], ranks.local if ranks.size > 1 else None)
    trained_tgt_len = trained["tgt_len"] if trained["eval"]["tgt_len"] == TRAINED else trained["eval"]["tgt_len"]
    with memory_named("tgt_len", "batch_size", "mem_len"):
        model = checkpoint.load_model(content, model_config).to(device)
        if asked["compile"]:
            model.compile_layers()
        figure = evaluate(
            model,
            split,
            tgt_len=setting("tgt_len", trained_tgt_len),
            batch_size=setting("batch_size", trained["eval"]["batch_size"]),
            precision=setting("precision", trained["precision"]),
            ranks=ranks,
        )
    if ranks.main:
        write_json(out, figure)
        print(json.dumps(figure), flush=True)
        tracking.figures_table({name: figure}, stderr=True)
        ranks.say(f"written to {out}")
    return figure


if __name__ == "__main__":
    hydra_config.launch(main, stoppable=True)
