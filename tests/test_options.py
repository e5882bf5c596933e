"""Every option of memory and position, and the half loss, as a user meets them: trained, killed and resumed, measured, generated from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, finished, in_process, mostly_slow, refused, state_of, text_data

from txl import checkpoint
from txl.config import build
from txl.training import recent_half

POSITIONS = ["relative", "shaw", "absolute", "absolute_per_layer", "rotary", "alibi"]
MEMORIES = ["segment", "none", "compressive"]
COMPRESSIVE = ["model/memory=compressive", "model.memory.compressed_len=4", "model.memory.rate=4"]


def choice(position, memory):
    return [f"model/position={position}", *(COMPRESSIVE if memory == "compressive" else [f"model/memory={memory}"])]


def without_mem_len(overrides):
    return [one for one in overrides if "mem_len" not in one]


def trained(name, position, memory, *overrides):
    settings = without_mem_len(TINY) if memory == "none" else TINY
    outcome = in_process("train", f"name={name}", *settings, *choice(position, memory), *overrides)
    assert outcome.status == 0, outcome.stderr
    return next(Path("outputs", name).iterdir())


@pytest.mark.parametrize(
    ("position", "memory"),
    mostly_slow([(position, memory) for memory in MEMORIES for position in POSITIONS], fast=7),
)
def test_every_position_with_every_memory(position, memory):
    """Trains; its checkpoint is measured, with the figure of the run, and generates."""
    run = trained("option", position, memory, "eval_every=6", "data.max_bytes=8000")
    result = json.loads((run / "result.json").read_text())
    outcome = in_process("evaluate", f"checkpoint={run}")
    assert json.loads(outcome.stdout)["nll"] == result["test"]["nll"]
    outcome = in_process("generate", f"checkpoint={run}", "prompt=abc", "max_new_tokens=12", "temperature=0")
    assert outcome.status == 0 and len(outcome.stdout) > 6


@pytest.mark.parametrize(("position", "memory"), [("shaw", "segment"), ("absolute_per_layer", "compressive")])
def test_a_run_that_goes_on_is_one_that_never_stopped(position, memory):
    """Tables, convolutions, coarse rows: everything is in the checkpoint."""
    options = ["model.dropout=0.2", "model.dropoute=0.1", "model.dropouti=0.2", "model.dropouto=0.2", "model.wdrop=0.1"]
    whole, cut = (trained(name, position, memory, "loss=half", "steps=9", *options) for name in ("whole", "cut"))
    for file in ("best.pt", "last.pt", "result.json"):
        (cut / file).unlink()
    shutil.move(cut / "last.1.pt", cut / "last.pt")  # the state after update 6
    assert state_of(cut)["step"] == 6
    outcome = in_process("train", f"resume={cut}")
    assert outcome.status == 0, outcome.stderr
    one, other = state_of(whole), state_of(cut)
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert all(map(torch.equal, one["run"]["mems"], other["run"]["mems"]))


def test_a_compressive_run_can_be_read_without_memory_and_with_another_length():
    run = trained("reading", "relative", "compressive")
    figures = []
    for setting in ("mem_len=null", "mem_len=8", "mem_len=trained"):
        outcome = in_process("evaluate", f"checkpoint={run}", setting)
        assert outcome.status == 0, outcome.stderr
        figures.append(json.loads(outcome.stdout)["nll"])
    assert len(set(figures)) == 3
    refused(in_process("evaluate", f"checkpoint={run}", "same_length=true"), "model.same_length")


@pytest.mark.parametrize("position", ["absolute", "rotary", "absolute_per_layer"])
def test_clamp_len_is_refused_where_there_are_no_distances(position):
    run = trained("clamp", position, "segment")
    refused(in_process("evaluate", f"checkpoint={run}", "clamp_len=8"), "clamp_len")
    assert in_process("evaluate", f"checkpoint={run}", "clamp_len=null").status == 0


def test_clamp_len_is_taken_where_there_are():
    for position in ("shaw", "alibi"):
        run = trained("clamp", position, "segment")
        figures = [
            json.loads(in_process("evaluate", f"checkpoint={run}", f"clamp_len={value}").stdout)
            for value in (2, "null")
        ]
        assert figures[0]["nll"] != figures[1]["nll"] and figures[0]["clamp_len"] == 2


def test_documents_with_a_compressive_memory_are_refused_before_anything_is_saved():
    data = text_data(train=b"abc\n\n" * 300, valid=b"abc\n\n" * 40, test=b"abc\n\n" * 40)
    settings = [one for one in TINY if not one.startswith("data.")]
    borders = ["data.document_separator='\\n\\n'", "data.reset_at_document=true"]
    outcome = in_process("train", "name=documents", *settings, *data, *borders, *choice("relative", "compressive"))
    refused(outcome, "data.reset_at_document")
    assert not list(Path().rglob("*.pt"))


def test_the_half_loss_is_of_the_recent_half():
    """Target by target: the update follows the mean nll of the second half, and only that."""
    nll = torch.arange(14.0).view(2, 7)
    assert recent_half(nll).tolist() == [[3, 4, 5, 6], [10, 11, 12, 13]]
    assert recent_half(nll[:, :6]).tolist() == [[3, 4, 5], [10, 11, 12]]
    run = finished("half", "loss=half", "steps=1", "log_every=1", "eval_every=1")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    content = checkpoint.load(run / "last.pt")
    torch.manual_seed(1)
    model = build(content["config"]["model"])
    text = torch.from_numpy(
        checkpoint.construct(content["config"]["data"], cache_dir=None)
        .split("train", checkpoint.vocabulary(content))
        .tokens[:20001]
        .astype("int64")
    )
    lane = (len(text) - 1) // 2
    rows = torch.stack([text[:17], text[lane : lane + 17]])
    expected, _ = model(rows[:, :-1], None, rows[:, 1:])
    assert logged[0]["train/nll"] == pytest.approx(expected[:, 8:].mean().item(), rel=1e-6)
    assert logged[0]["train/nll"] != pytest.approx(expected.mean().item(), rel=1e-6)


def test_half_and_full_train_to_different_weights_on_the_same_tokens():
    one, other = finished("full"), finished("half", "loss=half")
    assert state_of(one)["tokens"] == state_of(other)["tokens"]
    assert not all(map(torch.equal, state_of(one)["model"].values(), state_of(other)["model"].values()))


def test_another_loss_is_refused_by_name():
    refused(in_process("train", *TINY, "loss=third"), "loss")


def test_what_a_memory_learns_by_reaches_its_weights():
    taught = trained("taught", "relative", "compressive")
    left = trained("left", "relative", "compressive", "model.memory.reconstruction=0.0")
    name = "memory.convolutions.0.weight"
    assert not torch.equal(state_of(taught)["model"][name], state_of(left)["model"][name])


def test_sharding_full_refuses_a_compressive_memory():
    assert "compressive" in refused(
        in_process("train", *TINY, *choice("relative", "compressive"), "sharding=full", "processes=2"), "sharding"
    )


def test_compressive_with_bf16_and_accumulation():
    run = trained("bf16", "relative", "compressive", "precision=bf16", "accumulate=2")
    assert json.loads((run / "result.json").read_text())["test"]["nll"] < 6
