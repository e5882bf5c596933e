import json
import math
import signal
from pathlib import Path

import pytest
import torch
from conftest import finished, in_process, refused, text_data
from loud import loud, measured, subject_of

from txl import archive
from txl.instruments.recl import RECL
from txl.instruments.taking import take
from txl.signals import Stopped

KNOBS = {"against": [], "positions": 9, "step": 5, "longest": 27, "ratios": [0.3, 1.0], "threshold": 0.01}


def nll_by_hand(subject, target, context):
    """One token after the last so many, read by segments with the memory carried."""
    model, tokens = subject.model(), torch.from_numpy(subject.split.tokens.astype("int64"))[None]
    mems = None
    for start in range(target - context, target, subject.tgt_len):
        stop = min(start + subject.tgt_len, target)
        nll, mems = model(tokens[:, start:stop], mems, tokens[:, start + 1 : stop + 1])
    return nll[0, -1].item()


def gain_by_hand(now, then, model, ratio):
    """g of one model from the losses of all at a context and at the next, a list of positions for each model."""
    best = [min(losses) for losses in zip(*now, strict=True)]
    places = sorted(range(len(best)), key=lambda place: -best[place])[: max(1, round(ratio * len(best)))]
    before = math.exp(sum(min(best[place], now[model][place]) for place in places) / len(places))
    after = math.exp(sum(min(best[place], then[model][place]) for place in places) / len(places))
    return (before - after) / before


@pytest.fixture
def pair(trained_run):
    return loud(trained_run, "one.pt", 1), loud(trained_run, "two.pt", 2)


@pytest.mark.parametrize(
    "reading", [["mem_len=6"], ["mem_len=30"], ["same_length=true", "mem_len=8"], ["mem_len=null"]]
)
def test_the_losses_are_those_after_the_last_tokens_alone(reading, pair, monkeypatch):
    monkeypatch.setattr("txl.instruments.recl.AT_ONCE", 32)  # several positions, not all, side by side
    subject = subject_of(f"checkpoint={pair[0]}", "tgt_len=8", *reading)
    found = measured(RECL(**KNOBS | {"against": [pair[1]]}), subject)
    assert found["contexts"] == [5, 10, 15, 20, 25] and list(found["models"]) == list(pair)
    assert found["positions"][0] == 25 and found["positions"][-1] == len(subject.split.tokens) - 1 == 999
    assert len(found["positions"]) == 9
    for name in pair:
        for context, row, mean in zip(found["contexts"], found["nll"][name], found["mean_nll"][name], strict=True):
            slow = [nll_by_hand(subject.other(name), target, context) for target in found["positions"][:3]]
            assert row[:3] == pytest.approx(slow, rel=1e-4)
            assert mean == pytest.approx(sum(row) / 9)
        assert abs(found["nll"][name][0][0] - found["nll"][name][1][0]) > 1e-3 or "mem_len=null" in reading


def test_gains_and_lengths_by_plain_loops(pair):
    subject = subject_of(f"checkpoint={pair[0]}", "mem_len=40")
    knobs = KNOBS | {"against": [pair[1]], "ratios": [0.1, 0.3, 1.0], "threshold": 0.02}
    found = measured(RECL(**knobs), subject)
    for one, ratio in zip(found["ratios"], knobs["ratios"], strict=True):
        assert one["ratio"] == ratio
        for model, name in enumerate(pair):
            tables = [[found["nll"][other][context] for other in pair] for context in range(5)]
            slow = [gain_by_hand(tables[c], tables[c + 1], model, ratio) for c in range(4)]
            assert one["gains"][name] == pytest.approx(slow, abs=1e-12) and min(slow) >= 0
            first = next((context for context, gain in zip(found["contexts"], slow, strict=False) if gain < 0.02), None)
            assert one["recl"][name] == {"tokens": first or 25, "at_least": first is None}


def test_the_length_is_where_the_gain_first_falls_below_the_threshold():
    """One position whose loss falls by 0.5, 0.25, 0.125, ... with each step."""
    instrument = RECL(**KNOBS | {"ratios": [1.0]})
    nll = {"a": [[2 * 0.5**step] for step in range(2, 7)], "b": [[9.0]] * 5}
    gains = [1 - math.exp(-(0.5**step)) for step in range(2, 6)]
    for threshold, expected in ((0.3, (5, False)), (0.2, (10, False)), (0.05, (20, False)), (0.01, (25, True))):
        instrument = RECL(**KNOBS | {"threshold": threshold})
        one = instrument._lengths({"contexts": [5, 10, 15, 20, 25], "nll": nll}, 1.0)
        assert one["gains"]["a"] == pytest.approx(gains) and one["gains"]["b"] == [0] * 4
        assert one["recl"]["a"] == dict(zip(("tokens", "at_least"), expected, strict=True))
        assert one["recl"]["b"] == {"tokens": 5, "at_least": False}


def test_every_knob_changes_something(pair):
    subject = subject_of(f"checkpoint={pair[0]}", "mem_len=40")
    knobs = {name: value for name, value in KNOBS.items() if name != "threshold"}
    before = measured(RECL(**KNOBS), subject)
    others = {"against": [pair[1]], "positions": 4, "step": 4, "longest": 30, "ratios": [0.5]}
    assert others.keys() == knobs.keys()
    for name, value in others.items():
        assert measured(RECL(**KNOBS | {name: value}), subject)["ratios"] != before["ratios"], name


def test_as_a_user_asks_for_it(trained_run):
    other = finished("other", "model/memory=compressive", "model.memory.mem_len=8", "steps=1")
    knobs = ["measure=recl", "measure.positions=20", "measure.step=8", "measure.longest=40"]
    outcome = in_process("evaluate", f"checkpoint={trained_run}", f"measure.against=[{other}]", *knobs, "out=o.json")
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    said, found = json.loads(line), json.loads(Path("o.json").read_text())
    assert found["complete"] and found["contexts"] == [8, 16, 24, 32, 40]
    lengths = {str(one["ratio"]): one["recl"] for one in found["ratios"]}
    assert "mem_len is shorter than measure.longest=40" in said.pop("warning") and "compressive" not in str(said)
    assert said == {"measure": "RECL", "split": "test", "recl": lengths}
    assert [found["models"][str(run)]["mem_len"] for run in (trained_run, other)] == [16, 8]
    assert lengths.keys() == {"0.1", "0.5", "1.0"} and lengths["0.1"].keys() == {str(trained_run), str(other)}
    assert Path("o.png").read_bytes()[:4] == b"\x89PNG"
    alone = in_process("evaluate", f"checkpoint={trained_run}", *knobs, "mem_len=40", "out=alone.json")
    assert alone.status == 0 and "warning" not in json.loads(alone.stdout)
    subject = subject_of(f"checkpoint={loud(other, 'loud.pt')}")  # whose keys cannot be kept
    found = measured(RECL(**KNOBS | {"longest": 60, "step": 20}), subject)
    slow = [nll_by_hand(subject, target, 60) for target in found["positions"]]
    assert found["nll"]["loud.pt"][2] == pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize("through", [0, 1, 3])
def test_contexts_that_were_through_before_an_interruption_are_kept(through, trained_run, capsys, monkeypatch):
    monkeypatch.setattr("txl.instruments.recl.AT_ONCE", 25)  # five, two, ... positions side by side
    subject = subject_of(f"checkpoint={trained_run}")
    instrument = RECL(**KNOBS)
    whole, ends, found = measured(instrument, subject), [], {}
    for place, share in enumerate(instrument.run(subject, found, Path("o.json"))):
        ends += [place] if share * 9 * 75 in (pytest.approx(45), pytest.approx(135), pytest.approx(270)) else []
    last = [0, *ends][through]
    answers = iter([*[None] * last, *[signal.SIGINT] * 2])
    with pytest.raises(Stopped) as stop:
        take(instrument, subject, Path("o.json"), received=lambda: next(answers))
    assert stop.value.status == 130 and capsys.readouterr().out == ""
    kept = json.loads(Path("o.json").read_text())
    assert not kept["complete"] and kept["contexts"] == [5, 10, 15, 20, 25][:through]
    (name,) = kept["nll"]
    assert kept["nll"][name] == whole["nll"][name][:through]
    assert len(kept["ratios"]) == (2 if through else 0) and Path("o.png").exists()
    for one, other in zip(kept["ratios"], whole["ratios"], strict=False):
        assert one["gains"][name] == other["gains"][name][: through - 1]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.positions=0", "measure.positions"),
        ("measure.positions=980", "measure.positions"),
        ("measure.step=0", "measure.step"),
        ("measure.longest=63", "measure.longest"),
        ("measure.longest=1024", "measure.longest"),
        ("measure.ratios=[]", "measure.ratios"),
        ("measure.ratios=[0.5,0]", "measure.ratios"),
        ("measure.ratios=[1.5]", "measure.ratios"),
        ("measure.ratios=[0.5,0.5]", "measure.ratios"),
        ("measure.threshold=0", "measure.threshold"),
        ("measure.threshold=1", "measure.threshold"),
        ("measure.against=nowhere", "measure.against"),
        ("measure.against=[nowhere]", "measure.against"),
    ],
)
def test_a_bad_value_is_refused(override, key, trained_run):
    refused(in_process("evaluate", f"checkpoint={trained_run}", "measure=recl", "out=o.json", override), key)
    assert not Path("o.json").exists()


def test_a_group_that_does_not_read_the_same_tokens_is_refused(trained_run):
    text = b"abc de\n" * 200
    rotary = ["data.max_bytes=null", "model/position=rotary", "steps=1"]
    other = finished("other", *text_data(train=text, valid=text, test=text), *rotary)
    content = torch.load(trained_run / "best.pt", weights_only=True)
    letters = json.dumps({"kind": "characters", "characters": "".join(map(chr, range(200)))})
    archive.write(Path("letters.pt"), {**content, "vocab": letters})
    asked = ["evaluate", f"checkpoint={trained_run}", "measure=recl", "measure.longest=64", "measure.positions=5"]
    asked.append("out=o.json")
    for name, words in {other: "text", "letters.pt": "vocabulary", trained_run: "already"}.items():
        line = refused(in_process(*asked, f"measure.against=['{name}']"), "measure.against")
        assert words in line and str(name) in line
    asked += [f"measure.against=['{other}']", "data.test=test.txt"]
    assert in_process(*asked).status == 0
    assert "RotaryPosition" in refused(in_process(*asked, "clamp_len=8"), "measure.against")
