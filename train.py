"""Trains a Transformer-XL: builds it, loops over its updates, logs, evaluates, saves.

python train.py                                  the default run
python train.py model.n_layer=8 steps=2000       any value is an override
python train.py --help                           all of them
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from txl import config as hydra_config
from txl.config import build
from txl.settings import TRAINED, Train
from txl.signature import arguments

if TYPE_CHECKING:  # importing torch here would cost `--help` and tab completion seconds
    from txl.runs import Parts
    from txl.runtime import StopSignals

VALID = ("nll", "ppl", "bits_per_token", "bits_per_byte")  # what is logged of a valid figure
SAMPLE_CONTEXT = 512  # tokens that are read before the sample is written, as in the paper (appendix E)


@hydra_config.entry_point("train")
def main(cfg) -> float:
    """Trains, or goes on, or reports the finished run; returns the best valid nll (nats per token)."""
    from txl import runs
    from txl.runtime import StopSignals, locked, write_json

    overrides, folder = hydra_config.task_overrides(), None
    if cfg.get("resume") is not None:
        folder = Path(str(cfg.resume))
        overrides = runs.resumed_overrides(folder, overrides or [])
        cfg = hydra_config.compose("train", overrides)
    hydra_config.check(cfg)
    config = runs.absolute_paths(hydra_config.plain(cfg))
    if folder is None:
        path = runs.folder(config, overrides)
        runs.refuse_another(path, config)
    else:
        path, config = folder, runs.resumed_paths(folder, config, hydra_config.task_overrides() or [])
    changed = runs.differences(path, config)
    if (result := runs.result(path)) is not None and not changed:
        runs.warn_of_another_text(config, result)
        return report(path, result)
    settings = Train(**arguments(config))
    parts = assemble(settings)
    if settings.init_from is not None and not runs.saved(path):
        runs.begin_from(parts, settings.init_from)
    runs.make(path)
    with locked(path):
        runs.go_on(path, parts, settings.steps, changed)
        write_json(path / "vocab.json", parts.vocab.state())
        for line in changed:
            print(f"resume: {line}", file=sys.stderr)

        def leave(received: int) -> None:
            words = f"stopped after update {parts.run.step} of {settings.steps}, everything saved in {path}"
            raise hydra_config.Stopped.by(received, words)

        with StopSignals() as stop:
            train(path, parts, settings, config, overrides or [], stop)
            stop.leave_at_once(leave)
            return report(path, finish(path, parts, settings))


def assemble(settings: Train) -> "Parts":
    """Everything that the configuration describes: data, vocabulary, model, optimizer; nothing is written but token files."""
    import torch

    from txl.data.streams import Lanes, Prefetched
    from txl.optim import parameter_groups
    from txl.runs import Parts
    from txl.runtime import choose_device, set_seed
    from txl.training import Run

    device = choose_device(settings.device)
    set_seed(settings.seed, deterministic=settings.deterministic)
    corpus = build(settings.data, cache_dir=settings.cache_dir)
    vocab = corpus.vocabulary()
    splits = {name: corpus.split(name, vocab) for name in ("train", "valid", "test")}
    shuffle_seed = settings.seed if corpus.shuffle_documents else None
    lanes = Lanes.of(
        splits["train"], batch_size=settings.batch_size, tgt_len=settings.tgt_len, shuffle_seed=shuffle_seed
    )
    n_token = settings.model["n_token"] if settings.model["n_token"] is not None else vocab.n_token
    if n_token < vocab.n_token:
        raise ValueError(
            f"model.n_token: {n_token} is smaller than the vocabulary of {vocab.n_token}; null takes it from there"
        )
    model_config = {**settings.model, "n_token": n_token}
    model = build(model_config).to(device)
    build(settings.schedule)(0, lr=settings.optimizer["lr"], steps=settings.steps, valid_nll=[])  # says what is wrong
    try:
        optimizer = build(settings.optimizer)(parameter_groups(model))
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's words name no key
        raise ValueError(f"optimizer: {error}") from error
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    lanes = Prefetched(lanes, pin=device.type == "cuda")
    run = Run(model=model, optimizer=optimizer, lanes=lanes, scaler=scaler)
    return Parts(corpus=corpus, vocab=vocab, splits=splits, model_config=model_config, run=run)


def train(path: Path, parts: "Parts", settings: Train, config: dict, overrides: list[str], stop: "StopSignals") -> None:
    """Runs the updates that are left; after each, whatever is due: a line of the log, the valid figure, a checkpoint.

    Returns early, with everything saved, once a signal was received.
    """
    from txl import checkpoint, runs, tracking
    from txl.runtime import profiled
    from txl.training import updates

    run = parts.run
    tracker, metrics = build(settings.tracker), tracking.Metrics(path / "metrics.jsonl", step=run.step)
    tracker.start(folder=path, name=f"{settings.name}/{path.name}", config=config)
    if settings.compile:
        run.model.compile_layers()
    steps = updates(
        run,
        steps=settings.steps,
        lr=settings.optimizer["lr"],
        schedule=build(settings.schedule),
        clip=settings.clip,
        precision=settings.precision,
    )
    if settings.profile is not None:
        steps = profiled(steps, settings.profile, path)

    def log(row: dict) -> None:
        row = {"step": run.step, "tokens": run.tokens, **row}
        metrics.log(row)
        tracker.log(row)
        display.show(row)

    if not runs.saved(path):
        runs.settle(path, config, overrides)
    speed, clock = tracking.Speed(), time.monotonic()
    try:
        with tracking.Display(steps=settings.steps, step=run.step) as display:
            for update in steps:
                display.advance(update.step)
                speed.add(update.n_token)
                last = update.step == settings.steps
                if update.step % settings.log_every == 0 or last:
                    gradient = {"train/lr": update.lr, "train/grad_norm": update.grad_norm}
                    log({**run.take_unlogged(), **gradient, **speed.take()})
                if update.step % settings.eval_every == 0 or last:
                    with speed.paused():
                        figure = measure(parts, "valid", settings, max_segments=settings.eval["max_segments"])
                        log({f"valid/{name}": figure[name] for name in VALID})
                        if run.note_valid(figure["nll"]):
                            runs.settle(path, config, overrides)
                            checkpoint.save(path / "best.pt", runs.content_of(parts, config))
                        metrics.draw(path / "curves.png")
                run.seconds, clock = run.seconds + time.monotonic() - clock, time.monotonic()
                if update.step % settings.save_every == 0 or last or stop.received:
                    with speed.paused():
                        content = runs.content_of(parts, config) | {"run": run.state_dict()}
                        runs.settle(path, config, overrides)
                        runs.save_last(path, content, keep=settings.keep_last)
                if stop.received:
                    return
        runs.settle(path, config, overrides)
    finally:
        metrics.draw(path / "curves.png")
        metrics.close()
        tracker.finish()


def measure(parts: "Parts", split: str, settings: Train, *, max_segments: int | None = None) -> dict:
    """The figure of a split with the settings under `eval.`."""
    from txl import checkpoint
    from txl.evaluation import evaluate

    model, reading = parts.run.model, settings.eval
    if reading["mem_len"] != TRAINED and model.memory.mem_len is not None:  # a preset gives none to a model without
        kept = {"clamp_len": TRAINED, "same_length": TRAINED}
        config = checkpoint.model_config(parts.model_config, mem_len=reading["mem_len"], **kept)
        model = checkpoint.twin(model, config)
    tgt_len = settings.tgt_len if reading["tgt_len"] == TRAINED else reading["tgt_len"]
    return evaluate(
        model,
        parts.splits[split],
        tgt_len=tgt_len,
        batch_size=reading["batch_size"],
        precision=settings.precision,
        max_segments=max_segments,
    )


def finish(path: Path, parts: "Parts", settings: Train) -> dict:
    """The figures of the best checkpoint, and how it goes on after the end of the test text."""
    import torch

    from txl import checkpoint, generation
    from txl.data.vocab import fingerprint
    from txl.runtime import write_json, write_whole

    best = checkpoint.load(path / "best.pt", key="name")
    checkpoint.load_weights(parts.run.model, best["model"], key="name")
    sampling = build(settings.sample)
    reader = generation.Reader(
        parts.run.model,
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
    result = {
        "valid": measure(parts, "valid", settings),
        "test": measure(parts, "test", settings),
        "step": best["step"],
        "tokens_seen": best["tokens"],
        "seconds": round(parts.run.seconds, 3),
        "parameters": sum(parameter.numel() for parameter in parts.run.model.parameters()),
        "corpus": parts.corpus.fingerprint(),
        "vocabulary": fingerprint(parts.vocab),
    }
    write_json(path / "result.json", result)
    return result


def report(path: Path, result: dict) -> float:
    """Prints a finished run: its figures, its folder, its sample; returns the best valid nll."""
    from txl import tracking

    tracking.figures_table({name: result[name] for name in ("valid", "test")})
    print(f"run: {path}   (update {result['step']}, {result['parameters']:,} parameters, {result['seconds']:.0f} s)")
    if (path / "sample.txt").exists():
        print("sample, going on after the end of the test text:\n" + (path / "sample.txt").read_text(errors="replace"))
    return result["valid"]["nll"]


if __name__ == "__main__":
    hydra_config.launch(main)
