"""Weights & Biases in a process of its own: what it waits for, prints or dies of is not training's.

`txl.trackers.WandbTracker` starts it by this file's path. Standard input brings one JSON object a line: how to start,
then method and arguments of each call. Its end ends the run, so that what a killed trainer has logged is kept all the same.
Standard output answers {"path": the folder that `wandb sync` takes} at the start, {"done": true} at the end, or {"error": words}.
"""

import json
import os
import queue
import sys
import threading


def start(how):
    import wandb

    settings = wandb.Settings(console="off", silent=True, finish_timeout_raises=True, **how.pop("timeouts"))
    run = wandb.init(resume="allow", settings=settings, **how)  # a run that goes on is one run there too
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return run


def log(run, *, row):
    run.log(row, step=row["step"])


def conclude(run, *, step, tokens, figures, sample, picture, checkpoint):
    import wandb

    table = wandb.Table(columns=["step", "tokens", *sample], data=[[step, tokens, *sample.values()]])
    shown = {"curves": wandb.Image(picture)} if picture else {}
    run.log({"step": step, "tokens": tokens, "sample": table, **shown})
    run.summary.update(figures)
    if checkpoint:
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"step": step, **figures})
        artifact.add_file(checkpoint)
        run.log_artifact(artifact, aliases=["best"])


def read(lines):
    """Takes what comes in at once, so that the trainer never waits."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def main():
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**words):
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which goes elsewhere, offline too
    lines, calls = queue.SimpleQueue(), {"log": log, "conclude": conclude}
    threading.Thread(target=read, args=[lines], daemon=True).start()
    try:
        run = start(json.loads(lines.get()))
        answer(path=run.settings.sync_dir)
        while (line := lines.get()) is not None:
            name, arguments = json.loads(line)
            calls[name](run, **arguments)
        run.finish()
        answer(done=True)
    except BaseException as error:  # it may even want to exit
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(1)


if __name__ == "__main__":
    main()
