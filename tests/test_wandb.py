"""Weights & Biases: what it keeps offline and online, and that no server of any kind costs a run anything."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, command, in_process
from wandb_server import served

from txl import trackers, tracking

ONLINE = ["tracker=wandb", "tracker.mode=online", "tracker.project=test"]


def records(folder: Path, kind: str) -> list[dict]:
    """What W&B's own reader finds in a run's folder of one kind."""
    (file,) = folder.glob("run-*.wandb")
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(read, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [found[kind] for found in map(json.loads, lines) if found["type"] == kind]


def history(folder: Path) -> list[dict]:
    return [row["item"] for row in records(folder, "history")]


def merged(rows: list[dict]) -> list[dict]:
    """Rows of a metrics.jsonl, those of one update together, as W&B has them."""
    by_step = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    return list(by_step.values())


def assert_same_rows(found: list[dict], path: Path) -> None:
    expected = merged(tracking.read_metrics(path / "metrics.jsonl"))
    assert [{key: row.get(key) for key in other} for row, other in zip(found, expected, strict=True)] == expected


def run_of(name: str) -> Path:
    return next(Path("outputs", name).iterdir())


def told(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("step ")]


@pytest.fixture
def account(monkeypatch, tmp_path):
    """Nobody's account: no key, no settings of a user."""
    for name, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB_CONFIG_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return monkeypatch


def test_wandb_offline_keeps_all_of_a_run_and_asks_nobody(account):
    with served() as server:
        for name, value in server.environment.items():
            account.setenv(name, value)
        outcome = in_process("train", "name=kept", "tracker=wandb", "tracker.log_checkpoint=true", *TINY)
        assert outcome.status == 0 and told(outcome.stderr) == []
        assert server.requests == []
    path = run_of("kept")
    (folder,) = path.glob("wandb/offline-run-*")
    assert_same_rows(history(folder), path)
    (run, *_) = records(folder, "run")
    config, git = run["config"]["update"], trackers.with_git({}).get("git")
    assert config["steps"] == 6 and config["model"]["n_layer"] == 2 and config.get("git") == git
    summary = {key: value for record in records(folder, "summary") for key, value in record["update"].items()}
    result = json.loads((path / "result.json").read_text())
    for split in ("valid", "test"):
        for name in ("nll", "ppl", "bits_per_byte"):
            assert summary[f"final/{split}/{name}"] == result[split][name]
    assert [summary[f"final/{name}"] for name in ("parameters", "seconds")] == [result["parameters"], result["seconds"]]
    (table,) = folder.glob("files/media/table/*.json")
    table = json.loads(table.read_text())
    assert table["columns"] == ["step", "tokens", "prompt", "continuation"]
    sample = (path / "sample.txt").read_bytes().decode(errors="replace")
    assert table["data"][0][0] == 6 and len(table["data"][0][2]) > 100 and table["data"][0][3] == sample
    (picture,) = folder.glob("files/media/images/curves*.png")
    assert picture.read_bytes() == (path / "curves.png").read_bytes()
    artifacts = records(folder, "artifact")
    (model,) = [artifact for artifact in artifacts if artifact["type"] == "model"]
    (entry,) = model["manifest"]["contents"]
    assert entry["path"] == "best.pt" and int(entry["size"]) == (path / "best.pt").stat().st_size


def test_wandb_online_sends_all_and_keeps_no_copy(account):
    with served() as server:
        for name, value in server.environment.items():
            account.setenv(name, value)
        outcome = in_process("train", "name=sent", *ONLINE, "tracker.upload_seconds=20", *TINY)
        assert outcome.status == 0 and told(outcome.stderr) == []
        path = run_of("sent")
        assert_same_rows(server.history, path)
        assert any("media/table" in request for request in server.requests)
        assert any("media/images/curves" in request for request in server.requests)
    assert not list(path.glob("wandb/offline-run-*"))


FAILURES = {
    "no key": {},
    "no network": {},
    "hangs": {"failing": "silent"},
    "answers 500": {"failing": "500"},
    "lost, hanging": {"lost_after_start": "silent"},
    "lost, answering 500": {"lost_after_start": "500"},
}


def environment_of(failure: str, server) -> dict[str, str]:
    environment = dict(server.environment)
    if failure == "no key":
        del environment["WANDB_API_KEY"]
    if failure == "no network":
        environment["WANDB_BASE_URL"] = "http://127.0.0.1:9"
    return environment


def assert_kept(path: Path, stderr: str) -> None:
    """One warning, and the folder that it names holds all rows and the end; the run's own files are complete."""
    (warning,) = told(stderr)
    assert warning.startswith("warning: tracker: W&B is not reached (")
    folder = Path(warning.partition("; training goes on; later: wandb sync ")[2])
    assert folder.parent == (path / "wandb").resolve() and folder.name.startswith("offline-run-")
    assert_same_rows(history(folder), path)
    assert any("final/test/nll" in record["update"] for record in records(folder, "summary"))
    assert [row["step"] for row in tracking.read_metrics(path / "metrics.jsonl")] == [2, 3, 4, 6, 6]
    assert all((path / file).exists() for file in ("result.json", "best.pt", "last.pt", "sample.txt"))


@pytest.mark.parametrize("failure", ["no key", "lost, answering 500"])
def test_wandb_online_without_a_server_costs_nothing(failure, account):
    with served(**FAILURES[failure]) as server:
        for name, value in environment_of(failure, server).items():
            account.setenv(name, value)
        outcome = in_process("train", "name=alone", *ONLINE, "tracker.upload_seconds=3", *TINY)
    assert outcome.status == 0
    assert_kept(run_of("alone"), outcome.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_program_ends_soon_after_its_last_step_without_a_server(failure, account, tmp_path):
    """The real command, to the end of its process, as it is set up by default: 15 s after the last figure."""
    with served(**FAILURES[failure]) as server:
        outcome = command("train", "name=alone", *ONLINE, *TINY, cwd=tmp_path, **environment_of(failure, server))
        ended = time.time()
    assert outcome.status == 0, outcome.stderr
    assert_kept(run_of("alone"), outcome.stderr)
    assert ended - (run_of("alone") / "result.json").stat().st_mtime < 15


@pytest.mark.slow
def test_what_was_kept_is_sent_by_the_command_that_the_warning_names(account):
    with served(lost_after_start="500") as server:
        for name, value in server.environment.items():
            account.setenv(name, value)
        outcome = in_process("train", "name=alone", *ONLINE, "tracker.upload_seconds=3", *TINY)
    with served() as server:
        folder = told(outcome.stderr)[0].partition("wandb sync ")[2]
        sync = [sys.executable, "-m", "wandb", "sync", folder]
        subprocess.run(sync, check=True, env={**os.environ, **server.environment}, timeout=120)
        assert_same_rows(server.history, run_of("alone"))


def test_a_run_that_goes_on_is_one_run_to_wandb(account):
    for minutes in ("1e-9", "null"):
        in_process("train", "name=long", "tracker=wandb", *TINY, f"max_minutes={minutes}", "log_every=1")
    path = run_of("long")
    folders = sorted(path.glob("wandb/offline-run-*"), key=lambda folder: folder.stat().st_mtime)
    assert len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    rows = [history(folder) for folder in folders]
    assert [row["step"] for row in rows[0]] == [1] and [row["step"] for row in rows[1]] == [2, 3, 4, 5, 6]
    assert [row["_step"] for row in rows[1]] == [2, 3, 4, 5, 6]  # so that W&B takes them for the ones after


def test_metrics_are_complete_to_the_last_logged_step_under_kill_9(account, tmp_path):
    """What the program has said it logged is in the file; W&B's process keeps it too, of itself."""
    arguments = [override for override in TINY if not override.startswith(("steps", "log_every"))]
    run = ["name=killed", "tracker=wandb", *arguments, "steps=100000", "log_every=1", "eval_every=100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *run], stderr=subprocess.PIPE, text=True, env=environment
    )
    said = [program.stderr.readline() for _ in range(150)]
    while not list(tmp_path.glob("outputs/killed/*/wandb/offline-run-*/run-*.wandb")):
        said.append(program.stderr.readline())
    program.send_signal(signal.SIGKILL)
    said += program.stderr.read().splitlines(keepends=True)
    last = max(int(line.split()[1].partition("/")[0]) for line in said if line.endswith("\n"))
    program.wait()
    path = run_of("killed")
    lines = (path / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines[:last]] == list(range(1, last + 1))
    (folder,) = path.glob("wandb/offline-run-*")
    until = time.monotonic() + 20
    while not records(folder, "exit") and time.monotonic() < until:
        time.sleep(0.2)
    kept = [row["step"] for row in history(folder)]
    assert kept == list(range(1, len(kept) + 1)) and len(kept) >= last - 20  # those on their way are lost
