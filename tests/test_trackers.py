"""TensorBoard and trackio, read back by their own readers; and what all trackers share."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, in_process

from txl import trackers, tracking
from txl.curves import draw_curves  # as it is, not as every test has it


def run_of(name: str) -> Path:
    return next(Path("outputs", name).iterdir())


def in_two_starts(*overrides: str) -> Path:
    """A run that was stopped after three updates, killed after five, and has then ended."""
    from txl import training

    real = training.updates

    def cut(*arguments, **named):
        for update in real(*arguments, **named):
            if update.step == 6:
                raise RuntimeError("power cut")
            yield update

    arguments = ["name=twice", *overrides, *TINY, "log_every=1"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "updates", cut)
        with pytest.raises(RuntimeError, match="power cut"):
            in_process("train", *arguments)
    outcome = in_process("train", *arguments)
    assert outcome.status == 0 and "goes on after update 3" in outcome.stderr and "warning" not in outcome.stderr
    return run_of("twice")


def test_tensorboard_shows_each_update_once_by_updates_and_by_tokens(monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(tracking, "draw_curves", draw_curves)
    path = in_two_starts("tracker=tensorboard")
    rows = tracking.read_metrics(path / "metrics.jsonl")
    names = ("train/nll", "train/lr", "train/grad_norm", "valid/nll", "valid/bits_per_byte", "tokens_per_second")
    for axis, prefix, key in (("steps", "", "step"), ("tokens", "by_tokens/", "tokens")):
        events = EventAccumulator(str(path / "tensorboard" / axis)).Reload()
        for name in names:
            shown = [(event.step, event.value) for event in events.Scalars(prefix + name)]
            told = [(row[key], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row]
            if name == "tokens_per_second":
                shown, told = [step for step, _ in shown], [step for step, _ in told]
            assert shown == told, name
    events = EventAccumulator(str(path / "tensorboard" / "steps"), size_guidance={"tensors": 0}).Reload()
    result = json.loads((path / "result.json").read_text())
    assert events.Scalars("final/test/nll")[0].value == pytest.approx(result["test"]["nll"], rel=1e-6)
    texts = {
        name: events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0]
        for name in ("continuation", "config")
    }
    sample = (path / "sample.txt").read_bytes().decode(errors="replace")
    assert texts["continuation"].decode() == sample
    assert b'"n_layer": 2' in texts["config"]
    assert len(events.Images("curves")) == 1


def test_trackio_shows_each_update_once_and_connects_to_nobody(tmp_path):
    from trackio import sqlite_storage, utils
    from trackio.media import media

    def refuse(*_):
        raise AssertionError("a connection")

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((socket.socket, "connect"), (socket.socket, "bind"), (socket, "getaddrinfo")):
            patched.setattr(owner, name, refuse)
        for module in (sqlite_storage, utils):
            patched.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
        for module in (utils, media):
            patched.setattr(module, "MEDIA_DIR", tmp_path / "trackio" / "media")
        path = in_two_starts("tracker=trackio", "tracker.project=test")

    def asked(*words):
        line = [sys.executable, "-m", "trackio.cli", *words, "--project", "test", "--json"]
        environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
        return json.loads(subprocess.run(line, check=True, capture_output=True, text=True, env=environment).stdout)

    name = f"twice/{path.name}"
    assert asked("list", "runs")["runs"] == [name]
    told = asked("get", "run", "--run", name)
    assert told["config"]["model"]["n_layer"] == 2 and {"sample", "curves"} <= set(told["metrics"])
    rows = tracking.read_metrics(path / "metrics.jsonl")
    for metric in ("train/nll", "valid/nll", "tokens"):
        values = asked("get", "metric", "--run", name, "--metric", metric)["values"]
        shown = [(value["step"], value["value"]) for value in values]
        assert sorted({*shown}) == sorted({(row["step"], row[metric]) for row in rows if metric in row})
        assert metric == "tokens" or len(shown) == len({*shown})
    result = json.loads((path / "result.json").read_text())
    (final,) = asked("get", "metric", "--run", name, "--metric", "final/test/nll")["values"]
    assert (final["step"], final["value"]) == (6, result["test"]["nll"])
    assert list((tmp_path / "trackio" / "media").rglob("*.png"))


def test_without_git_a_run_is_tracked_all_the_same(monkeypatch, tmp_path):
    config = {"steps": 3}
    monkeypatch.setattr(trackers, "CODE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert trackers.with_git(config) == config
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@f"]
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q", "-b", "trunk"], ["add", "a"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    found = trackers.with_git(config)
    assert found["steps"] == 3 and found["git"]["branch"] == "trunk" and found["git"]["dirty"] is False
    assert len(found["git"]["commit"]) == 40
    (tmp_path / "a").write_text("2")
    assert trackers.with_git(config)["git"]["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert trackers.with_git(config) == config


def test_the_id_of_a_run_lasts(tmp_path):
    first = trackers.lasting_id(tmp_path, "wandb_id")
    assert trackers.lasting_id(tmp_path, "wandb_id") == first != trackers.lasting_id(tmp_path, "trackio_id")
    (tmp_path / "wandb_id").write_text("../strange")
    assert trackers.lasting_id(tmp_path, "wandb_id") not in (first, "../strange")


def test_a_refused_time_names_its_key():
    outcome = in_process("train", "tracker=wandb", "tracker.upload_seconds=0", *TINY)
    assert outcome.status == 1 and outcome.stderr == "tracker.upload_seconds: must be at least 1, got 0\n"
    assert not Path("outputs").exists()
