"""Averages of the weights: what they are, that figures are of them, and that training never notices."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import rank_work
import torch
from conftest import TINY, finished, in_process, refused, state_of, tiny_model
from test_resume import interrupted
from test_training import constant, make_run, small_lanes

from txl import archive, checkpoint, ranks, saver, training
from txl.averaging import Average, ExponentialAverage, NoAverage, StochasticWeightAverage
from txl.config import load_yaml, to_yaml
from txl.signals import StopSignals

EMA = ["average=ema", "average.decay=0.7"]
SWA = ["average=swa", "average.start=2", "average.every=2"]


def exponential(weights):
    """Kingma & Ba's two lines, in float64: from zero, and the correction for that."""
    average = torch.zeros_like(weights[0])
    for one in weights:
        average = 0.7 * average + (1 - 0.7) * one
    return average / (1 - 0.7 ** len(weights))


def mean(weights):
    """Of updates 2, 4, 6, ..."""
    return torch.stack(weights[1::2]).mean(dim=0)


def recorded(monkeypatch) -> list[dict]:
    """The weights after each update of the runs to come, in float64."""
    real, kept = training.updates, []

    def recording(run, **settings):
        for update in real(run, **settings):
            kept.append({name: one.double() for name, one in run.model.state_dict().items()})
            yield update

    monkeypatch.setattr(training, "updates", recording)
    return kept


def tensors(value):
    """All that plain values hold, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [one for item in inner for one in tensors(item)]


def rows(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in lines]


def without_time(path):
    return {key: value for key, value in json.loads((path / "result.json").read_text()).items() if key != "seconds"}


@pytest.mark.parametrize(("average", "by_hand"), [(EMA, exponential), (SWA, mean)])
def test_figures_are_of_the_average_and_training_of_the_weights(average, by_hand, trained_run, monkeypatch):
    """Against a slow computation over the weights of each update; against a run without an average, bit for bit."""
    weights = recorded(monkeypatch)
    path = finished("averaged", *average)
    state, best, plain = state_of(path), checkpoint.load(path / "best.pt"), state_of(trained_run)
    for kept, step in ((state["run"]["average"]["weights"], 6), (best["model"], best["step"])):
        assert kept.keys() == state["model"].keys()
        for name, one in kept.items():
            expected = by_hand([after[name] for after in weights[:step]])
            torch.testing.assert_close(one.double(), expected, rtol=0, atol=1e-6)
        assert (kept["softmax.weight"] - weights[step - 1]["softmax.weight"]).abs().max() > 1e-4
    for name in ("model", "run"):
        state["run"].pop("average", None)
        assert all(map(torch.equal, tensors(state[name]), tensors(plain[name])))
    losses = [[row["train/nll"] for row in rows(one) if "train/nll" in row] for one in (path, trained_run)]
    assert losses[0] == losses[1] and len(losses[0]) == 3

    result = json.loads((path / "result.json").read_text())
    assert result["valid"]["nll"] == min(row["valid/nll"] for row in rows(path) if "valid/nll" in row)
    outcome = in_process("evaluate", f"checkpoint={path}", "split=valid")
    assert json.loads(outcome.stdout)["nll"] == result["valid"]["nll"]
    assert result["valid"] != json.loads((trained_run / "result.json").read_text())["valid"]


def test_before_its_start_swa_is_no_average(trained_run):
    path = finished("late", "average=swa", "average.start=5", "average.every=1")
    ours, plain = ([row["valid/nll"] for row in rows(one) if "valid/nll" in row] for one in (path, trained_run))
    assert ours[0] == plain[0] and ours[1] != plain[1]
    assert "average" not in checkpoint.load(path / "last.1.pt")["run"]
    assert state_of(path)["run"]["average"]["count"] == 2


@pytest.mark.parametrize("average", [EMA, SWA])
def test_an_interrupted_run_ends_with_the_same_average(average, monkeypatch):
    """Bit for bit: the weights of all files, and the figures."""
    whole = finished("whole", *average, "model.dropout=0.1")
    interrupted(monkeypatch, 4, "name=cut", *average, "model.dropout=0.1")
    cut = finished("cut", *average, "model.dropout=0.1")
    for name in ("last.pt", "last.1.pt", "best.pt"):
        one, other = (checkpoint.load(path / name) for path in (whole, cut))
        assert all(map(torch.equal, tensors(one), tensors(other))), name
        assert len(tensors(one)) == len(tensors(other)) and one["step"] == other["step"]
    assert rows(whole) == rows(cut) and without_time(whole) == without_time(cut)
    assert (whole / "sample.txt").read_bytes() == (cut / "sample.txt").read_bytes()


def test_the_weights_come_back_bit_for_bit():
    """Also after an error; and tied weights are one weight, in the average too."""
    run = make_run(tiny_model().float(), small_lanes())
    run.average = Average(rule=StochasticWeightAverage(start=1, every=1))
    list(training.updates(run, steps=5, lr=0.01, schedule=constant))
    before = {name: one.clone() for name, one in run.model.state_dict().items()}
    with pytest.raises(KeyError), run.average.in_place(run.model):
        inside = {name: one.clone() for name, one in run.model.state_dict().items()}
        raise KeyError
    saved = run.average.state_dict(run.model)["weights"]
    assert all(torch.equal(one, before[name]) for name, one in run.model.state_dict().items())
    assert all(torch.equal(one, inside[name]) for name, one in saved.items()) and saved.keys() == inside.keys()
    assert not torch.equal(inside["softmax.weight"], before["softmax.weight"])
    assert saved["softmax.out_weight"] is saved["softmax.weight"]
    assert not any(one.requires_grad for one in saved.values())


@pytest.mark.parametrize("how", ["skip", "fp16"])
def test_an_update_that_is_not_made_does_not_count(how):
    run = make_run(tiny_model().float(), small_lanes())
    run.average = Average(rule=ExponentialAverage(decay=0.7))
    if how == "fp16":
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    else:
        forward, calls = run.model.forward, []

        def sometimes(*given, **marks):
            calls.append(1)
            nll, mems = forward(*given, **marks)
            return (nll * math.nan if len(calls) == 3 else nll), mems

        run.model.forward = sometimes
    precision = "fp16" if how == "fp16" else "fp32"
    settings = dict(lr=0.01, schedule=constant, precision=precision, on_nonfinite=how.replace("fp16", "stop"))
    weights = []
    for _ in training.updates(run, steps=4, max_bad_updates=1, **settings):
        weights.append(run.model.softmax.weight.double())
    assert run.bad_updates == 1 if how == "skip" else run.scaler.get_scale() < 2.0**60
    assert run.average.count == 4
    torch.testing.assert_close(
        run.average.weights["softmax.weight"].double(), exponential(weights).detach(), rtol=0, atol=1e-6
    )


def test_two_processes_keep_the_average_of_one():
    """Each the same one, and DDP goes on where it was in the model's place."""
    one, other = ranks.launch(rank_work.averaged, [], processes=2, device="cpu", stop=StopSignals())
    assert one == other
    (alone,) = rank_work.averaged(ranks.ALONE, StopSignals())
    for ours, expected in zip(one, alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["average=ema", "average.decay=1"], "average.decay"),
        (["average=ema", "average.decay=-0.1"], "average.decay"),
        (["average=ema", "average.decay=.nan"], "average.decay"),
        (["average=ema", "average.decay=slow"], "average.decay"),
        (["average=swa", "average.start=0"], "average.start"),
        (["average=swa", "average.start=7"], "average.start"),
        (["average=swa", "average.start=soon"], "average.start"),
        (["average=swa", "average.start=1", "average.every=0"], "average.every"),
        (["average=swa", "average.start=1", "average.every=1.5"], "average.every"),
        (["average=ema", "sharding=full"], "average"),
        (["average=swa", "average.start=1", "sharding=full", "processes=2"], "average"),
    ],
)
def test_a_bad_value_is_refused(given, key):
    refused(in_process("train", *TINY, *given), key)
    assert os.listdir() == []


EXPONENTIAL, OTHER_DECAY = ExponentialAverage(decay=0.7), ExponentialAverage(decay=0.5)
MEAN = StochasticWeightAverage(start=2, every=2)


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (NoAverage(), EXPONENTIAL, 3),
        (EXPONENTIAL, OTHER_DECAY, 9),
        (EXPONENTIAL, MEAN, 1),
        (MEAN, StochasticWeightAverage(start=2, every=1), 6),
        (MEAN, StochasticWeightAverage(start=3, every=2), 2),
        (MEAN, NoAverage(), 0),
    ],
)
def test_on_resume_values_change_and_another_average_begins_anew(before, after, count):
    """After six updates of nine; what goes on does so from the saved numbers, not from the same tensors."""
    runs = [make_run(tiny_model(), small_lanes()) for _ in range(2)]
    for run, rule in zip(runs, (before, after), strict=True):
        run.average = Average(rule=rule)
    list(training.updates(runs[0], steps=6, lr=0.01, schedule=constant))
    state = runs[0].state_dict()
    checkpoint.load_weights(runs[1].model, runs[0].model.state_dict())
    runs[1].load_state_dict(state)
    kept = {name: one.clone() for name, one in runs[0].average.weights.items()}
    list(training.updates(runs[1], steps=9, lr=0.01, schedule=constant))
    assert runs[1].average.count == count and ("average" in runs[1].state_dict()) == (count > 0)
    assert all(torch.equal(one, kept[name]) for name, one in runs[0].average.weights.items())


def test_a_kind_and_a_value_change_by_the_command():
    path = finished("changed", *EMA)
    outcome = in_process("train", f"resume={path}", "steps=8", "average=ema", "average.decay=0.5")
    assert outcome.status == 0 and "resume: average.decay: 0.7, now 0.5" in outcome.stderr, outcome.stderr
    assert state_of(path)["run"]["average"]["count"] == 8
    outcome = in_process("train", f"resume={path}", "average=none")
    assert "give more than that" in refused(outcome, "steps")


@pytest.mark.parametrize("value", [5, {"count": 0}, {"count": "x"}, {"weights": {}}, {"of": None}, "nan", "shape"])
def test_an_average_that_is_none_of_the_models_is_refused(value):
    run = make_run(tiny_model(), small_lanes())
    run.average = Average(rule=ExponentialAverage(decay=0.7))
    list(training.updates(run, steps=2, lr=0.01, schedule=constant))
    state = run.state_dict()
    weights = state["average"]["weights"]
    if value in ("nan", "shape"):
        broken = weights["softmax.weight"] * math.nan if value == "nan" else weights["softmax.weight"][:1]
        value = {"weights": {**weights, "softmax.weight": broken}}
    state["average"] = {**state["average"], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=r"^resume: average: "):
        run.load_state_dict(state)
    assert run.average.count == 2


def test_an_average_that_is_not_finite_is_never_saved():
    average = {"weights": {"a": torch.tensor([math.inf])}}
    with pytest.raises(ValueError, match="average of a is not finite"):
        saver.refuse_what_is_not_finite({"model": {}, "run": {"average": average}, "step": 1})


def test_without_an_average_files_are_as_they_were_and_older_ones_go_on(trained_run, tmp_path):
    """A run of before there was the key: reported, read, and gone on with."""
    state, best = state_of(trained_run), checkpoint.load(trained_run / "best.pt")
    assert "average" not in state["run"] and best.keys() == state.keys() - {"run"}
    path = Path("outputs/tiny", trained_run.name)
    shutil.copytree(trained_run, path)
    config = {key: value for key, value in load_yaml(path / "config.yaml").items() if key != "average"}
    (path / "config.yaml").write_text(to_yaml(config))
    for name in ("last.pt", "best.pt"):
        content = torch.load(path / name, weights_only=True)
        inner = {key: value for key, value in json.loads(content["config"]).items() if key != "average"}
        archive.write(path / name, {**content, "config": json.dumps(inner)})
    again = in_process("train", "name=tiny", *TINY)
    assert again.status == 0 and again.stderr == ""
    assert in_process("evaluate", f"checkpoint={path}").status == 0
    outcome = in_process("train", f"resume={path}", "steps=8")
    assert outcome.status == 0 and "resume: average" not in outcome.stderr, outcome.stderr
