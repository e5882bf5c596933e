"""Measures a checkpoint on a split, or on another text: nll, perplexity, bits per byte.

python evaluate.py checkpoint=outputs/python_docs/default split=test
python evaluate.py checkpoint=RUN mem_len=512 same_length=true     read with another memory than in training
python evaluate.py checkpoint=RUN data.test=other.txt              score another text
"""

import json
import sys
from pathlib import Path

from txl import config as hydra_config
from txl.settings import TRAINED


@hydra_config.entry_point("evaluate")
def main(cfg) -> dict:
    """Prints the figure as a line of JSON, writes it beside the checkpoint, and returns it."""
    from txl import checkpoint, runs, tracking
    from txl.evaluation import evaluate
    from txl.runtime import choose_device, write_json

    hydra_config.check(cfg)
    asked = hydra_config.plain(cfg)
    path = checkpoint.locate(cfg.checkpoint)
    content = checkpoint.load(path)
    trained = content["config"]

    def setting(name: str, of_run):
        return of_run if asked[name] == TRAINED else asked[name]

    other = {key: value for key, value in asked["data"].items() if key != "_target_" and value != TRAINED}
    data = runs.other_text(trained["data"], other, cfg.split)
    vocab = checkpoint.vocabulary(content)
    corpus = checkpoint.construct(data, cache_dir=cfg.cache_dir)  # never a folder that a checkpoint names
    split = corpus.split(cfg.split, vocab)
    if not other and corpus.text_hash(cfg.split) != content["texts"].get(cfg.split):
        print(f"warning: the text of split={cfg.split} is not the one of the run's time", file=sys.stderr)

    out = Path(cfg.out) if cfg.out is not None else path.parent / "evaluate" / runs.evaluation_name(path, asked, other)
    runs.make(out.parent, "out: the figure's folder (out=FILE names another)")
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder")

    reading = {name: asked[name] for name in ("mem_len", "clamp_len", "same_length")}
    model_config = checkpoint.model_config(trained["model"], **reading)
    model = checkpoint.load_model(content, model_config).to(choose_device(cfg.device))
    if cfg.compile:
        model.compile_layers()
    trained_tgt_len = trained["tgt_len"] if trained["eval"]["tgt_len"] == TRAINED else trained["eval"]["tgt_len"]
    figure = evaluate(
        model,
        split,
        tgt_len=setting("tgt_len", trained_tgt_len),
        batch_size=setting("batch_size", trained["eval"]["batch_size"]),
        precision=setting("precision", trained["precision"]),
    )
    write_json(out, figure)
    print(json.dumps(figure), flush=True)
    tracking.figures_table({cfg.split: figure}, stderr=True)
    print(f"written to {out}", file=sys.stderr)
    return figure


if __name__ == "__main__":
    hydra_config.launch(main)
