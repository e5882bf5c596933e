"""Checkpoints and run folders that are broken, missing, or a stranger's: nothing of them is believed, or run."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, finished, in_process, mostly_slow, refused, run_files, small_state, state_of, text_data

from txl import archive


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


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_last_state_that_a_killed_process_did_not_name_gets_its_name(renamed):
    """Killed after some of the three renames of its save; no update is left that would save another."""
    path = finished("run", "save_every=1", "keep_last=3")
    expected = {file.name: file.read_bytes() for file in path.glob("*.pt")}
    assert sorted(expected) == ["best.pt", "last.1.pt", "last.2.pt", "last.pt"]
    (path / "last.pt").rename(path / "last.next.pt")
    for younger, older in [("last.pt", "last.1.pt"), ("last.1.pt", "last.2.pt")][: 2 - renamed]:
        (path / older).rename(path / younger)
    (path / "result.json").unlink()
    outcome = in_process("train", "name=run", "save_every=1", "keep_last=3", *TINY)
    assert outcome.status == 0 and "/last.pt" in outcome.stderr
    assert {file.name: file.read_bytes() for file in path.glob("*.pt")} == expected


def test_a_file_without_a_digest_or_with_that_of_another_is_refused():
    archive.write(Path("a.pt"), small_state(1))
    archive.write(Path("b.pt"), small_state(2))
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
    mostly_slow(
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
        fast=2,
    ),
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
