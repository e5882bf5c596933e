"""train.py as a user meets it: what it prints and writes, and how it ends when something is wrong."""

import json
import os
from pathlib import Path

import pytest
from conftest import TINY, command, in_process, refused, text_data

from txl import checkpoint


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+model.d_modl=3", "model.d_modl"),
        ("+stesp=3", "stesp"),
        ("+model.memory.lengths=3", "model.memory.lengths"),
        ("model.n_layer=two", "model.n_layer"),
        ("steps=1.5", "steps"),
        ("steps=null", "steps"),
        ("model.pre_norm=maybe", "model.pre_norm"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("data.fractions=half", "data.fractions"),
        ("model.memory.mem_len=0", "model.memory.mem_len"),
        ("model.memory.mem_len=-1", "model.memory.mem_len"),
        ("model.d_model=33", "model.d_model"),
        ("model.n_token=255", "model.n_token"),
        ("batch_size=0", "batch_size"),
        ("device=cuda:77", "device"),
        ("device=meta", "device"),
        ("schedule.warmup=-1", "schedule.warmup"),
        ("schedule.lr_min=1", "schedule.lr_min"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.eps=-1", "optimizer"),
        ("+schedule.steps=3", "schedule.steps"),
        ("+optimizer.params=[1]", "optimizer.params"),
        ("model.d_model=100000000000", "model.d_model"),
        ("model.memory.mem_len=99999999999", "model.memory.mem_len"),
        ("model.init_std=-1", "model.init_std"),
        ("cache_dir=", "cache_dir"),
        ("~optimizer.lr", "optimizer.lr"),
        ("~model._target_", "model._target_"),
        ("++data.vocab.characters=ba", "data.vocab.characters"),
        ("name=a/b", "name"),
        ("resume=nowhere", "resume"),
        ("init_from=nowhere", "init_from"),
    ],
)
def test_train_refuses_a_bad_value_and_writes_nothing(override, key):
    given = [one for one in TINY if one.split("=")[0] != override.split("=")[0]]
    refused(in_process("train", *given, override), key)
    assert os.listdir() == []


def test_mem_len_zero_points_to_no_memory():
    line = refused(in_process("train", "model.memory.mem_len=0"), "model.memory.mem_len")
    assert "model/memory=none" in line


def test_train_refuses_an_unknown_key_in_yaml(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nsteps: 3\nmodel:\n  d_modle: 4\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    outcome = in_process("train", "--config-dir", "conf", "experiment=mine", *TINY)
    assert "did you mean 'd_model'?" in refused(outcome, "model.d_modle")
    assert os.listdir() == ["conf"]


def test_train_refuses_an_unknown_key_on_the_command_line():
    """Hydra sees this one before we do, and says it in its own words."""
    for override in ("model.d_modl=3", "stesp=3", "modle=small", "model=smal", "experiment=python_sorce", "debug=smok"):
        outcome = in_process("train", override)
        assert outcome.status == 1 and outcome.stdout == b""
        assert override.split("=")[0] in outcome.stderr and "Traceback" not in outcome.stderr
        assert len(outcome.stderr.splitlines()) <= 10


GOOD = b"to be or not to be, that is the question " * 20


@pytest.mark.parametrize(
    ("files", "key", "words"),
    [
        ({"train": None, "valid": GOOD, "test": GOOD}, "data.train", "No such file"),
        ({"train": GOOD, "valid": None, "test": GOOD}, "data.valid", "No such file"),
        ({"train": b"", "valid": GOOD, "test": GOOD}, "data.train", "is empty"),
        ({"train": GOOD, "valid": GOOD, "test": b""}, "data.test", "is empty"),
        ({"train": GOOD[:32], "valid": GOOD, "test": GOOD}, "data.train", "32 tokens are too few"),
        ({"train": GOOD, "valid": b"x", "test": GOOD}, "data.valid", "too short"),
        ({"train": GOOD, "valid": GOOD, "test": b"x"}, "data.test", "too short"),
        ({"train": GOOD, "valid": GOOD}, "data.test", "no file given"),
        ({"valid": GOOD}, "data.train", "no file given"),
        ({"train": GOOD[:10]}, "data.valid", "the text is empty"),
    ],
)
def test_train_refuses_files_that_are_missing_empty_or_too_short(files, key, words):
    arguments = [override for override in TINY if "data." not in override]
    outcome = in_process("train", *text_data(**files), *arguments)
    assert words in refused(outcome, key)
    assert not Path("outputs").exists()


def test_train_refuses_a_file_that_cannot_be_read():
    Path("folder.txt").mkdir()
    outcome = in_process("train", "data=text", "data.train=folder.txt")
    assert "cannot read" in refused(outcome, "data.train")


def test_train_refuses_a_pipe_instead_of_waiting_for_it():
    os.mkfifo("pipe")
    assert "not a regular file" in refused(in_process("train", "data=text", "data.train=pipe"), "data.train")


def test_train_refuses_a_folder_and_files_at_once():
    line = refused(in_process("train", "data=text", "data.path=.", "data.train=a.txt"), "data.path")
    assert "not both" in line


def test_train_refuses_a_folder_that_cannot_be_written():
    Path("outputs").write_text("in the way")
    refused(in_process("train", *TINY), "name")
    assert Path("outputs").read_text() == "in the way"


def test_train_refuses_a_cache_that_cannot_be_written():
    Path("cache").write_text("in the way")
    refused(in_process("train", *TINY, "cache_dir=cache/deep"), "cache_dir")
    assert os.listdir() == ["cache"]


def test_train_refuses_a_folder_with_another_configuration(monkeypatch):
    """The slug says what was typed; where a default has changed since, the folder must not be mixed up."""
    assert in_process("train", "name=mine", *TINY).status == 0
    (path,) = Path("outputs/mine").iterdir()
    stored = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(stored.replace("dropout: 0.0", "dropout: 0.25"))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    line = refused(in_process("train", "name=mine", *TINY), "name")
    assert "model.dropout: 0.25, now 0.0" in line and f"resume={path}" in line
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_non_finite_loss_ends_in_one_line_and_keeps_the_last_checkpoint():
    outcome = in_process("train", *TINY, "optimizer=sgd", "optimizer.lr=1e30", "clip=null", "save_every=1")
    assert outcome.status == 1
    assert outcome.stderr.splitlines()[-1].startswith("optimizer.lr: at update ")
    (path,) = Path("outputs/python_docs").iterdir()
    content = checkpoint.load(path / "last.pt")
    assert all(tensor.isfinite().all() for tensor in content["model"].values())


def test_train_as_a_command(tmp_path):
    """One real run, cut short, and one mistake."""
    outcome = command("train", *TINY, cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    (run,) = (tmp_path / "outputs" / "python_docs").iterdir()
    text = outcome.stdout.decode()
    assert "bits per byte" in text and "valid" in text and "test" in text
    assert f"run: {run.relative_to(tmp_path)}" in text and "sample, going on" in text
    assert "step 6/6  train nll" in outcome.stderr and "Traceback" not in outcome.stderr
    refused(command("train", "+stesp=3", cwd=tmp_path), "stesp")
    hydra = command("train", "stesp=3", cwd=tmp_path)
    assert hydra.status == 1 and "stesp" in hydra.stderr and len(hydra.stderr.splitlines()) <= 10
    assert os.listdir(tmp_path) == ["outputs"]
    full = command("train", "+stesp=3", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert full.status == 1 and "Traceback" in full.stderr


def test_help_and_cfg_are_readable(tmp_path):
    for entry, key in {"train": "eval_every: 200", "evaluate": "clamp_len: trained", "generate": "top_p: null"}.items():
        shown = command(entry, "--help", cwd=tmp_path)
        assert shown.status == 0 and shown.stderr == ""
        assert "Transformer-XL" in shown.stdout.decode() and key in shown.stdout.decode()
    config = command("train", "--cfg", "job", "model.n_layer=7", cwd=tmp_path).stdout.decode()
    assert "  n_layer: 7\n" in config
    assert os.listdir(tmp_path) == []


def test_a_sweep_runs_every_point_and_survives_a_bad_one(tmp_path):
    cut = [override for override in TINY if not override.startswith(("model.n_layer", "steps"))]
    outcome = command("train", "-m", "model.n_layer=1,0,2", "seed=1,2", "steps=2", *cut, cwd=tmp_path)
    runs = list((tmp_path / "outputs" / "python_docs").iterdir())
    runs, failed = ([run for run in runs if (run / name).exists()] for name in ("result.json", "error.txt"))
    assert len(runs) == 4 and len(failed) == 2
    assert outcome.status == 1 and "model.n_layer: must be at least 1 and below 2^31, got 0" in outcome.stderr
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [".sweep", "python_docs"]
    figures = {json.loads((run / "result.json").read_text())["valid"]["nll"] for run in runs}
    assert len(figures) == 4


def test_smoke_runs_in_seconds():
    outcome = in_process("train", "debug=smoke")
    assert outcome.status == 0, outcome.stderr


def test_overfit_learns_its_few_bytes_by_heart():
    assert in_process("train", "debug=overfit").status == 0
    (run,) = Path("outputs/overfit").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/nll"] for row in rows if "train/nll" in row][-1] < 0.1


def test_yaml_that_cannot_be_read_is_told_in_a_line(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for text in ("a: [1, 2\n", "a: 1\na: 2\n", "\t- x: y: z\n"):
        (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
        outcome = in_process("train", "--config-dir", "conf", "experiment=mine")
        assert outcome.status == 1 and "mine.yaml" in outcome.stderr and "Traceback" not in outcome.stderr
        assert len(outcome.stderr.splitlines()) <= 10
