import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, run_files, text_data

from txl import checkpoint, runs


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "default"),
        (["steps=10"], "steps-10"),
        (["model.n_layer=2", "batch_size=4"], "batch_size-4_model.n_layer-2"),
        (["batch_size=4", "model.n_layer=2"], "batch_size-4_model.n_layer-2"),
        (["name=x", "device=cpu", "log_every=1", "save_every=2", "resume=r", "cache_dir=c"], "default"),
        (["tracker=wandb", "tracker.mode=online", "+tracker.tags=[a]", "max_minutes=1", "processes=2"], "default"),
        (["optimizer=adamw", "tracker=wandb"], "optimizer-adamw"),
        (["+experiment=a.b"], "+experiment-a.b"),
    ],
)
def test_slugs(overrides, expected):
    assert runs.slug(overrides) == expected


@pytest.mark.parametrize(
    "override", ["data.train=/a/b.txt", "optimizer.betas=[0.9,0.95]", "model/memory=none", "x=a=b"]
)
def test_a_slug_that_loses_characters_ends_in_a_hash(override):
    slug = runs.slug([override])
    assert re.fullmatch(r"[A-Za-z0-9._+-]+-[0-9a-f]{8}", slug)
    assert slug != runs.slug([override.replace("/", "-").replace(",", "-")]) or "/" not in override
    assert runs.slug([override]) == slug


def test_a_long_slug_is_cut_and_told_apart():
    many = [f"model.key{index}={index}" for index in range(40)]
    assert len(runs.slug(many)) <= 110
    assert runs.slug(many) != runs.slug([*many[:-1], "model.key39=40"])


def test_a_run_folder_holds_what_the_contract_says(trained_run):
    names = {file.name for file in trained_run.iterdir()}
    assert names == {
        *("config.yaml", "overrides.json", "metrics.jsonl", "last.pt", "last.1.pt", "best.pt", "result.json"),
        *("curves.png", "sample.txt", "vocab.json", ".lock"),
    }
    result = json.loads((trained_run / "result.json").read_text())
    assert set(result) == {"valid", "test", "step", "tokens_seen", "seconds", "parameters", "corpus", "vocabulary"}
    for split in ("valid", "test"):
        figure = result[split]
        assert set(figure) == {
            *("nll", "ppl", "bits_per_token", "bits_per_byte", "tokens", "bytes"),
            *("split", "mem_len", "tgt_len", "clamp_len", "same_length", "batch_size"),
        }
        assert figure["split"] == split and figure["tokens"] == figure["bytes"] == 999
    rows = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if "train/nll" in row]
    valid = [row for row in rows if "valid/nll" in row]
    assert [row["step"] for row in train] == [2, 4, 6] and [row["step"] for row in valid] == [3, 6]
    assert [row["tokens"] for row in valid] == [96, 192]
    assert {"valid/ppl", "valid/bits_per_byte"} <= valid[0].keys()
    assert {"train/lr", "train/grad_norm", "tokens_per_second"} <= train[0].keys()
    assert result["valid"]["nll"] == pytest.approx(min(row["valid/nll"] for row in valid))
    assert (trained_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((trained_run / "overrides.json").read_text()) == ["name=tiny", *TINY]
    assert checkpoint.load(trained_run / "last.1.pt")["step"] == 3
    assert os.stat(trained_run / "last.pt").st_ino != os.stat(trained_run / "last.1.pt").st_ino


def test_hydra_writes_nothing_of_its_own(trained_run):
    assert sorted(path.name for path in trained_run.parents[2].iterdir()) == ["outputs"]
    assert sorted(path.name for path in trained_run.parents[1].iterdir()) == ["tiny"]


def test_two_runs_with_one_seed_are_equal_bit_for_bit():
    for name in ("one", "two"):
        assert in_process("train", f"name={name}", *TINY, "model.dropout=0.1").status == 0
    one, two = (checkpoint.load(next(Path("outputs", name).iterdir()) / "last.pt") for name in ("one", "two"))
    assert one["model"].keys() == two["model"].keys()
    assert all(torch.equal(tensor, two["model"][name]) for name, tensor in one["model"].items())
    assert one["run"]["valid_nll"] == two["run"]["valid_nll"]
    assert in_process("train", "name=one", *TINY, "model.dropout=0.1", "seed=2").status == 0
    others = [checkpoint.load(path / "last.pt")["run"]["valid_nll"] for path in Path("outputs/one").iterdir()]
    assert len(others) == 2 and others[0] != others[1]


def test_the_same_command_again_reports_a_finished_run():
    first = in_process("train", *TINY)
    (path,) = Path("outputs/python_docs").iterdir()
    before = run_files(path)
    again = in_process("train", *TINY, "log_every=1")
    assert again == (0, first.stdout, "")
    assert run_files(path) == before


def test_a_call_from_python_has_a_folder_of_its_own():
    from conftest import compose

    import train

    nll = train.main(compose(*TINY, "steps=2"))
    (path,) = Path("outputs/python_docs").iterdir()
    assert path.name.startswith("config-")
    assert nll == json.loads((path / "result.json").read_text())["valid"]["nll"]
    assert train.main(compose(*TINY, "steps=2")) == nll
    resumed = in_process("train", f"resume={path}", "steps=3")  # of what overrides? the defaults would be another model
    assert resumed.status == 1 and re.match("resume: .* its overrides are not known", resumed.stderr)
    assert len(resumed.stderr.splitlines()) == 1


def test_eval_mem_len_measures_with_another_memory(trained_run):
    outcome = in_process("train", "name=none", *TINY, "eval.mem_len=null")
    assert outcome.status == 0, outcome.stderr
    (path,) = Path("outputs/none").iterdir()
    result = json.loads((path / "result.json").read_text())
    with_memory = json.loads((trained_run / "result.json").read_text())
    assert result["valid"]["mem_len"] is None and result["valid"]["nll"] != with_memory["valid"]["nll"]
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["valid/nll"] == result["valid"]["nll"]


def test_a_model_with_room_for_more_tokens_never_writes_them():
    outcome = in_process("train", *TINY, "model.n_token=1000")
    assert outcome.status == 0, outcome.stderr
    (path,) = Path("outputs/python_docs").iterdir()
    assert in_process("generate", f"checkpoint={path}", "max_new_tokens=50", "temperature=5").status == 0
    assert in_process("train", "name=none", *TINY, "model.n_token=0").stderr.startswith("model.n_token: 0 is smaller")


def test_several_processes_may_try_the_same_folder_at_once():
    """None takes another's trial file for a folder that cannot be written."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        for trial in [pool.submit(runs.make, Path("shared")) for _ in range(200)]:
            trial.result()
    assert os.listdir("shared") == []


def test_a_finished_run_says_so_where_its_text_has_changed():
    data = text_data(train=b"abc " * 300, valid=b"abc " * 20, test=b"cba " * 20)
    arguments = ["name=changed", *data, *(one for one in TINY if not one.startswith("data."))]
    first = in_process("train", *arguments)
    assert first.status == 0, first.stderr
    assert in_process("train", *arguments) == (0, first.stdout, "")
    Path("test.txt").write_bytes(b"abd " * 20)
    again = in_process("train", *arguments)
    assert (again.status, again.stdout) == (0, first.stdout)
    assert again.stderr == "warning: the text of data is not the one of the run's time; these are its old figures\n"
    Path("test.txt").unlink()
    assert "cannot be read any more (data.test: " in in_process("train", *arguments).stderr
