import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, text_data

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


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


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
    before = files(path)
    again = in_process("train", *TINY, "log_every=1")
    assert again == (0, first.stdout, "")
    assert files(path) == before


def interrupted(monkeypatch, after: int, *overrides: str):
    """A run that dies in the middle of an update, without a chance to save."""
    from txl import training

    real = training.updates

    def dying(*arguments, **settings):
        for update in real(*arguments, **settings):
            if update.step > after:
                raise RuntimeError("power cut")
            yield update

    monkeypatch.setattr(training, "updates", dying)
    with pytest.raises(RuntimeError, match="power cut"):
        in_process("train", *TINY, *overrides)
    monkeypatch.setattr(training, "updates", real)


DOCUMENTS = ["data.document_separator=\\n", "data.reset_at_document=true", "data.shuffle_documents=true"]


@pytest.mark.parametrize("documents", [False, True])
def test_the_same_command_again_continues_an_unfinished_run(documents, monkeypatch):
    """To the same weights, bit for bit, with no line of the log lost or doubled; also in the third pass over documents."""
    overrides = ["model.dropout=0.1"]
    if documents:
        lines = b"".join(b"%d, a line of its own\n" % number for number in range(4))
        overrides += [*text_data(train=lines, valid=lines, test=lines), *DOCUMENTS]
    assert in_process("train", "name=whole", *TINY, *overrides).status == 0
    interrupted(monkeypatch, 4, "name=cut", *overrides)
    (cut,) = Path("outputs/cut").iterdir()
    assert not (cut / "result.json").exists()
    assert in_process("train", "name=cut", *TINY, *overrides).status == 0
    (whole,) = Path("outputs/whole").iterdir()
    a, b = (checkpoint.load(path / "last.pt") for path in (whole, cut))
    assert all(torch.equal(tensor, b["model"][name]) for name, tensor in a["model"].items())

    def rows(path):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in lines]

    assert rows(whole) == rows(cut)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before():
    assert in_process("train", *TINY).status == 0
    (path,) = Path("outputs/python_docs").iterdir()
    whole = checkpoint.load(path / "last.pt")
    (path / "result.json").unlink()
    (path / "last.pt").write_bytes((path / "last.pt").read_bytes()[:1000])
    outcome = in_process("train", *TINY)
    assert outcome.status == 0 and "warning: resume:" in outcome.stderr and "step 6/6" in outcome.stderr
    again = checkpoint.load(path / "last.pt")
    assert all(torch.equal(tensor, again["model"][name]) for name, tensor in whole["model"].items())


def test_a_run_whose_checkpoints_are_all_damaged_is_never_begun_anew():
    assert in_process("train", *TINY).status == 0
    (path,) = Path("outputs/python_docs").iterdir()
    (path / "result.json").unlink()
    for name in ("last.pt", "last.1.pt"):
        (path / name).write_bytes(b"damaged")
    before = files(path)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "resume: none of the checkpoints" in outcome.stderr.splitlines()[-1]
    assert files(path) == before


def test_resume_goes_on_with_the_runs_overrides_and_the_new_ones():
    assert in_process("train", "name=long", *TINY).status == 0
    (path,) = Path("outputs/long").iterdir()
    outcome = in_process("train", f"resume={path}", "steps=9", "optimizer.weight_decay=0.1")
    assert outcome.status == 0, outcome.stderr
    assert (
        "resume: steps: 6, now 9" in outcome.stderr and "resume: optimizer.weight_decay: 0.0, now 0.1" in outcome.stderr
    )
    assert "step 7" not in outcome.stderr.splitlines()[0]
    content = checkpoint.load(path / "last.pt")
    assert content["step"] == 9 and content["config"]["model"]["d_model"] == 16
    assert content["run"]["optimizer"]["param_groups"][0]["weight_decay"] == 0.1
    assert [path.name for path in Path("outputs/long").iterdir()] == [path.name]
    assert in_process("train", f"resume={path}").status == 0
    changed = in_process("train", "name=long", *TINY)
    assert changed.status == 1 and "steps: 9, now 6" in changed.stderr


def test_resume_takes_groups_and_works_from_another_folder(tmp_path, monkeypatch):
    Path("mine.txt").write_bytes(b"to be or not to be " * 200)
    data = [override for override in TINY if "data." not in override]
    assert in_process("train", "name=there", "data=text", "data.train=mine.txt", *data).status == 0
    (path,) = (tmp_path / "outputs" / "there").iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    outcome = in_process("train", f"resume={path}", "schedule=constant", "steps=8")
    assert outcome.status == 0, outcome.stderr
    assert checkpoint.load(path / "last.pt")["config"]["schedule"]["_target_"] == "txl.optim.constant"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=3", "resume: batch_size or data changed"),
        ("optimizer=sgd", "resume: optimizer:"),
        ("model.n_layer=3", "resume: its weights do not fit the model"),
        ("data/vocab=characters", "resume: the checkpoint was made with another vocabulary"),
        ("data.max_bytes=10000", "resume: the text of data has changed"),
    ],
)
def test_what_cannot_change_on_resume_is_refused_and_loses_nothing(override, message):
    assert in_process("train", "name=fixed", *TINY).status == 0
    (path,) = Path("outputs/fixed").iterdir()
    before = files(path)
    outcome = in_process("train", f"resume={path}", override)
    assert outcome.status == 1 and message in outcome.stderr.splitlines()[-1]
    assert files(path) == before


def test_init_from_begins_a_new_run_with_old_weights(trained_run):
    outcome = in_process("train", "name=child", f"init_from={trained_run}", *TINY, "steps=1", "optimizer.lr=1e-12")
    assert outcome.status == 0, outcome.stderr
    (path,) = Path("outputs/child").iterdir()
    child, parent = checkpoint.load(path / "last.pt"), checkpoint.load(trained_run / "best.pt")
    assert child["step"] == 1
    for name, tensor in parent["model"].items():
        torch.testing.assert_close(child["model"][name], tensor, rtol=0, atol=1e-9)


def test_init_from_a_checkpoint_of_another_vocabulary_is_refused(trained_run):
    outcome = in_process("train", "name=child", f"init_from={trained_run}", *TINY, "data/vocab=characters")
    assert outcome.status == 1
    assert outcome.stderr.startswith("init_from: the checkpoint was made with another vocabulary")


def test_a_call_from_python_has_a_folder_of_its_own():
    from conftest import compose

    import train

    nll = train.main(compose(*TINY, "steps=2"))
    (path,) = Path("outputs/python_docs").iterdir()
    assert path.name.startswith("config-")
    assert nll == json.loads((path / "result.json").read_text())["valid"]["nll"]


def test_eval_mem_len_measures_with_another_memory(trained_run):
    outcome = in_process("train", "name=none", *TINY, "eval.mem_len=null")
    assert outcome.status == 0, outcome.stderr
    (path,) = Path("outputs/none").iterdir()
    result = json.loads((path / "result.json").read_text())
    with_memory = json.loads((trained_run / "result.json").read_text())
    assert result["valid"]["mem_len"] is None and result["valid"]["nll"] != with_memory["valid"]["nll"]
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["valid/nll"] == result["valid"]["nll"]


def test_a_resume_that_fails_leaves_a_finished_run_as_it_was():
    assert in_process("train", "name=safe", *TINY).status == 0
    (path,) = Path("outputs/safe").iterdir()
    kept = {name: (path / name).read_bytes() for name in ("config.yaml", "overrides.json", "result.json", "last.pt")}
    outcome = in_process("train", f"resume={path}", "optimizer=sgd", "optimizer.lr=1e30", "steps=12")
    assert outcome.status == 1 and "optimizer" in outcome.stderr
    diverged = in_process("train", f"resume={path}", "optimizer.lr=1e30", "clip=1e30", "steps=12", "eval_every=12")
    assert diverged.status == 1 and diverged.stderr.splitlines()[-1].startswith("optimizer.lr: at update ")
    assert {name: (path / name).read_bytes() for name in kept} == kept
    assert in_process("train", "name=safe", *TINY).status == 0


@pytest.mark.parametrize("overrides", [["steps=4"], ["clip=0.1"]])
def test_a_resume_without_an_update_left_is_refused(overrides):
    assert in_process("train", "name=done", *TINY).status == 0
    (path,) = Path("outputs/done").iterdir()
    before = files(path)
    outcome = in_process("train", f"resume={path}", *overrides)
    assert outcome.status == 1 and outcome.stderr.startswith("steps: the run has done 6 updates; give more than that")
    assert {name: text for name, text in files(path).items() if name != "metrics.jsonl"} == {
        name: text for name, text in before.items() if name != "metrics.jsonl"
    }


def test_a_finished_run_can_be_measured_anew_by_resume():
    assert in_process("train", "name=again", *TINY).status == 0
    (path,) = Path("outputs/again").iterdir()
    assert in_process("train", f"resume={path}", "eval.mem_len=null").status == 0
    assert json.loads((path / "result.json").read_text())["test"]["mem_len"] is None


def test_a_group_takes_the_place_of_old_values_in_it():
    assert in_process("train", "name=groups", *TINY).status == 0
    (path,) = Path("outputs/groups").iterdir()
    overrides = runs.resumed_overrides(path, [f"resume={path}", "model/memory=none", "steps=8"])
    assert "model.memory.mem_len=16" not in overrides and "model.n_layer=2" in overrides
    outcome = in_process("train", f"resume={path}", "model/memory=none", "steps=8")
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("overrides.json", "[1]", "resume: .* is not the folder of a run"),
        ("overrides.json", "{", "resume: .* is not the folder of a run"),
        ("config.yaml", "", "name: .* is damaged"),
        ("config.yaml", "[1,2", "name: .* is damaged"),
        ("config.yaml", "a: ${b}", "name: .* is damaged"),
    ],
)
def test_a_damaged_run_folder_is_told_in_a_line(name, content, message):
    assert in_process("train", "name=hurt", *TINY).status == 0
    (path,) = Path("outputs/hurt").iterdir()
    (path / name).write_text(content)
    (path / "last.1a.pt").touch()
    outcome = in_process("train", f"resume={path}", "steps=8")
    assert outcome.status == 1 and re.match(message, outcome.stderr) and len(outcome.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["{}", "[1]", "5", "{"])
def test_a_damaged_result_is_made_again(content):
    first = in_process("train", "name=result", *TINY)
    (path,) = Path("outputs/result").iterdir()
    expected = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(content)
    (path / ".last.next.pt-abc").touch()
    assert in_process("train", "name=result", *TINY).stdout == first.stdout
    assert json.loads((path / "result.json").read_text()) == expected
    assert not (path / ".last.next.pt-abc").exists()


def test_a_checkpoint_without_a_training_state_is_no_place_to_go_on_from():
    assert in_process("train", "name=stateless", *TINY).status == 0
    (path,) = Path("outputs/stateless").iterdir()
    (path / "last.pt").write_bytes((path / "best.pt").read_bytes())
    outcome = in_process("train", f"resume={path}", "steps=8")
    assert outcome.status == 1 and "holds no state of a training run" in outcome.stderr


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


def test_a_resume_without_borders_between_documents_begins_with_no_memory_of_ended_ones():
    lines = b"".join(b"%d, a line of its own\n" % number for number in range(60))
    data = [*text_data(train=lines, valid=lines, test=lines), *DOCUMENTS[:2]]
    assert in_process("train", "name=borders", *TINY, *data).status == 0
    (path,) = Path("outputs/borders").iterdir()
    outcome = in_process("train", f"resume={path}", "++data.reset_at_document=false", "steps=8")
    assert outcome.status == 0, outcome.stderr
