"""What may happen to a run, each by its name: it goes on as if nothing had, or says in a line what to do. More of it: make soak."""

import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, in_process, refused, run_files, text_data
from test_training import constant, make_run, small_lanes

import train
from txl import archive, checkpoint, ranks, resuming, runtime, saver, tracking, training
from txl.training import Diverged, updates


@pytest.mark.parametrize(
    ("part", "trials"),
    [("kills", 10), ("points", 1000), ("steps", 4), ("stops", 3), ("damage", 500), ("retention", 60)],
)
def test_soak(part, trials, tmp_path):
    """A fast share of `make soak`: random kills, every point of a save, stops at chosen updates and random moments, damage."""
    program = [sys.executable, str(ROOT / "tests" / "soak.py"), part, str(trials)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith(f"{part}: ")


@pytest.mark.slow
@pytest.mark.parametrize(("part", "trials"), [("steps", 12), ("chain", 1), ("repeats", 2)])
def test_soak_longer(part, trials, tmp_path):
    test_soak(part, trials, tmp_path)


def finished(name: str = "run", *overrides: str) -> Path:
    outcome = in_process("train", f"name={name}", *TINY, *overrides)
    assert outcome.status == 0, outcome.stderr
    return next(Path("outputs", name).iterdir())


# The disk


def content(step: int = 1) -> dict:
    return {"model": {"weight": torch.full((100, 10), float(step))}, "run": {}, "step": step}


def test_disk_full_during_a_save(monkeypatch):
    """The words name the room, the old files stay, nothing is left beside; once there is room again a save succeeds."""
    monkeypatch.setattr(archive, "PAUSE", 0)
    writer = saver.Saver(Path("."), keep=2)
    writer.save(content(1), best=True)
    writer.wait()
    before = {name: Path(name).read_bytes() for name in os.listdir()}
    real = archive._Hashing.write
    for room in (0, 1, 3000):

        def full(self, data, room=room):
            if self.size + len(data) > room:
                self.error = self.error or OSError(errno.ENOSPC, "No space left on device")
                raise self.error
            return real(self, data)

        monkeypatch.setattr(archive._Hashing, "write", full)
        writer.save(content(2), best=True)
        with pytest.raises(
            OSError, match=r"^name: .*last.next.pt|best.next.pt cannot be written: it takes about 4,000 bytes"
        ):
            writer.wait()
        assert {name: Path(name).read_bytes() for name in os.listdir()} == before
    monkeypatch.setattr(archive._Hashing, "write", real)
    writer.save(content(3), best=True)
    writer.wait()
    assert archive.read(Path("last.pt"))["step"] == 3 and archive.read(Path("last.1.pt"))["step"] == 1


def test_an_error_of_the_writing_thread_stops_the_run_with_its_message(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "write_whole", full)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "Traceback" not in outcome.stderr
    assert re.search(r"^name: .*\.pt cannot be written: it takes about [\d,]+ bytes, .*No space", outcome.stderr, re.M)


def test_a_transient_error_of_a_sync_is_outlived(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)
    real, failures = os.fsync, [1]

    def failing(descriptor):
        if failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    archive.write(Path("a.pt"), content())
    assert archive.read(Path("a.pt"))["step"] == 1 and os.listdir() == ["a.pt"]
    failures.extend([1] * archive.ATTEMPTS)
    with pytest.raises(OSError, match=r"a\.pt cannot be written: .*Input/output error"):
        archive.write(Path("a.pt"), content(2))
    assert archive.read(Path("a.pt"))["step"] == 1 and os.listdir() == ["a.pt"]


def test_disk_full_for_the_log(capsys, monkeypatch):
    """Training goes on with one warning; the lines are kept and written once there is room."""
    metrics = tracking.Metrics(Path("metrics.jsonl"), step=0)
    metrics.log({"step": 1, "tokens": 1})
    real = metrics._file

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, data):
            return real.write(data[: len(data) // 2])

    metrics._file = Full()
    metrics.log({"step": 2, "tokens": 2})
    metrics.log({"step": 3, "tokens": 3})
    assert Path("metrics.jsonl").read_text() == '{"step": 1, "tokens": 1}\n'
    metrics._file = real
    metrics.log({"step": 4, "tokens": 4})
    metrics.close()
    assert [row["step"] for row in tracking.read_metrics(Path("metrics.jsonl"))] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("training goes on") == 1


def test_a_folder_that_vanishes_ends_the_run_in_a_line(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)
    real = training.updates

    def vanishing(*arguments, **settings):
        for update in real(*arguments, **settings):
            if update.step == 2:
                shutil.rmtree("outputs")
            yield update

    monkeypatch.setattr(training, "updates", vanishing)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "Traceback" not in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("name: ") and "is gone" in outcome.stderr


# Checkpoints that are broken, missing, or a stranger's


def test_a_broken_newest_checkpoint_is_set_aside_and_the_one_before_is_used():
    path = finished()
    expected = archive.read(path / "last.pt")
    (path / "result.json").unlink()
    damaged = bytearray((path / "last.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (path / "last.pt").write_bytes(damaged)
    outcome = in_process("train", "name=run", *TINY)
    assert outcome.status == 0
    assert outcome.stderr.count("warning: resume:") == 1 and "set aside as last.pt.broken" in outcome.stderr
    assert (path / "last.pt.broken").read_bytes() == bytes(damaged)
    again = archive.read(path / "last.pt")
    assert all(torch.equal(again["model"][name], one) for name, one in expected["model"].items())
    assert archive.read(path / "last.1.pt")["step"] == 3  # what was good was not pushed out by what was not


@pytest.mark.parametrize("present", [[], ["result.json"]])
def test_a_run_without_a_checkpoint_is_never_begun_anew_by_resume(present):
    path = finished()
    for file in path.glob("*.pt"):
        file.unlink()
    if not present:
        (path / "result.json").unlink()
    assert "holds no checkpoint to go on from" in refused(in_process("train", f"resume={path}", "steps=8"), "resume")


def test_explicit_files_that_are_missing_or_broken_are_never_passed_over():
    path = finished()
    (path / "best.pt").write_bytes(b"broken")
    refused(in_process("train", f"init_from={path / 'last.2.pt'}", "name=new", *TINY), "init_from")
    refused(in_process("train", f"init_from={path}", "name=new", *TINY), "init_from")
    refused(in_process("evaluate", f"checkpoint={path}"), "checkpoint")
    assert not Path("outputs/new").exists()


def test_what_a_killed_process_left_half_written_is_cleared_away_by_the_next():
    path = finished()
    (path / "result.json").unlink()
    for name in (".last.next.pt-abc", ".config.yaml-x1", ".vocab.json-q"):
        (path / name).write_bytes(b"half")
    (path / "best.next.pt").write_bytes((path / "last.pt").read_bytes()[:900])
    (path / "mine.pt").write_bytes(b"foreign")
    assert in_process("train", "name=run", *TINY).status == 0
    assert not list(path.glob(".*-*")) and not (path / "best.next.pt").exists()
    assert (path / "mine.pt").read_bytes() == b"foreign"


def test_a_file_without_a_digest_or_with_that_of_another_is_refused():
    archive.write(Path("a.pt"), content(1))
    archive.write(Path("b.pt"), content(2))
    a, b = Path("a.pt").read_bytes(), Path("b.pt").read_bytes()
    for damaged in (a[: -archive.TRAILER], a[: -archive.TRAILER] + b[-archive.TRAILER :]):
        Path("c.pt").write_bytes(damaged)
        with pytest.raises(archive.Damaged, match="checksum"):
            archive.read(Path("c.pt"))
    assert torch.load("a.pt", weights_only=True)["step"] == 1  # torch alone reads it too


class Bomb:
    def __reduce__(self):
        return os.system, ("touch executed",)


def with_digest(raw: bytes) -> bytes:
    import hashlib

    return raw + archive.MARK + hashlib.sha256(raw).hexdigest().encode() + b"\n"


def crafted() -> dict[str, bytes]:
    """Files with a good digest that a stranger could make."""
    import io
    import pickle
    import zipfile

    def saved(value, **how) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer, **how)
        return buffer.getvalue()

    def zipped(*records, compression=zipfile.ZIP_STORED) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as file:
            for name, data in records:
                file.writestr(name, data)
        return buffer.getvalue()

    indices = torch.tensor([[0], [0]])
    return {
        "reduce": saved({"format": Bomb()}),
        "legacy": saved({"format": Bomb()}, _use_new_zipfile_serialization=False),
        "plain pickle": pickle.dumps({"format": Bomb()}),
        "legacy tensors": saved({"a": torch.zeros(3)}, _use_new_zipfile_serialization=False),
        "sparse": saved({"a": torch.sparse_coo_tensor(indices, torch.ones(1), (10**9, 10**9))}),
        "meta": saved({"a": torch.empty(10**12, device="meta")}),
        "packed": zipped(("a/data.pkl", b"\x80\x02}."), ("a/data/0", bytes(10**7)), compression=zipfile.ZIP_DEFLATED),
        "two pickles": zipped(("a/data.pkl", b"\x80\x02}."), ("b/data.pkl", b"\x80\x02}.")),
        "script": zipped(("a/data.pkl", b"\x80\x02}."), ("a/constants.pkl", b"\x80\x02}.")),
        "bytearray": zipped(("a/data.pkl", b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x10\x00\x85R.")),
    }


@pytest.mark.parametrize("kind", list(crafted()))
def test_a_crafted_file_runs_nothing_and_is_refused_before_torch_sees_it(kind, monkeypatch):
    """Also where the environment asks torch to load anything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    Path("a.pt").write_bytes(with_digest(crafted()[kind]))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch saw it"))
    line = refused(in_process("evaluate", "checkpoint=a.pt"), "checkpoint")
    assert "is damaged or no checkpoint" in line and not Path("executed").exists()


def state_of(path: Path) -> dict:
    return torch.load(path / "last.pt", weights_only=True)


def set_in(value: dict, where: str, new) -> dict:
    *way, last = where.split("/")
    inner = value
    for key in way:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = new
    return value


GIANT = torch.zeros(1).expand(10**12)
LAYER = "layers.0.feedforward_norm.bias"


@pytest.mark.parametrize(
    ("where", "new"),
    [
        (f"model/{LAYER}", torch.zeros(17)),
        (f"model/{LAYER}", torch.zeros(16, dtype=torch.float64)),
        (f"model/{LAYER}", GIANT),
        (f"model/{LAYER}", torch.full((16,), math.nan)),
        ("model/extra", torch.zeros(1)),
        (f"run/optimizer/state/{LAYER}/exp_avg", torch.zeros(3)),
        (f"run/optimizer/state/{LAYER}/exp_avg", GIANT),
        ("run/optimizer/state/other", {}),
        ("run/optimizer/param_groups/0/params", ["other"]),
        ("run/optimizer", None),
        ("run/mems", [torch.zeros(2, 16, 16)]),
        ("run/mems/0", torch.zeros(3, 16, 16)),
        ("run/mems/0", torch.zeros(2, 16, 16, dtype=torch.int64)),
        ("run/mems/0", GIANT),
        ("run/mems/0", 5),
        ("run/rng", []),
        ("run/rng/0/cpu", torch.zeros(3, dtype=torch.uint8)),
        ("run/rng/0", 5),
        ("run/lanes/position", 10**9),
        ("run/lanes/epoch", "x"),
        ("run/lanes", None),
        ("run/step", "3"),
        ("run/valid_nll", ["x"]),
        ("run/scaler", 5),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_copied(where, new, trained_run, tmp_path, monkeypatch):
    path = shutil.copytree(trained_run, tmp_path / "copy")
    raw = set_in(state_of(path), where, new)
    for name in ("last.pt", "last.1.pt"):
        archive.write(path / name, raw)
    before = run_files(path)
    outcome = in_process("train", f"resume={path}", "steps=8")
    if where == "run/rng" and new == []:  # as a process that the run did not have
        assert outcome.status == 0
        return
    if where == "run/scaler":  # not used without fp16
        assert outcome.status == 0
        return
    refused(outcome, "resume")
    assert run_files(path) == before


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "os.system", "command": "touch executed"},
        {"_target_": "torch.load", "f": "x", "weights_only": False},
        {"_target_": "numpy.load", "file": "x", "allow_pickle": True},
        {"_target_": "pandas.read_pickle", "filepath_or_buffer": "x"},
        {"_target_": "logging.os.system", "command": "touch executed"},
        {"_target_": "os.system", "_partial_": True},
        {"_target_": "hydra.utils.instantiate", "config": {"_target_": "os.system", "command": "touch executed"}},
        {"_target_": "txl.runtime.requeue"},
    ],
)
@pytest.mark.parametrize("where", ["model", "data", "model/memory", "data/vocab"])
def test_a_configuration_in_a_checkpoint_that_names_other_code_is_refused(node, where, trained_run):
    raw = state_of(trained_run)
    raw["config"] = json.dumps(set_in(json.loads(raw["config"]), where, node))
    archive.write(Path("a.pt"), raw)
    refused(in_process("evaluate", "checkpoint=a.pt"), "checkpoint")
    refused(in_process("generate", "checkpoint=a.pt"), "checkpoint")
    assert not Path("executed").exists()


def test_a_configuration_that_asks_the_environment_is_not_answered(trained_run, tmp_path, monkeypatch):
    """In a checkpoint, in a run's config.yaml, among its overrides: a stranger's folder learns nothing and starts nothing."""
    monkeypatch.setenv("SECRET", "7777")
    raw = state_of(trained_run)
    raw["config"] = json.dumps(set_in(json.loads(raw["config"]), "model/activation", "${oc.env:SECRET}"))
    archive.write(Path("a.pt"), raw)
    assert "7777" not in refused(in_process("evaluate", "checkpoint=a.pt"), "model.activation")
    for text in (
        "seed: ${oc.env:SECRET}\n",
        "a: &a [1, 2]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        "a: !!python/object:os.x {}\n",
    ):
        path = shutil.copytree(trained_run, tmp_path / "copy", dirs_exist_ok=True)
        (path / "config.yaml").write_text(text)
        assert "7777" not in refused(in_process("train", f"resume={path}", "steps=8"), "name")
    for override in (
        "seed=${oc.env:SECRET}",
        "++data._target_=os.system",
        "optimizer={_target_: os.system}",
        "hydra.x=1",
    ):
        path = shutil.copytree(trained_run, tmp_path / "copy", dirs_exist_ok=True)
        (path / "overrides.json").write_text(json.dumps([override]))
        line = refused(in_process("train", f"resume={path}", "steps=8"), "resume")
        assert "names code, or asks for a value from outside" in line and "7777" not in line
    outcome = in_process("train", f"resume={trained_run}", "seed=${oc.env:SECRET}")  # what is typed may
    assert "seed cannot change, 1 to 7777" in refused(outcome, "resume")


def test_no_code_of_ours_loads_without_weights_only():
    for file in (*(ROOT / "txl").rglob("*.py"), *ROOT.glob("*.py")):
        text = file.read_text()
        assert text.count("torch.load(") == text.count("weights_only=True, map_location"), file
        assert "weights_only=False" not in text and "pickle.load" not in text and "allow_pickle=True" not in text, file


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
        broken = content(2)
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


@pytest.mark.parametrize("phase", ["import", "data", "model", "validation", "save"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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


# The tracker


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


def test_one_process_is_asked_nothing():
    assert ranks.ALONE.agree(3, 4.5) == [3, 4.5] and ranks.ALONE.main and ranks.ALONE.share(7) == slice(0, 7)


def test_the_texts_and_the_vocabulary_are_known_by_their_content():
    """Other words of the same number, another byte: refused."""
    files = text_data(train=b"a b c d e\n" * 300, valid=b"a b c\n" * 30, test=b"a b c\n" * 30)
    words = [*files, "data/vocab=words", "data.vocab.file=words.txt"]
    Path("words.txt").write_text("a\nb\nc\nd\ne\n<eos>\n<unk>\n")
    given = [one for one in TINY if "data." not in one]
    assert in_process("train", "name=w", *words, *given).status == 0
    (path,) = Path("outputs/w").iterdir()
    Path("words.txt").write_text("b\na\nc\nd\ne\n<eos>\n<unk>\n")
    line = refused(in_process("train", f"resume={path}", "steps=8"), "resume")
    assert "another vocabulary" in line
    Path("words.txt").write_text("a\nb\nc\nd\ne\n<eos>\n<unk>\n")
    for text in (b"a b c d d\n" + b"a b c d e\n" * 299, b"a b c d e\n" * 301):
        Path("train.txt").write_bytes(text)
        line = refused(in_process("train", f"resume={path}", "steps=8"), "resume")
        assert "the text of data has changed" in line


def test_checkpoints_hold_weights_that_stand_in_two_places_once():
    shared = torch.zeros(1000)
    copy = saver.on_host({"a": shared, "b": shared, "c": [shared[:10]], "d": 3})
    assert copy["a"] is copy["b"] and copy["a"] is not shared
    assert copy["c"][0].untyped_storage().nbytes() == 40
    assert checkpoint.FORMAT.startswith("txl-")
