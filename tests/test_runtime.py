import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, command, in_process

from txl import checkpoint, runtime


def test_a_device_that_is_not_there_is_named():
    for name in ("cuda:99", "gpu", "mps:7"):
        with pytest.raises(ValueError, match=f"device: '{name}' is not to be had here"):
            runtime.choose_device(name)
    assert runtime.choose_device("cpu") == torch.device("cpu")
    assert runtime.choose_device("auto").type in ("cuda", "mps", "cpu")


def test_deterministic_refuses_what_depends_on_timing():
    runtime.set_seed(3, deterministic=True)
    first = torch.rand(3)
    assert torch.are_deterministic_algorithms_enabled()
    runtime.set_seed(3, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(3), first)


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    program = "import sys, txl.runtime, pathlib\nwith txl.runtime.locked(pathlib.Path('.')):\n print('in', flush=True)\n sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"in\n"
    with pytest.raises(ValueError, match=f"name: .* is in use by process {holder.pid} on "), runtime.locked(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with runtime.locked(tmp_path):
        pass


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_saves_and_exits_with_its_status(number, status, monkeypatch):
    """Then the same command goes on from there."""
    from txl import training

    real = training.updates

    def signalled(*arguments, **settings):
        for update in real(*arguments, **settings):
            if update.step == 4:
                os.kill(os.getpid(), getattr(signal, number))
            yield update

    monkeypatch.setattr(training, "updates", signalled)
    outcome = in_process("train", *TINY, "steps=8", "save_every=100")
    assert outcome.status == status
    assert outcome.stderr.splitlines()[-1].startswith(
        "stopped after update 4 of 8, everything saved in outputs/python_docs/"
    )
    (path,) = Path("outputs/python_docs").iterdir()
    assert checkpoint.load(path / "last.pt")["step"] == 4 and (path / "curves.png").exists()
    monkeypatch.setattr(training, "updates", real)
    again = in_process("train", *TINY, "steps=8", "save_every=100")
    assert again.status == 0 and "step 4/8" not in again.stderr and "step 6/8" in again.stderr


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_during_the_final_figures_loses_nothing(number, status, monkeypatch):
    from txl import figures

    def signalled(*_):
        os.kill(os.getpid(), getattr(signal, number))
        pytest.fail("went on")

    real = figures.write_sample
    monkeypatch.setattr(figures, "write_sample", signalled)
    outcome = in_process("train", *TINY)
    assert outcome.status == status and "stopped after update 6 of 6, everything saved" in outcome.stderr
    monkeypatch.setattr(figures, "write_sample", real)
    again = in_process("train", *TINY)
    assert again.status == 0 and b"bits per byte" in again.stdout and "step" not in again.stderr


def test_profile_writes_where_the_time_goes():
    outcome = in_process("train", *TINY, "profile=2")
    assert outcome.status == 0, outcome.stderr
    (path,) = Path("outputs/python_docs").iterdir()
    assert (
        "Self CPU time total" in (path / "profile.txt").read_text()
    )  # the thirty dearest operators, whichever they are
    assert "aten::baddbmm" in (path / "profile.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["model.same_length=true", "model.pre_norm=true"]])
def test_compile_trains_to_the_same_figures(options, tmp_path):
    """To rounding: another order of the same additions. In processes of their own, since compiled code stays behind."""
    import json

    figures = []
    for flag in ("true", "false"):
        outcome = command("train", f"name=compile_{flag}", f"compile={flag}", *TINY, *options, cwd=tmp_path)
        assert outcome.status == 0, outcome.stderr
        (path,) = (tmp_path / "outputs" / f"compile_{flag}").iterdir()
        figures.append(json.loads((path / "result.json").read_text())["test"]["nll"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert figures[0] != figures[1]


@pytest.mark.slow
def test_compile_leaves_the_adaptive_layers_alone(tmp_path):
    """Their sizes change with every batch: compiled, they would be compiled anew each time."""
    import json

    options = ["model/softmax=adaptive", "model.softmax.cutoffs=[40,80,120]", "data.max_bytes=6000", "steps=20"]
    borders = ["data=text", "data.train=t.txt", "data.document_separator=\\n", "data.reset_at_document=true"]
    (tmp_path / "t.txt").write_bytes(b"".join(b"line %d of many\n" % number for number in range(400)))
    small = [one for one in TINY if not one.startswith(("steps", "data."))]
    figures = []
    for flag in ("true", "false"):
        arguments = [f"name=compile_{flag}", f"compile={flag}", *small, *options, *borders]
        outcome = command("train", *arguments, cwd=tmp_path, TORCH_LOGS="recompiles")
        assert outcome.status == 0, outcome.stderr
        assert "softmax.py" not in outcome.stderr
        (path,) = (tmp_path / "outputs" / f"compile_{flag}").iterdir()
        figures.append(json.loads((path / "result.json").read_text())["test"]["nll"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
