"""Several processes: they see what one sees, and end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_work
import torch
from conftest import ROOT, TINY, command, in_process, mostly_slow, refused, run_files, state_of

from txl import ranks, tracking
from txl.signals import StopSignals


def launch(work, *arguments, processes=2):
    return ranks.launch(work, arguments, processes=processes, device="cpu", stop=StopSignals())


@pytest.fixture(scope="module")
def together():
    return launch(rank_work.train_all)


@pytest.fixture(scope="module")
def alone():
    return rank_work.train_all(ranks.ALONE, StopSignals())


@pytest.mark.slow
@pytest.mark.parametrize("case", rank_work.CASES)
def test_two_processes_see_what_one_sees(case, together, alone):
    """Losses, norms, weights and memory, with accumulation, adaptive softmax, borders, the last short segment, a fresh start."""
    ours, expected = together[case], alone[case]
    for name in ("nll", "norm", "unlogged"):
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(expected[name]), rtol=0, atol=1e-9)
    for name in ("weights", "mems"):
        for one, other in zip(ours[name], expected[name], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-7)
    assert ours["tokens"] == expected["tokens"] == 8 * (44 * 2 + 20)
    assert ours["sharded"] == case.startswith("sharded") and not expected["sharded"]


@pytest.mark.parametrize("case", ["plain", "adaptive", "borders"])
@pytest.mark.parametrize("accumulate", mostly_slow([4, 2, 8], fast=3))
def test_accumulated_gradients_are_those_of_the_whole_batch(case, accumulate, monkeypatch):
    """Each chunk with its own memory, in float64, over two passes of the text."""
    results = []
    for chunks in (1, accumulate):
        run, _ = rank_work.made(case, ranks.ALONE)
        done = list(rank_work.updates(run, steps=12, lr=0.01, schedule=rank_work.constant, accumulate=chunks))
        results.append(([update.nll for update in done], list(run.model.parameters()), run.mems))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9, equal_nan=True)


def test_gradients_are_exchanged_with_the_last_chunk_only():
    first, *others = launch(rank_work.count_exchanges)
    assert (
        first >= 1 and others == [others[0]] * 2 and others[0] <= 2
    )  # its buckets, of which the model fills one or two


def test_evaluation_on_two_processes_gives_the_one_process_figure():
    """Sums of nats and tokens, not means of means; and one that is interrupted in any process gives none in all."""
    Path("t.txt").write_bytes(b"to be or not to be, that is the question " * 11)
    figures, left = launch(rank_work.evaluate_all)
    expected, _ = rank_work.evaluate_all(ranks.ALONE, StopSignals())
    assert left is None and len(figures) == 7
    for ours, one in zip(figures, expected, strict=True):
        assert ours.pop("nll") == pytest.approx(one.pop("nll"), rel=1e-13)
        for name in ("ppl", "bits_per_token", "bits_per_byte"):
            assert ours.pop(name) == pytest.approx(one.pop(name), rel=1e-12)
        assert ours == one


@pytest.mark.parametrize(
    ("kind", "words", "seconds"),
    [
        ("mistake", "^data.train: something is wrong with it$", 20),
        ("raise", r"^processes: rank 1 failed \('a bug of ours'\); the same command goes on", 20),
        ("die", "^processes: rank 1 ended with status -9; the same command goes on", 20),
        pytest.param("hang", "^processes: rank 0 failed .*(imed out|imeout)", 60, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails_ends_all(kind, words, seconds, capfd):
    """In under a minute, with its own traceback where it is a fault of the program."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=words):
        launch(rank_work.go_wrong, kind)
    assert time.monotonic() - began < seconds
    assert ("rank 1: KeyError: " in capfd.readouterr().err) == (kind == "raise")


def test_a_long_wait_for_the_first_process_is_no_hang():
    assert launch(rank_work.wait_for_the_first) == 1


@pytest.mark.slow
def test_two_processes_train_to_the_figures_of_one_and_resume_with_another_number(tmp_path):
    """2, then 1, then 2 again: lanes and memory are dealt anew; the command line, files and standard output are those of one."""
    given = [*TINY, "batch_size=4", "accumulate=2", "log_every=1"]
    assert in_process("train", "name=one", *given).status == 0
    (one,) = Path("outputs/one").iterdir()
    for number in (2, 1):
        outcome = command("train", "name=many", *given, f"processes={number}", "max_minutes=1e-9", cwd=tmp_path)
        assert outcome.status == 75, outcome.stderr
        assert outcome.stderr.count("max_minutes: stopped after update") == 1
    outcome = command("train", "name=many", *given, "processes=2", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stderr.count("resume: processes: 1, now 2") == 1 and outcome.stdout.count(b"run: outputs/many") == 1
    (many,) = Path("outputs/many").iterdir()
    assert {file.name for file in many.iterdir()} == {file.name for file in one.iterdir()}
    ours, expected = (tracking.read_metrics(path / "metrics.jsonl") for path in (many, one))
    assert [row["step"] for row in ours] == [row["step"] for row in expected]
    for row, other in zip(ours, expected, strict=True):
        for key in row.keys() - {"tokens_per_second"}:
            assert row[key] == pytest.approx(other[key], rel=1e-4), key
    results = [json.loads((path / "result.json").read_text()) for path in (many, one)]
    assert results[0]["test"]["nll"] == pytest.approx(results[1]["test"]["nll"], rel=1e-5)
    assert results[0]["tokens_seen"] == results[1]["tokens_seen"]
    again = command("train", "name=many", *given, "processes=2", cwd=tmp_path)
    assert again.status == 0 and again.stdout == outcome.stdout and again.stderr == ""
    scored = command("evaluate", f"checkpoint={many}", "processes=2", cwd=tmp_path)
    assert scored.status == 0, scored.stderr
    assert json.loads(scored.stdout)["nll"] == pytest.approx(results[0]["test"]["nll"], rel=1e-6)


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    line = refused(in_process("train", *TINY, "processes=3"), "batch_size")
    assert "2 lanes cannot be divided among processes=3 times accumulate=1; take a multiple of 3" in line
    refused(in_process("train", *TINY, "processes=2", "accumulate=2"), "batch_size")
    refused(in_process("train", *TINY, "accumulate=0"), "accumulate")
    refused(in_process("train", *TINY, "processes=0"), "processes")
    refused(in_process("train", *TINY, "sharding=half"), "sharding")
    refused(in_process("train", *TINY, "sharding=full", "compile=true"), "sharding")
    refused(in_process("train", *TINY, "sharding=full", "precision=fp16"), "sharding")


def test_a_mistake_on_several_processes_is_one_line(tmp_path):
    outcome = command("train", *TINY, "processes=2", "data.max_bytes=30", cwd=tmp_path)
    refused(outcome, "data.valid")


def workers(pid: int) -> list[int]:
    """The processes that one has started to train in, in order."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def begun(tmp_path, *overrides: str, program=()):
    """A long run on two processes, after its third checkpoint."""
    given = [*TINY, "batch_size=4", "steps=100000", "save_every=2", "eval_every=100000", *overrides]
    start = program or [sys.executable]
    # in a file, since nobody reads a pipe meanwhile
    with open(tmp_path / "stderr.txt", "w") as errors:
        process = subprocess.Popen(
            [*start, str(ROOT / "train.py"), *given], cwd=tmp_path, stderr=errors, stdout=subprocess.DEVNULL
        )
    until = time.monotonic() + 100
    while time.monotonic() < until and process.poll() is None:
        if list(tmp_path.glob("outputs/python_docs/*/last.1.pt")):
            return process, next(tmp_path.glob("outputs/python_docs/*"))
        time.sleep(0.1)
    process.kill()
    pytest.fail((tmp_path / "stderr.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(victim, number, tmp_path):
    """The run ends in under a minute, nobody is left, and a resume goes on with one process."""
    process, path = begun(tmp_path, "processes=2")
    ranks_then = workers(process.pid)
    assert len(ranks_then) == 2
    began = time.monotonic()
    os.kill(ranks_then[victim], number)
    assert process.wait(60) == 1 and time.monotonic() - began < 60
    errors = (tmp_path / "stderr.txt").read_text()
    assert errors.splitlines()[-1].startswith("processes: ") and "goes on from the last checkpoint" in errors
    assert not any(Path(f"/proc/{one}").exists() for one in ranks_then)
    step = state_of(path)["step"]
    outcome = command("train", f"resume={path}", f"steps={step + 2}", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    assert state_of(path)["step"] == step + 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_parent_of_several(number, tmp_path):
    """All save the same step and leave with the status of one."""
    process, path = begun(tmp_path, "processes=2")
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else 75)
    errors = (tmp_path / "stderr.txt").read_text()
    step = state_of(path)["step"]
    assert f"stopped after update {step} of 100000, everything saved" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, 2.5, 3.5, 4.5])
def test_ctrl_c_while_several_are_starting(seconds, tmp_path):
    """At a terminal it reaches all of them, wherever they are; one line, nothing left."""
    program = [sys.executable, str(ROOT / "train.py"), *TINY, "steps=100000", "processes=2"]
    process = subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("stopped ")


@pytest.mark.slow
def test_the_parent_of_several_is_killed(tmp_path):
    """Its children save and leave by themselves."""
    process, path = begun(tmp_path, "processes=2")
    children = workers(process.pid)
    process.kill()
    process.wait()
    until = time.monotonic() + 40
    while any(Path(f"/proc/{one}").exists() for one in children) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{one}").exists() for one in children)
    outcome = command("train", f"resume={path}", f"steps={state_of(path)['step'] + 2}", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr


def torchrun(*how: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *how]


@pytest.mark.slow
def test_torchrun_starts_the_processes_and_passes_signals_on(tmp_path):
    """With --signals-to-handle, SIGUSR1 too."""
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        folder = tmp_path / str(int(number))
        folder.mkdir()
        process, path = begun(folder, program=torchrun("--signals-to-handle", signals, "--shutdown-timeout", "60"))
        process.send_signal(number)
        process.wait(90)
        errors = (folder / "stderr.txt").read_text()
        assert f"stopped after update {state_of(path)['step']} of 100000, everything saved" in errors
    before = run_files(path)["last.pt"]
    done = subprocess.run(
        [*torchrun(), str(ROOT / "train.py"), "-m", *TINY, "seed=1,2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0 and "processes: a sweep starts its processes itself" in done.stderr
    assert run_files(path)["last.pt"] == before


@pytest.mark.slow
def test_two_nodes_that_see_one_folder(tmp_path):
    """Two agents of torchrun with a process each, as on two machines; then one machine goes on."""
    given = [*TINY, "batch_size=4", "log_every=1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            + ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            + [str(ROOT / "train.py"), *given, "steps=4"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    for agent in agents:
        errors = agent.communicate(timeout=120)[1]
        assert agent.returncode == 0, errors
    (path,) = (tmp_path / "outputs" / "python_docs").iterdir()
    assert [row["step"] for row in tracking.read_metrics(path / "metrics.jsonl") if "train/nll" in row] == [1, 2, 3, 4]
    outcome = command("train", f"resume={path}", "steps=6", cwd=tmp_path)
    assert outcome.status == 0 and "resume: processes: 2, now 1" in outcome.stderr, outcome.stderr


@pytest.mark.slow
def test_max_restarts_of_torchrun_go_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    process, path = begun(tmp_path, program=torchrun("--max-restarts", "2"))
    step, children = state_of(path)["step"], []
    for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"train.py" in Path(f"/proc/{one}/cmdline").read_bytes():
            children.append(int(one))
    os.kill(children[-1], signal.SIGKILL)
    until = time.monotonic() + 100
    while time.monotonic() < until and process.poll() is None:
        if state_of(path)["step"] > step + 20:
            break
        time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    assert state_of(path)["step"] > step + 20, (tmp_path / "stderr.txt").read_text()


@pytest.mark.slow
def test_a_sweep_on_two_processes(tmp_path):
    cut = [override for override in TINY if not override.startswith("steps")]
    outcome = command("train", "-m", "seed=1,2", "steps=2", "processes=2", *cut, cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    runs = list((tmp_path / "outputs" / "python_docs").iterdir())
    assert len(runs) == 2 and all((run / "result.json").exists() for run in runs)


def test_one_process_is_asked_nothing():
    assert ranks.ALONE.agree(3, 4.5) == [3, 4.5] and ranks.ALONE.main and ranks.ALONE.share(7) == slice(0, 7)
