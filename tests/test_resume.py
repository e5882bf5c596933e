"""Going on with a run, and beginning from one."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, run_files, text_data

from txl import checkpoint, resuming


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
    before = run_files(path)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "resume: none of the checkpoints" in outcome.stderr.splitlines()[-1]
    assert run_files(path) == before


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
        ("batch_size=4", "resume: batch_size cannot change, 2 to 4 (each lane would stand elsewhere in the text)"),
        ("optimizer=sgd", "resume: optimizer._target_ cannot change, torch.optim.Adam to torch.optim.SGD"),
        ("model.n_layer=3", "resume: model.n_layer cannot change, 2 to 3 (the weights would not fit)"),
        ("data/vocab=characters", "resume: the checkpoint was made with another vocabulary"),
        ("data.max_bytes=10000", "resume: the text of data has changed"),
    ],
)
def test_what_cannot_change_on_resume_is_refused_and_loses_nothing(override, message):
    assert in_process("train", "name=fixed", *TINY).status == 0
    (path,) = Path("outputs/fixed").iterdir()
    before = run_files(path)
    outcome = in_process("train", f"resume={path}", override)
    assert outcome.status == 1 and message in outcome.stderr.splitlines()[-1]
    assert run_files(path) == before


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
    before = run_files(path)
    outcome = in_process("train", f"resume={path}", *overrides)
    assert outcome.status == 1 and outcome.stderr.startswith("steps: the run has done 6 updates; give more than that")
    assert {name: text for name, text in run_files(path).items() if name != "metrics.jsonl"} == {
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
    overrides = resuming.resumed_overrides(path, [f"resume={path}", "model/memory=none", "steps=8"])
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
    for name in ("last.pt", "last.1.pt"):
        (path / name).write_bytes((path / "best.pt").read_bytes())
    outcome = in_process("train", f"resume={path}", "steps=8")
    assert outcome.status == 1 and "holds no state of a training run" in outcome.stderr


def test_a_resume_without_borders_between_documents_begins_with_no_memory_of_ended_ones():
    lines = b"".join(b"%d, a line of its own\n" % number for number in range(60))
    data = [*text_data(train=lines, valid=lines, test=lines), *DOCUMENTS[:2]]
    assert in_process("train", "name=borders", *TINY, *data).status == 0
    (path,) = Path("outputs/borders").iterdir()
    outcome = in_process("train", f"resume={path}", "++data.reset_at_document=false", "steps=8")
    assert outcome.status == 0, outcome.stderr
