"""The figures of a run: while it trains, and once it is through; and a sample of what it writes."""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from txl import checkpoint, generation
from txl.config import build
from txl.data.vocab import fingerprint
from txl.evaluation import evaluate
from txl.runs import Parts
from txl.runtime import write_json, write_whole
from txl.settings import TRAINED, Train
from txl.sharding import is_sharded
from txl.signals import StopSignals
from txl.trackers import Conclusion

SAMPLE_CONTEXT = 512  # tokens that are read before the sample is written, as in the paper (appendix E)
SHOWN = ("nll", "ppl", "bits_per_byte")


def measure(
    parts: Parts, split: str, settings: Train, stop: StopSignals, *, max_segments: int | None = None
) -> dict | None:
    """The figure of a split with the settings under `eval.`; None where a signal ended it early."""
    reading = settings.eval
    has_memory = parts.run.model.memory.mem_len is not None  # a preset gives none to a model without
    model = reading_model(parts, reading["mem_len"] if has_memory else TRAINED)
    tgt_len = settings.tgt_len if reading["tgt_len"] == TRAINED else reading["tgt_len"]
    return evaluate(
        model,
        parts.splits[split],
        tgt_len=tgt_len,
        batch_size=reading["batch_size"],
        precision=settings.precision,
        max_segments=max_segments,
        ranks=parts.run.ranks,
        interrupted=lambda: stop.received is not None,
    )


def finish(
    path: Path, parts: Parts, settings: Train, tracker: Any, stop: StopSignals, leave: Callable[[int], None]
) -> dict:
    """The figures of the best checkpoint, and how it goes on after the end of the test text; a signal calls `leave`."""
    run = parts.run
    best = checkpoint.load(path / "best.pt", key="name")
    checkpoint.load_weights(run.model, best["model"], key="name")
    figures = {}
    for split in ("valid", "test"):
        figures[split] = measure(parts, split, settings, stop)
        if figures[split] is None:
            leave(stop.received or signal.SIGTERM)  # another process's
    result = {
        **figures,
        "step": best["step"],
        "tokens_seen": best["tokens"],
        "seconds": round(run.seconds, 3),
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "corpus": parts.corpus.fingerprint(),
        "vocabulary": fingerprint(parts.vocab),
    }
    model = reading_model(parts, TRAINED)
    if run.ranks.main:
        stop.leave_at_once(leave)  # nobody waits for this
        prompt, continuation = write_sample(path, parts, settings, model)
        write_json(path / "result.json", result)
        tracker.conclude(
            Conclusion(
                step=run.step,
                tokens=run.tokens,
                figures=summary(result),
                prompt=prompt,
                continuation=continuation,
                picture=path / "curves.png",
                checkpoint=path / "best.pt",
            )
        )
    return result


def summary(result: Mapping[str, Any]) -> dict[str, float | int]:
    """The figures of a result as trackers show them: flat, under `final/`."""
    figures = {f"final/{split}/{name}": result[split][name] for split in ("valid", "test") for name in SHOWN}
    figures |= {f"final/{name}": result[name] for name in ("step", "parameters", "seconds")}
    return {name: figure for name, figure in figures.items() if figure is not None}


def reading_model(parts: Parts, mem_len: int | str | None) -> nn.Module:
    """The model, or one with another memory on the same weights; whole, where training holds shares of it."""
    model = parts.run.model
    if mem_len == TRAINED and not is_sharded(model):
        return model
    reading = {"mem_len": mem_len, "clamp_len": TRAINED, "same_length": TRAINED}
    return checkpoint.twin(model, checkpoint.model_config(parts.model_config, **reading))


def write_sample(path: Path, parts: Parts, settings: Train, model: nn.Module) -> tuple[str, str]:
    """Writes how the model goes on after the end of the test text; returns that end, and how it goes on."""
    sampling = build(settings.sample)
    reader = generation.Reader(
        model,
        context=settings.tgt_len,
        n_token=parts.vocab.n_token,
        precision=settings.precision,
        documents=generation.borders_for(parts.corpus.encoder(parts.vocab), parts.corpus.reset_at_document),
    )
    start = torch.from_numpy(parts.splits["test"].tokens[-SAMPLE_CONTEXT:].astype("int64"))
    texts = reader.begin([start])
    made = generation.generate(texts, sampling, [generation.sample_seed(settings.seed, 0)])
    text = parts.vocab.decode([token for (token,) in made])
    write_whole(path / "sample.txt", lambda file: file.write(text))
    return parts.vocab.decode(start.tolist()).decode(errors="replace"), text.decode(errors="replace")
