"""Trains a Transformer-XL: builds it, loops over its updates, logs, evaluates, saves.

python train.py                                  the default run
python train.py model.n_layer=8 steps=2000       any value is an override
python train.py --help                           all of them
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from txl import config as hydra_config
from txl.config import build
from txl.settings import Train
from txl.signals import STOPPED, Stopped, StopSignals, leave
from txl.signature import arguments

if TYPE_CHECKING:  # importing torch here would cost `--help` and tab completion seconds
    from txl.ranks import Ranks
    from txl.resuming import Job
    from txl.runs import Parts

VALID = ("nll", "ppl", "bits_per_token", "bits_per_byte")  # what is logged of a valid figure
SMALLER = ("batch_size", "batch_size / accumulate", "tgt_len", "model.memory.mem_len")  # where memory runs out


@hydra_config.entry_point("train")
def main(cfg) -> float:
    """Trains, or goes on, or reports the finished run; returns the best valid nll (nats per token).

    `processes` starts as many and waits for them; started by torchrun, this is one of several already.
    """
    with StopSignals() as stop:
        stop.leave_at_once(leave)
        from txl import ranks

        if ranks.started_by_torchrun():
            if hydra_config.in_sweep():
                raise ValueError("processes: a sweep starts its processes itself: python train.py -m processes=N ...")
            with ranks.joined(str(cfg.get("device"))) as mine:
                job = mine.from_main(lambda: prepare(cfg))
                return work(job, mine, stop)
        job = prepare(cfg)
        if job.config["processes"] == 1 or job.finished() is not None:
            return work(job, ranks.ALONE, stop)
        stop.go_on()
        return ranks.launch(work, [job], processes=job.config["processes"], device=job.config["device"], stop=stop)


def prepare(cfg) -> "Job":
    """The run that a configuration asks for, and what it changes about the one in that folder; nothing is written."""
    from txl import resuming, runs

    overrides, folder = hydra_config.task_overrides(), None
    if cfg.get("resume") is not None:
        folder = Path(str(cfg.resume))
        overrides = resuming.resumed_overrides(folder, overrides or [])
        cfg = hydra_config.compose("train", overrides)
    hydra_config.check(cfg)
    config = runs.absolute_paths(hydra_config.plain(cfg))
    if folder is None:
        path = runs.folder(config, overrides)
        resuming.refuse_another(path, config)
    else:
        path, config = folder, resuming.resumed_paths(folder, config, hydra_config.task_overrides() or [])
        resuming.refuse_what_cannot_change(path, config)
    changed = resuming.differences(path, config)
    return resuming.Job(path, config, overrides, changed, folder is not None)


def work(job: "Job", ranks: "Ranks", stop: StopSignals) -> float:
    """One process's life: makes what the configuration describes, trains, measures; returns the best valid nll.

    Raises Stopped, with everything saved, once a signal was received or the time is up.
    """
    from txl import resuming, runs, tracking
    from txl.figures import finish
    from txl.runtime import locked, memory_named, requeue, write_json
    from txl.trackers import NoTracker

    if (result := ranks.from_main(job.finished)) is not None:
        if ranks.main:
            runs.warn_of_another_text(job.config, result)
            report(job.path, result)
        return result["valid"]["nll"]
    settings = Train(**arguments(job.config))
    tracker = build(settings.tracker) if ranks.main else NoTracker()
    with ExitStack() as held, memory_named(*SMALLER):
        holds = ranks.main and job.path.is_dir()
        if holds:
            held.enter_context(locked(job.path))
        parts = assemble(settings, ranks)
        environment = resuming.environment(ranks, parts.run.device, settings.compile)
        stop.go_on()
        if settings.init_from is not None and not ranks.from_main(lambda: bool(resuming.saved(job.path))):
            resuming.begin_from(parts, settings.init_from)
        if ranks.main:
            runs.make(job.path)
            if not holds:  # another start may have made the folder meanwhile
                held.enter_context(locked(job.path))
        resuming.go_on(job, parts, ranks, settings.steps, environment)
        if ranks.main:
            write_json(job.path / "vocab.json", parts.vocab.state())
        for line in job.changed:
            ranks.say(f"resume: {line}")
        about = {"folder": job.path, "name": f"{settings.name}/{job.path.name}", "config": job.config}
        at = {"step": parts.run.step, "tokens": parts.run.tokens}
        tracker = held.enter_context(tracking.tracked(tracker, **about, **at))
        if stopped := train(job, parts, settings, environment, tracker, stop):
            if settings.requeue and stopped.status == STOPPED and ranks.main:
                requeue(ranks.say)
            raise stopped

        def leave_saved(received: int) -> None:
            raise Stopped.by(received, saved_words(job, parts, settings))

        result = finish(job.path, parts, settings, tracker, stop, leave_saved)
        if ranks.main:
            report(job.path, result)
        return result["valid"]["nll"]


def saved_words(job: "Job", parts: "Parts", settings: Train) -> str:
    return f"stopped after update {parts.run.step} of {settings.steps}, everything saved in {job.path}"


def assemble(settings: Train, ranks: "Ranks") -> "Parts":
    """Everything that the configuration describes: data, vocabulary, model, optimizer; nothing is written but token files."""
    import torch

    from txl.averaging import Average
    from txl.data.streams import Lanes, Prefetched
    from txl.optim import parameter_groups
    from txl.ranks import seed_of
    from txl.runs import Parts
    from txl.runtime import choose_device, set_seed
    from txl.sharding import spread
    from txl.training import Run

    settings.check_division(ranks.size)
    device = choose_device(settings.device, ranks.local if ranks.size > 1 else None)
    set_seed(settings.seed, deterministic=settings.deterministic)
    with ranks.main_first():
        corpus = build(settings.data, cache_dir=settings.cache_dir)
        vocab = corpus.vocabulary()
        splits = {name: corpus.split(name, vocab) for name in ("train", "valid", "test")}
    lanes = Lanes.of(
        splits["train"],
        batch_size=settings.batch_size,
        tgt_len=settings.tgt_len,
        shuffle_seed=settings.seed if corpus.shuffle_documents else None,
        rows=ranks.share(settings.batch_size),
    )
    n_token = settings.model["n_token"] if settings.model["n_token"] is not None else vocab.n_token
    if n_token < vocab.n_token:
        raise ValueError(
            f"model.n_token: {n_token} is smaller than the vocabulary of {vocab.n_token}; null takes it from there"
        )
    model_config = {**settings.model, "n_token": n_token}
    model = build(model_config)
    if settings.sharding == "none" or ranks.size == 1:  # a share of it may be all that a device can hold
        model = model.to(device)
    replica = spread(model, ranks, device, sharding=settings.sharding)
    build(settings.schedule)(0, lr=settings.optimizer["lr"], steps=settings.steps, valid_nll=[])  # says what is wrong
    try:
        optimizer = build(settings.optimizer)(parameter_groups(model))
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's words name no key
        raise ValueError(f"optimizer: {error}") from error
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    lanes = Prefetched(lanes, pin=device.type == "cuda")
    average = Average(rule=build(settings.average))
    run = Run(
        model=model, replica=replica, optimizer=optimizer, lanes=lanes, scaler=scaler, ranks=ranks, average=average
    )
    if ranks.rank:  # the weights are the same everywhere, dropout is not
        torch.manual_seed(seed_of(settings.seed, ranks.rank, 0))
    return Parts(corpus=corpus, vocab=vocab, splits=splits, model_config=model_config, run=run)


def train(job: "Job", parts: "Parts", settings: Train, environment: dict, tracker, stop: StopSignals) -> Stopped | None:
    """Runs the updates that are left; after each, whatever is due: a line of the log, the valid figure, a checkpoint.

    Returns why it ended early, with everything saved, once a signal was received or the time is up; else None. All
    processes do all of this together; the first one writes.
    """
    from txl import resuming, tracking
    from txl.figures import measure
    from txl.saver import Saver

    run, ranks, path, started = parts.run, parts.run.ranks, job.path, time.monotonic()
    metrics = (
        tracking.Metrics(path / "metrics.jsonl", step=run.step, measured=run.measured)
        if ranks.main
        else tracking.NoMetrics()
    )
    if settings.compile:
        run.model.compile_layers()
    else:
        ranks.settled()  # what is compiled may take some processes longer than others, until the first update is done

    def settle() -> None:
        resuming.settle(path, job.config, job.overrides)

    saver = Saver(path, keep=settings.keep_last, settle=settle)
    speed, clock, saved_at = tracking.Speed(), time.monotonic(), time.monotonic()

    def log(row: dict) -> None:
        row = {"step": run.step, "tokens": run.tokens, **row}
        metrics.log(row)
        tracker.log(row)
        display.show(row)

    def validate() -> bool | None:
        """Measures the valid figure; true if it is the best so far. None where a signal ended it: it is due again on resume."""
        with speed.paused():
            with run.average.in_place(run.model):
                figure = measure(parts, "valid", settings, stop, max_segments=settings.eval["max_segments"])
            if figure is None:
                return None
            log({f"valid/{name}": figure[name] for name in VALID})
            metrics.draw(path / "curves.png")
            return run.note_valid(figure["nll"])

    def save(best: bool) -> None:
        """Copies the state, of all processes, and has it written."""
        nonlocal clock
        with speed.paused():
            run.seconds, clock = run.seconds + time.monotonic() - clock, time.monotonic()
            content = resuming.content_of(parts, job.config, environment)
            ranks.wait_until(lambda: not saver.busy())
            if ranks.main:
                saver.save(content, best=best)

    if ranks.main and not resuming.saved(path):
        settle()
    try:
        with tracking.Display(steps=settings.steps, step=run.step, quiet=not ranks.main) as display:
            if is_due(settings.eval_every, run.step, settings.steps) and run.measured < run.step:
                best = validate()
                if best is None:
                    return Stopped.by(stop.received or signal.SIGTERM, saved_words(job, parts, settings))
                save(best)
            for update in steps(run, settings, path):
                display.advance(update.step)
                speed.add(update.n_token)
                best = False
                if is_due(settings.log_every, update.step, settings.steps):
                    gradient = {"train/lr": update.lr, "train/grad_norm": update.grad_norm}
                    log({**run.take_unlogged(), **gradient, **speed.take()})
                if is_due(settings.eval_every, update.step, settings.steps):
                    best = validate()
                now, minutes = time.monotonic(), settings.save_minutes
                late = minutes is not None and ranks.main and now - saved_at >= 60 * minutes
                over = settings.max_minutes is not None and ranks.main and now - started >= 60 * settings.max_minutes
                received, late, over = ranks.agree(stop.received or 0, late, over)
                every = settings.save_every if minutes is None else settings.steps
                if best or late or over or received or is_due(every, update.step, settings.steps):
                    save(bool(best))
                    saved_at = time.monotonic()
                if received or over:
                    ranks.wait_until(lambda: not saver.busy())
                    saver.wait()
                    words = saved_words(job, parts, settings)
                    return Stopped.by(int(received), words) if received else Stopped(f"max_minutes: {words}")
        ranks.wait_until(lambda: not saver.busy())
        saver.wait()
        if ranks.main:
            settle()
    except KeyboardInterrupt:
        raise
    except BaseException:
        saver.give_up()
        raise
    finally:
        metrics.draw(path / "curves.png", last=True)
        metrics.close()
    return None


def is_due(every: int, step: int, steps: int) -> bool:
    """At each multiple, and at the end."""
    return step > 0 and (step % every == 0 or step == steps)


def steps(run, settings: Train, path: Path) -> Iterator:
    """The updates that are left."""
    from txl.runtime import profiled
    from txl.training import updates

    left = updates(
        run,
        steps=settings.steps,
        lr=settings.optimizer["lr"],
        schedule=build(settings.schedule),
        clip=settings.clip,
        precision=settings.precision,
        accumulate=settings.accumulate,
        on_nonfinite=settings.on_nonfinite,
        max_bad_updates=settings.max_bad_updates,
        scored=settings.loss,
    )
    if settings.profile is not None and run.ranks.main:
        left = profiled(left, settings.profile, path)
    for update in left:
        yield update
        run.ranks.settled()


def report(path: Path, result: dict) -> None:
    """Prints a finished run: its figures, its folder, its sample."""
    from txl import tracking

    tracking.figures_table({name: result[name] for name in ("valid", "test")})
    print(f"run: {path}   (update {result['step']}, {result['parameters']:,} parameters, {result['seconds']:.0f} s)")
    if (path / "sample.txt").exists():
        print("sample, going on after the end of the test text:\n" + (path / "sample.txt").read_text(errors="replace"))


if __name__ == "__main__":
    hydra_config.launch(main, stoppable=True)
