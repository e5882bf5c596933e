"""What may happen to a run, each by its name: it goes on as if nothing had, or says in a line what to do. More of it: make soak."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, finished, in_process, refused, small_state, state_of
from test_training import constant, make_run, small_lanes

import train
from txl import archive, resuming, runtime, saver, tracking, training
from txl.training import Diverged, updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "trials"),
    [
        *(("kills", 20), ("points", 1000), ("damage", 500), ("retention", 60)),
        *(("steps", 12), ("stops", 3), ("chain", 1), ("repeats", 2)),
    ],
)
def test_soak(part, trials, tmp_path):
    """A share of `make soak`: random kills, every point of a save, damage."""
    program = [sys.executable, str(ROOT / "tests" / "soak.py"), part, str(trials)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=900, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith(f"{part}: ")


# The same folder, twice


def test_two_starts_in_the_same_second_and_a_kill_of_the_holder(tmp_path):
    """One has the folder, the other is told who; killed, its lock is gone."""
    arguments = [*TINY, "steps=4000", "log_every=1"]
    program = [sys.executable, str(ROOT / "train.py"), *arguments]
    started = [
        subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    until = time.monotonic() + 100
    while all(process.poll() is None for process in started) and time.monotonic() < until:
        time.sleep(0.1)
    (second,) = [process for process in started if process.poll() is not None]
    (first,) = [process for process in started if process is not second]
    assert second.returncode == 1
    assert re.fullmatch(rf"name: .* is in use by process {first.pid} on .*\n", second.communicate()[1])
    (path,) = (tmp_path / "outputs" / "python_docs").iterdir()
    first.kill()
    first.communicate()
    with runtime.locked(path):
        pass


# Numbers that are not finite


def break_at(run, step: int, kind: str) -> None:
    """From now on the update after `step` updates meets a number that is not finite, once; in the weights for good."""
    forward, bias = run.model.forward, run.model.softmax.out_bias
    if kind == "gradient":
        bias.register_hook(lambda gradient: gradient * math.inf if run.step == step and not done else gradient)
    done: list[bool] = []

    def forwarded(tokens, mems, targets, **marks):
        if run.step == step and not done:
            if kind == "memory":
                mems = [memory * math.nan for memory in mems]
            if kind == "weights":
                bias.data[3] = math.nan
            output, new = forward(tokens, mems, targets, **marks)
            if kind == "loss":
                output = output * math.nan
            return output, new
        return forward(tokens, mems, targets, **marks)

    run.model.forward = forwarded
    real = run.scaler.unscale_

    def seen(optimizer):
        real(optimizer)
        if run.step == step:
            done.append(True)

    run.scaler.unscale_ = seen


@pytest.mark.parametrize("kind", ["loss", "gradient", "memory", "weights"])
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_number_that_is_not_finite(kind, on_nonfinite, capsys):
    """Seen before the optimizer's step. `skip` passes the segment over, with an empty memory, and one poisons nothing after it."""
    from conftest import tiny_model

    model = tiny_model()
    run = make_run(model, small_lanes())
    break_at(run, 3, kind)
    steps = updates(run, steps=12, lr=0.01, schedule=constant, on_nonfinite=on_nonfinite, max_bad_updates=3)
    before = [next(steps).nll for _ in range(3)]
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    position = run.lanes.state_dict()["position"]
    if on_nonfinite == "stop" or kind == "weights":
        words = "max_bad_updates: at update 4" if on_nonfinite == "skip" else r"optimizer\.lr: at update 4 the loss is"
        with pytest.raises(Diverged, match=words):
            next(steps)
        changed = {name for name, one in model.state_dict().items() if not torch.equal(one, weights[name])}
        assert changed == ({"softmax.out_bias"} if kind == "weights" else set())
        return
    after = [update.nll for update in steps]
    assert len(after) == 9 and all(map(math.isfinite, before + after))
    assert (run.step, run.bad_updates, run.lanes.state_dict()["position"]) == (12, 1, position + 10 * 8)
    assert capsys.readouterr().err.count("skipped (1 of 3)") == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert math.isfinite(run.take_unlogged()["train/nll"])


def test_weights_that_are_not_finite_are_never_saved(monkeypatch):
    """They may become so after a good loss: then the files hold the last state that is."""
    real = training.updates

    def harmed(run, **settings):
        for update in real(run, **settings):
            if update.step == 8:
                run.model.layers[0].feedforward_norm.bias.data[2] = math.inf
            yield update

    monkeypatch.setattr(training, "updates", harmed)
    outcome = in_process("train", *TINY, "eval_every=100", "steps=9", "save_every=4")
    assert outcome.status == 1 and outcome.stderr.splitlines()[-1].startswith(
        "optimizer.lr: at update 9 the loss is nan"
    )
    (path,) = Path("outputs/python_docs").iterdir()
    assert resuming.newest(path)[1]["step"] == 4
    writer = saver.Saver(Path("."), keep=2)
    for where in ("model", "run"):
        broken = small_state(2)
        if where == "model":
            broken["model"]["weight"][3] = math.inf
        else:
            broken["run"] = {"optimizer": {"state": {"weight": {"exp_avg": torch.full((3,), math.nan)}}}}
        writer.save(broken, best=True)
        with pytest.raises(
            ValueError, match=r"^optimizer\.lr: after update 2 (exp_avg of )?weight is not finite, so that nothing"
        ):
            writer.wait()
    assert not list(Path().glob("*.pt"))


def test_a_loss_spike_is_clipped_and_raises_no_false_alarm():
    """Fifty times the loss moves the weights no further than `clip` lets it, and training goes on."""
    from conftest import tiny_model

    model = tiny_model()
    run = make_run(model, small_lanes(), "sgd", lr=0.1)
    run.optimizer.param_groups[0]["momentum"] = run.optimizer.param_groups[1]["momentum"] = 0.0
    forward = model.forward

    def spiking(*given, **marks):
        nll, mems = forward(*given, **marks)
        return nll * (50 if run.step == 5 else 1), mems

    model.forward = spiking
    steps = updates(run, steps=12, lr=0.1, schedule=constant, clip=0.25, on_nonfinite="skip", max_bad_updates=0)
    for update in steps:
        if update.step == 5:
            before = [one.detach().clone() for one in model.parameters()]
        if update.step == 6:
            moved = sum((one - old).square().sum().item() for one, old in zip(model.parameters(), before, strict=True))
            assert update.nll > 50 and math.sqrt(moved) == pytest.approx(0.1 * 0.25, rel=1e-3)
    assert run.step == 12 and run.bad_updates == 0


def test_skipping_from_the_command_line(monkeypatch):
    real = training.updates

    def poisoned(run, **settings):
        forward, poison = run.model.forward, [3]

        def forwarded(*given, **marks):
            nll, mems = forward(*given, **marks)
            if len(given) > 2 and run.step == 4 and poison:
                poison.pop()
                return nll * math.nan, mems
            return nll, mems

        run.model.forward = forwarded
        yield from real(run, **settings)

    monkeypatch.setattr(training, "updates", poisoned)
    outcome = in_process("train", *TINY, "on_nonfinite=skip")
    assert outcome.status == 0 and "skipped (1 of 10)" in outcome.stderr
    (path,) = Path("outputs/python_docs").iterdir()
    assert state_of(path)["run"]["bad_updates"] == 1
    stopped = in_process("train", "name=stopped", *TINY, "on_nonfinite=skip", "max_bad_updates=0")
    assert stopped.status == 1 and stopped.stderr.splitlines()[-1].startswith(
        "max_bad_updates: at update 5 the loss is nan"
    )


# Time, signals, memory


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        *((signal.SIGTERM, phase) for phase in ("import", "data", "model", "validation", "save")),
        (signal.SIGUSR1, "save"),
    ],
)
def test_a_signal_in_any_phase_loses_nothing(phase, number, monkeypatch):
    """Status 75, and the same command then ends with the same figures."""
    from txl import evaluation
    from txl.data.store import Corpus

    expected = finished("whole")

    def then_signal(real):
        def call(*arguments, **named):
            monkeypatch.setattr(target, name, real)
            os.kill(os.getpid(), number)
            return real(*arguments, **named)

        return call

    target, name = {
        "import": (train, "prepare"),
        "data": (Corpus, "vocabulary"),
        "model": (train, "build"),
        "validation": (evaluation, "scoring_segments"),
        "save": (archive, "write"),
    }[phase]
    monkeypatch.setattr(target, name, then_signal(getattr(target, name)))
    outcome = in_process("train", "name=cut", *TINY)
    assert outcome.status == 75, outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("stopped ")
    assert in_process("train", "name=cut", *TINY).status == 0
    (path,) = Path("outputs/cut").iterdir()
    one, other = (json.loads((folder / "result.json").read_text()) for folder in (expected, path))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_kill_behind_a_valid_figure_that_a_signal_had_put_off(monkeypatch):
    """Stopped before the figure of update 3 was measured, then killed after it was: its line is there once."""
    whole, real = finished("whole"), training.updates

    def until(step, act):
        def changed(run, **settings):
            for update in real(run, **settings):
                if update.step == step:
                    act()
                yield update

        monkeypatch.setattr(training, "updates", changed)

    def cut():
        raise RuntimeError("power cut")

    until(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert in_process("train", "name=cut", *TINY).status == 75
    (path,) = Path("outputs/cut").iterdir()
    state = (path / "last.pt").read_bytes()
    until(4, cut)
    with pytest.raises(RuntimeError, match="power cut"):
        in_process("train", "name=cut", *TINY)
    monkeypatch.setattr(training, "updates", real)
    (path / "last.pt").write_bytes(state)  # as if the disk had not been reached before the kill
    (path / "last.1.pt").unlink()
    assert in_process("train", "name=cut", *TINY).status == 0
    rows = [
        [
            {key: row[key] for key in row if key != "tokens_per_second"}
            for row in tracking.read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (whole, path)
    ]
    assert rows[0] == rows[1]


def test_max_minutes_saves_and_leaves():
    outcome = in_process("train", *TINY, "max_minutes=1e-9", "save_every=100")
    assert outcome.status == 75
    assert re.search(r"^max_minutes: stopped after update 1 of 6, everything saved in ", outcome.stderr, re.M)
    for _ in range(5):
        outcome = in_process("train", *TINY, "max_minutes=1e-9", "save_every=100")
    assert outcome.status == 75
    (path,) = Path("outputs/python_docs").iterdir()
    assert [row["step"] for row in tracking.read_metrics(path / "metrics.jsonl")] == [2, 3, 4, 6, 6]
    assert in_process("train", *TINY, "max_minutes=1e-9", "save_every=100").status == 0


def test_save_every_counts_updates_or_minutes(monkeypatch):
    steps = []
    real = saver.Saver.save
    monkeypatch.setattr(
        saver.Saver,
        "save",
        lambda self, content, best: (steps.append(content["step"]), real(self, content, best=best))[1],
    )
    given = [one for one in TINY if not one.startswith(("save_every", "eval_every"))] + ["eval_every=100"]
    assert in_process("train", "name=a", *given, "save_every=4").status == 0
    assert in_process("train", "name=b", *given, "save_every=1000min").status == 0
    assert in_process("train", "name=c", *given, "save_every=0.000001min").status == 0
    assert steps == [4, 6, 6, 1, 2, 3, 4, 5, 6]
    for bad in ("0", "soon", "-3min", "0min", "1.5"):
        refused(in_process("train", *given, f"save_every={bad}"), "save_every")


def test_requeue_asks_slurm(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "scontrol"
    tool.write_text('#!/bin/sh\necho "$@" >> asked\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    outcome = in_process("train", *TINY, "max_minutes=1e-9", "requeue=true")
    assert outcome.status == 75 and "requeue: this is no Slurm job" in outcome.stderr
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert in_process("train", *TINY, "max_minutes=1e-9").status == 75
    assert not Path("asked").exists()
    outcome = in_process("train", *TINY, "max_minutes=1e-9", "requeue=true")
    assert outcome.status == 75 and Path("asked").read_text() == "requeue 42\n"


def test_the_second_ctrl_c_leaves_at_once(tmp_path):
    """While the first waits for a slow save; the state before is whole."""
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["train.py", *{[*TINY, "steps=400", "save_every=5"]!r}]
import train
from txl import archive, config
real = archive.write
def slow(path, content):
    if content.get("step", 0) >= 10:
        print("saving", file=sys.stderr, flush=True)
        time.sleep(100)
    real(path, content)
archive.write = slow
config.launch(train.main, stoppable=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line == "saving\n":
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and time.monotonic() - began < 10
    (path,) = (tmp_path / "outputs" / "python_docs").iterdir()
    assert resuming.newest(path)[1]["step"] in (3, 5, 6, 9)


def test_out_of_memory_names_the_keys_to_make_smaller(monkeypatch):
    path = finished("run", "save_every=3")
    before = (path / "last.pt").read_bytes()
    real = training.updates

    def greedy(run, **settings):
        for update in real(run, **settings):
            if update.step == 8:
                torch.empty(1 << 50)
            yield update

    monkeypatch.setattr(training, "updates", greedy)
    outcome = in_process("train", f"resume={path}", "steps=20", "save_every=100", "eval_every=100")
    assert outcome.status == 1
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("batch_size: out of memory")
    assert all(key in line for key in ("accumulate", "tgt_len", "mem_len"))
    assert (path / "last.pt").read_bytes() == before
