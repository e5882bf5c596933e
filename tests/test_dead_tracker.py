"""The tracker dead in every way: training is identical, and waits for nothing."""

import socket
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, state_of

from txl import tracking


class FakeRun:
    def __init__(self, failing):
        self.failing = failing

    def define_metric(self, *_, **__):
        pass

    def log(self, row):
        self.act("log")

    def finish(self):
        self.act("finish")

    def act(self, name):
        if self.failing == name:
            raise SystemExit(3)
        if self.failing == f"slow {name}":
            time.sleep(60)


@pytest.mark.parametrize("failing", ["init", "log", "finish", "slow init", "slow log", "slow finish"])
def test_a_tracker_dead_in_any_way_leaves_training_identical(failing, monkeypatch, trained_run):
    """Bit for bit, and the program neither fails nor waits for long."""
    import wandb

    def init(**_):
        run = FakeRun(failing)
        run.act("init")
        return run

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(tracking, "PATIENCE", 0.5)
    began = time.monotonic()
    outcome = in_process("train", "name=tiny", "tracker=wandb", *TINY)
    assert outcome.status == 0 and time.monotonic() - began < 30
    assert outcome.stderr.count("warning: tracker:") == 1
    (path,) = Path("outputs/tiny").iterdir()
    one, other = (state_of(folder) for folder in (trained_run, path))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    rows = [
        [
            {key: row[key] for key in row if key != "tokens_per_second"}
            for row in tracking.read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (trained_run, path)
    ]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refused", "silent", "no key"])
def test_wandb_online_without_a_server(server, tmp_path):
    """The real package: the run ends well, one warning, in bounded time."""
    from conftest import command

    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
    port = silent.getsockname()[1] if server == "silent" else 9
    key = {} if server == "no key" else {"WANDB_API_KEY": "0" * 40}
    home = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    began = time.monotonic()
    outcome = command(
        "train", "tracker=wandb", "tracker.mode=online", *TINY, cwd=tmp_path, WANDB_MODE="online", **home, **key
    )
    silent.close()
    assert outcome.status == 0, outcome.stderr
    assert "warning: tracker: " in outcome.stderr and time.monotonic() - began < 60
    (path,) = (tmp_path / "outputs" / "python_docs").iterdir()
    assert len(tracking.read_metrics(path / "metrics.jsonl")) == 5


def test_a_run_that_goes_on_is_one_run_to_wandb(monkeypatch):
    import wandb

    began = []

    def init(**how):
        began.append(how)
        return FakeRun(None)

    monkeypatch.setattr(wandb, "init", init)
    for minutes in ("1e-9", "null"):
        in_process("train", "tracker=wandb", *TINY, f"max_minutes={minutes}")
    assert len(began) == 2 and began[0]["id"] == began[1]["id"] and began[0]["resume"] == "allow"
