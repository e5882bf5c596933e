"""evaluate.py as a user meets it; and what is wrong with a checkpoint, for both programs that take one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, characters_run, command, in_process, refused

from txl import archive, checkpoint


def test_evaluate_gives_the_figure_of_the_run_from_anywhere(trained_run):
    expected = json.loads((trained_run / "result.json").read_text())
    for split in ("valid", "test"):
        outcome = in_process("evaluate", f"checkpoint={trained_run}", f"split={split}", f"out={split}.json")
        assert outcome.status == 0, outcome.stderr
        (line,) = outcome.stdout.decode().splitlines()
        assert json.loads(line) == expected[split] == json.loads(Path(f"{split}.json").read_text())
        assert "bits per byte" in outcome.stderr and "warning" not in outcome.stderr
    assert sorted(os.listdir()) == ["test.json", "valid.json"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "test-default.json"),
        (["mem_len=null"], "test-mem_len-null.json"),
        (["mem_len=64", "clamp_len=20", "same_length=true"], "test-clamp_len-20_mem_len-64_same_length-true.json"),
        (["tgt_len=5", "batch_size=3", "split=valid"], "valid-batch_size-3_tgt_len-5.json"),
    ],
)
def test_evaluate_reads_with_other_settings_and_writes_beside_the_run(settings, name, trained_run, tmp_path):
    run = tmp_path / "moved"
    run.mkdir()
    (run / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    outcome = in_process("evaluate", f"checkpoint={run}", *settings)
    assert outcome.status == 0, outcome.stderr
    figure = json.loads((run / "evaluate" / name).read_text())
    assert figure == json.loads(outcome.stdout)
    given = dict(setting.split("=") for setting in settings)
    for key, value in given.items():
        assert figure[key] == (value if key == "split" else json.loads(value))
    assert figure["tokens"] == 999


def test_evaluate_scores_another_text(trained_run):
    text = bytes(range(256))
    Path("other.txt").write_bytes(text)
    outcome = in_process("evaluate", f"checkpoint={trained_run}", "data.test=other.txt", "out=o.json")
    figure = json.loads(outcome.stdout)
    assert (figure["tokens"], figure["bytes"]) == (255, 255)
    content = checkpoint.load(trained_run / "best.pt")
    model, tokens = checkpoint.load_model(content), torch.arange(256)[None]
    total, mems = 0.0, None
    for start in range(0, 255, 16):
        stop = min(start + 16, 255)
        nll, mems = model(tokens[:, start:stop], mems, tokens[:, start + 1 : stop + 1])
        total += nll.double().sum().item()
    assert figure["nll"] == pytest.approx(total / 255, rel=1e-6)
    whole = in_process("evaluate", f"checkpoint={trained_run}", "split=train", "data.train=other.txt", "out=o.json")
    assert json.loads(whole.stdout)["nll"] == figure["nll"]
    line = refused(in_process("evaluate", f"checkpoint={trained_run}", "data.train=other.txt"), "data.test")
    assert "split=train" in line
    cut = ["data.train=other.txt", "data.fractions=[0.5,0.3,0.2]"]
    assert json.loads(in_process("evaluate", f"checkpoint={trained_run}", "out=o.json", *cut).stdout)["tokens"] == 51
    short = in_process("evaluate", f"checkpoint={trained_run}", "data.max_bytes=2000", "out=o.json")
    assert json.loads(short.stdout)["tokens"] == 99


def test_evaluate_says_when_the_text_is_no_longer_the_runs(trained_run, monkeypatch):
    import pydoc_data.topics

    topics = dict(pydoc_data.topics.topics)
    topics["a"] = "something new"
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)
    outcome = in_process("evaluate", f"checkpoint={trained_run}", "out=o.json")
    assert outcome.status == 0 and "warning: the text of split=test" in outcome.stderr


def test_characters_train_evaluate_and_generate(tmp_path, monkeypatch):
    run = characters_run(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    figure = json.loads(in_process("evaluate", f"checkpoint={run}").stdout)
    assert figure == json.loads((run / "result.json").read_text())["test"]
    Path("new.txt").write_bytes("abcé\n".encode())
    other = in_process("evaluate", f"checkpoint={run}", "data.test=new.txt", "out=o.json")
    assert (json.loads(other.stdout)["tokens"], json.loads(other.stdout)["bytes"]) == (4, 5)
    text = in_process("generate", f"checkpoint={run}", "prompt=ab", "max_new_tokens=20").stdout
    assert set(text.decode()) <= set("abc \n\ufffd") and len(text.decode()) == 21


def test_evaluate_refuses_a_file_that_is_not_given(tmp_path):
    run = characters_run(tmp_path)
    Path("test.txt").unlink()
    assert "No such file" in refused(in_process("evaluate", f"checkpoint={run}"), "data.test")
    assert in_process("evaluate", f"checkpoint={run}", "split=valid").status == 0


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_that_is_missing_truncated_or_not_ours_is_refused(entry, trained_run):
    whole = (trained_run / "best.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    Path("text.pt").write_text("not a checkpoint")
    torch.save({"model": torch.zeros(2)}, "other.pt")
    Path("folder").mkdir()
    for name in ("cut.pt", "text.pt", "other.pt", "folder", "missing.pt"):
        assert name in refused(in_process(entry, f"checkpoint={name}"), "checkpoint")


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_must_be_given(entry):
    assert "a value must be given" in refused(in_process(entry), "checkpoint")


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_whose_vocabulary_is_another_is_refused(entry, trained_run):
    content = torch.load(trained_run / "best.pt", weights_only=True)
    many = "".join(map(chr, range(300)))
    archive.write(Path("swapped.pt"), {**content, "vocab": json.dumps({"kind": "characters", "characters": many})})
    refused(in_process(entry, "checkpoint=swapped.pt"), "checkpoint")
    archive.write(Path("unknown.pt"), {**content, "vocab": json.dumps({"kind": "words"})})
    refused(in_process(entry, "checkpoint=unknown.pt"), "checkpoint")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("mem_len=0", "mem_len"),
        ("tgt_len=0", "tgt_len"),
        ("clamp_len=-1", "clamp_len"),
        ("batch_size=0", "batch_size"),
        ("same_length=2", "same_length"),
        ("split=dev", "split"),
        ("data.test=missing.txt", "data.test"),
        ("+data.tset=missing.txt", "data.tset"),
        ("out=file/below.json", "out"),
    ],
)
def test_evaluate_refuses_a_bad_value(override, key, trained_run):
    Path("file").touch()
    outcome = in_process("evaluate", f"checkpoint={trained_run}", override)
    refused(outcome, key)


def test_evaluate_as_a_command(trained_run, tmp_path):
    outcome = command("evaluate", f"checkpoint={trained_run}", "out=o.json", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    expected = json.loads((trained_run / "result.json").read_text())["test"]["nll"]
    assert json.loads(outcome.stdout)["nll"] == pytest.approx(expected)
    refused(command("evaluate", "checkpoint=nowhere", cwd=tmp_path), "checkpoint")


def test_closed_streams_are_no_reason_to_fail(trained_run, tmp_path):
    for entry in ("evaluate", "generate"):
        line = f'"{sys.executable}" "{ROOT / entry}.py" checkpoint="{trained_run}" '
        line += "out=o.json" if entry == "evaluate" else "max_new_tokens=3"
        done = subprocess.run(f"{line} >&- <&-", shell=True, cwd=tmp_path, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_compiled_evaluation_gives_the_same_figure(trained_run, tmp_path):
    figures = []
    for flag in ("true", "false"):
        outcome = command("evaluate", f"checkpoint={trained_run}", f"compile={flag}", "out=o.json", cwd=tmp_path)
        assert outcome.status == 0, outcome.stderr
        figures.append(json.loads(outcome.stdout)["nll"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
