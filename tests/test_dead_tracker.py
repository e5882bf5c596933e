"""The tracker dead in every way: training is identical, and waits for nothing."""

import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, state_of

from txl import trackers, tracking


def failing_tracker(failing: str) -> type:
    """A tracker that ends the program in one of its calls, or takes a minute for it."""

    class Failing:
        rescue, patience = "wandb sync there", 0.5

        def act(self, name):
            if failing == name:
                raise SystemExit(3)
            if failing == f"slow {name}":
                time.sleep(60)

        def start(self, **_):
            self.act("start")

        def log(self, row):
            self.act("log")

        def conclude(self, conclusion):
            self.act("conclude")

        def finish(self):
            self.act("finish")

    return Failing


CALLS = ("start", "log", "conclude", "finish")


@pytest.mark.parametrize("failing", [*CALLS, *(f"slow {name}" for name in CALLS)])
def test_a_tracker_dead_in_any_way_leaves_training_identical(failing, monkeypatch, trained_run):
    """Bit for bit, and the program neither fails nor waits for long; one warning says what to do."""
    monkeypatch.setattr(trackers, "TensorboardTracker", failing_tracker(failing))
    began = time.monotonic()
    outcome = in_process("train", "name=tiny", "tracker=tensorboard", *TINY)
    assert outcome.status == 0 and time.monotonic() - began < 30
    (warning,) = [line for line in outcome.stderr.splitlines() if "warning" in line]
    assert warning.startswith(f"warning: tracker: {failing.removeprefix('slow ')} ")
    assert warning.endswith("; later: wandb sync there")
    (path,) = Path("outputs/tiny").iterdir()
    one, other = (state_of(folder) for folder in (trained_run, path))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert (path / "result.json").exists()
    rows = [
        [
            {key: row[key] for key in row if key != "tokens_per_second"}
            for row in tracking.read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (trained_run, path)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_tracker_is_not_waited_for_after_ctrl_c(error):
    """After another error it is: what was logged is to be kept."""
    tracker = failing_tracker("slow finish")()
    began = time.monotonic()
    with pytest.raises(error), tracking.tracked(tracker):
        raise error
    assert (time.monotonic() - began < 0.4) == (error is KeyboardInterrupt)
