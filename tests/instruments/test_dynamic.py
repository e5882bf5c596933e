"""measure=dynamic: learning from the text that is scored, against plain loops; nothing is learned where nothing is to be."""

import dataclasses
import hashlib
import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_process, mostly_slow, refused
from loud import loud, measured, subject_of
from remade import SCHEMES, remade

from txl.data.streams import Lanes
from txl.evaluation import evaluate, plan
from txl.instruments import dynamic
from txl.instruments.adapting import adapting, training_text
from txl.instruments.dynamic import Dynamic, Rule
from txl.instruments.subject import Subject
from txl.instruments.taking import take
from txl.signals import Stopped

SMALL = "data.max_bytes=3000"  # 149 targets
KNOBS = {"rule": "rms", "lr": 1e-3, "decay": 0, "epsilon": 1e-3, "statistics": 4, "max_segments": None}
FAST = ["measure=dynamic", "measure.statistics=2", "measure.max_segments=3", "out=o.json"]


class InDouble(Subject):
    """Reads in float64."""

    def model(self, **reading):
        return super().model(**reading).double()


def in_double(*overrides: str) -> InDouble:
    subject = subject_of(*overrides)
    return InDouble(**{field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)})


def scored_segments(subject, max_segments):
    """The (tokens, targets) of each lane, segment by segment; a lane that has ended is left out."""
    tokens = torch.from_numpy(subject.split.tokens.astype("int64"))[None]
    n_target, tgt_len = tokens.shape[1] - 1, subject.tgt_len
    lane_len = -(-n_target // subject.batch_size)
    for offset in list(range(0, lane_len, tgt_len))[:max_segments]:
        segment = {}
        for lane in range(0, n_target, lane_len):
            start, stop = lane + offset, min(lane + offset + tgt_len, lane + lane_len, n_target)
            if start < stop:
                segment[lane] = (tokens[:, start:stop], tokens[:, start + 1 : stop + 1])
        yield segment


def total_of(model, subject, segment, mems):
    """The nll of all targets of a segment, lane by lane; each lane's memory moves on."""
    total, n_token = 0.0, 0
    for lane, (tokens, targets) in segment.items():
        lacking = 0 if model.position.by_distance else subject.tgt_len - tokens.shape[1]
        tokens, padded = (torch.nn.functional.pad(one, (0, lacking)) for one in (tokens, targets))
        nll, mems[lane] = model(tokens, mems.get(lane), padded)
        total, n_token = total + nll[:, : targets.shape[1]].sum(), n_token + targets.numel()
    return total, n_token


def by_hand(subject, *, rule, lr, decay, epsilon, statistics, max_segments):
    """The slow twin: the nll, the model, and how far the nll of each segment is from what it was without updates."""
    model = subject.model()
    start = [weight.detach().clone() for weight in model.parameters()]
    squares = [torch.zeros_like(weight) for weight in start]
    text = torch.from_numpy(subject.corpus.split("train", subject.vocab).tokens.astype("int64"))[None]
    lane_len, mems = (text.shape[1] - 1) // subject.batch_size, {}
    for number in range(statistics):
        places = [lane * lane_len + number * subject.tgt_len for lane in range(subject.batch_size)]
        both = {place: text[:, place : place + subject.tgt_len + 1] for place in places}
        carried = {place: mems.get(place - subject.tgt_len) for place in places}
        segment = {place: (one[:, :-1], one[:, 1:]) for place, one in both.items()}
        total, n_token = total_of(model, subject, segment, carried)
        mems = carried
        model.zero_grad()
        (total / n_token).backward()
        for square, weight in zip(squares, model.parameters(), strict=True):
            square += 0 if weight.grad is None else weight.grad**2
    whole, n_whole, mems = 0.0, 0, {}
    for segment in scored_segments(subject, max_segments):
        total, n_token = total_of(model, subject, segment, mems)
        whole, n_whole = whole + total.item(), n_whole + n_token
        model.zero_grad()
        (total / n_token).backward()
        with torch.no_grad():
            for weight, first, square in zip(model.parameters(), start, squares, strict=True):
                if weight.grad is None:
                    continue
                if rule == "sgd":
                    weight.copy_(weight - lr * weight.grad - decay * (weight - first))
                else:
                    pull = torch.minimum(decay * square.sqrt(), torch.ones_like(square))
                    weight.copy_(weight - lr * weight.grad / (square.sqrt() + epsilon) - pull * (weight - first))
    return whole / n_whole, n_whole


@pytest.mark.parametrize(
    ("scheme", "rule", "batch_size", "max_segments"),
    [
        *((scheme, "rms", 3, None) for scheme in SCHEMES),
        ("relative", "sgd", 1, None),
        ("absolute", "sgd", 1, None),
        ("relative", "rms", 2, 2),
    ],
)
def test_it_equals_a_plain_loop(scheme, rule, batch_size, max_segments, trained_run):
    file = remade(trained_run, "other.pt", *SCHEMES[scheme])
    subject = in_double(f"checkpoint={file}", SMALL, "tgt_len=15", f"batch_size={batch_size}")
    knobs = {**KNOBS, "rule": rule, "lr": 0.05, "decay": 0.1, "epsilon": 0.01, "max_segments": max_segments}
    found = measured(Dynamic(**knobs), subject)
    nll, n_token = by_hand(subject, **knobs)
    assert found["dynamic"]["tokens"] == found["static"]["tokens"] == n_token
    assert found["dynamic"]["nll"] == pytest.approx(nll, rel=1e-9)
    limits = dict(tgt_len=15, batch_size=batch_size, precision="fp32", max_segments=max_segments)
    assert found["static"] == evaluate(subject.model(), subject.split, **limits)
    assert abs(found["dynamic"]["nll"] - found["static"]["nll"]) > 1e-4


@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, fast=3))
def test_updates_of_size_zero_change_no_bit(scheme, trained_run):
    """The path of the updates, with none, with some of size zero, and the plain figure, which agrees to rounding."""
    file = remade(trained_run, "other.pt", *SCHEMES[scheme])
    for kind, rel in ((subject_of, 1e-6), (in_double, 1e-12)):
        subject = kind(f"checkpoint={file}", SMALL, "tgt_len=15", "batch_size=2")
        model, reading = subject.model(), {"tgt_len": 15, "batch_size": 2}
        before = [weight.detach().clone() for weight in model.parameters()]
        lanes = plan(model, 149, warmed=1, **reading).lanes
        found = {}
        for rule in ("none", "sgd", "rms"):
            update = (
                Rule(Dynamic(**{**KNOBS, "rule": rule, "lr": 0}), model) if rule != "none" else lambda gradients: None
            )
            nll = [nll[segment.scored] for segment, nll in adapting(model, subject, lanes, update)]
            found[rule] = torch.cat(nll)
        assert torch.equal(found["sgd"], found["none"]) and torch.equal(found["rms"], found["none"])
        assert all(map(torch.equal, before, model.parameters()))
        plain = evaluate(model, subject.split, precision="fp32", **reading)
        assert found["none"].double().mean().item() == pytest.approx(plain["nll"], rel=rel)


@pytest.mark.parametrize("rule", ["sgd", "rms"])
@pytest.mark.parametrize(
    "reading", [[], ["split=valid", "batch_size=3", "tgt_len=7", "mem_len=30", "same_length=true"]]
)
def test_without_a_rate_it_is_the_plain_figure_bit_for_bit(rule, reading, trained_run):
    file = loud(trained_run, "loud.pt")
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    plain = in_process("evaluate", f"checkpoint={file}", *reading, "out=plain.json")
    assert plain.status == 0, plain.stderr
    knobs = ["measure=dynamic", "measure.lr=0", f"measure.rule={rule}", "measure.decay=0.5"]
    outcome = in_process("evaluate", f"checkpoint={file}", *reading, *knobs, "out=o.json")
    assert outcome.status == 0, outcome.stderr
    found = json.loads(Path("o.json").read_text())
    assert found["dynamic"] == found["static"] == json.loads(plain.stdout) == json.loads(Path("plain.json").read_text())
    assert found["along"]["dynamic"] == found["along"]["static"]
    assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest


def test_as_a_command(trained_run):
    file = loud(trained_run, "loud.pt")
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    outcome = in_process("evaluate", f"checkpoint={file}", *FAST)
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    printed, found = json.loads(line), json.loads(Path("o.json").read_text())
    assert found["complete"] and found["settings"]["lr"] == 1e-3 and found["settings"]["max_segments"] == 3
    for name in ("nll", "ppl", "bits_per_byte"):
        assert printed[name] == found["dynamic"][name] and printed[f"static_{name}"] == found["static"][name]
    assert found["dynamic"]["tokens"] == 48 and printed["nll"] != printed["static_nll"]
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")
    assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest
    assert sorted(path.name for path in Path().iterdir()) == ["loud.pt", "o.json", "o.png"]


def test_what_was_loaded_stays_as_it_is(trained_run):
    subject = subject_of(f"checkpoint={loud(trained_run, 'loud.pt')}", SMALL)
    before = {name: tensor.clone() for name, tensor in subject.content["model"].items()}
    found = measured(Dynamic(**{**KNOBS, "lr": 0.1}), subject)
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.content["model"].items())
    assert measured(Dynamic(**{**KNOBS, "lr": 0.1}), subject) == found


@pytest.mark.parametrize(("batch_size", "points"), [(1, 100), (1, 4), (3, 2)])
def test_the_stretches_along_the_text(batch_size, points, trained_run, monkeypatch):
    """They hold all tokens, and each its own: their mean is the figure."""
    monkeypatch.setattr(dynamic, "POINTS", points)
    subject = subject_of(f"checkpoint={loud(trained_run, 'loud.pt')}", SMALL, f"batch_size={batch_size}", "tgt_len=16")
    found = measured(Dynamic(**{**KNOBS, "lr": 0.01}), subject)
    along = {name: np.array(values) for name, values in found["along"].items()}
    n_segment = math.ceil(math.ceil(149 / batch_size) / 16)
    assert len(along["tokens"]) == min(points, n_segment) and along["tokens"].sum() == 149
    for name in ("dynamic", "static"):
        assert (along["tokens"] * along[name]).sum() / 149 == pytest.approx(found[name]["nll"], rel=1e-12)
    if points == 100:
        assert along["tokens"].tolist() == [16] * 9 + [5]
        assert along["dynamic"][0] == pytest.approx(along["static"][0], rel=1e-5)  # nothing was learned yet
        assert along["dynamic"][1] != pytest.approx(along["static"][1], rel=1e-5)


def test_every_knob_counts(trained_run):
    file = loud(trained_run, "loud.pt")

    def nll(*overrides, **knobs):
        subject = subject_of(f"checkpoint={file}", SMALL, *overrides)
        return measured(Dynamic(**{**KNOBS, "lr": 0.01, **knobs}), subject)["dynamic"]["nll"]

    plain = nll()
    changes = ({"rule": "sgd"}, {"lr": 0.02}, {"decay": 0.5}, {"epsilon": 0.1}, {"statistics": 5}, {"max_segments": 2})
    for knobs in changes:
        assert nll(**knobs) != plain, knobs
    assert nll(rule="sgd", decay=0.5) != nll(rule="sgd")
    for override in ("precision=bf16", "batch_size=2", "tgt_len=8", "mem_len=null"):
        assert math.isfinite(nll(override)) and nll(override) != plain, override


def test_a_memory_that_learns_is_taught_nothing(trained_run):
    subject = subject_of(f"checkpoint={remade(trained_run, 'other.pt', *SCHEMES['compressive'])}", SMALL)
    model = subject.model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lanes = plan(model, 149, tgt_len=16, batch_size=1, warmed=1).lanes
    list(adapting(model, subject, lanes, Rule(Dynamic(**{**KNOBS, "rule": "sgd", "lr": 0.01}), model)))
    same = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert same == {name for name in before if name.startswith("memory.")} != set()


@pytest.mark.parametrize(
    ("given", "n_token"),
    [([], 18000), ([SMALL], 2700), (["data.test=own.txt"], 18000), (["data.test=own.txt", SMALL], 2700)],
)
def test_the_statistics_are_never_those_of_the_text_that_is_scored(given, n_token, trained_run):
    Path("own.txt").write_bytes(bytes(range(256)))
    subject = subject_of(f"checkpoint={trained_run}", *given)
    text = training_text(subject)
    run = subject_of(f"checkpoint={trained_run}", "split=train")
    assert text.name == "train" and len(text.tokens) == n_token
    assert bytes(text.tokens[:n_token]) == bytes(run.split.tokens[:n_token])


def test_documents_are_kept_apart_in_training_text_and_test(trained_run):
    Path("lines.txt").write_bytes(b"abc bca\ncab\n" * 20)
    file, both = loud(trained_run, "loud.pt"), ["data.train=lines.txt", "split=train", "data.document_separator='\\n'"]
    apart = subject_of(f"checkpoint={file}", *both, "data.reset_at_document=true")
    found = measured(Dynamic(**{**KNOBS, "lr": 0.01}), apart)
    plain = evaluate(apart.model(), apart.split, tgt_len=16, batch_size=1, precision="fp32")
    assert found["static"] == plain and math.isfinite(found["dynamic"]["nll"])
    together = measured(Dynamic(**{**KNOBS, "lr": 0.01}), subject_of(f"checkpoint={file}", *both))
    assert together["dynamic"]["nll"] != found["dynamic"]["nll"]
    lanes = Lanes(apart.split.tokens, batch_size=1, tgt_len=16, borders=apart.split.borders)
    assert next(lanes).starts.any()


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_interrupted_it_keeps_what_it_has(stop, trained_run):
    """Shares: one of the figure, which a CPU reads at once, four of the statistics, one for each segment."""
    subject, shares = subject_of(f"checkpoint={trained_run}", SMALL), []

    def received():
        shares.append(1)
        return signal.SIGINT if len(shares) > stop else None

    with pytest.raises(Stopped) as stopped:
        take(Dynamic(**KNOBS), subject, Path("o.json"), received=received)
    found = json.loads(Path("o.json").read_text())
    assert stopped.value.status == 130 and "interrupted" in str(stopped.value)
    assert not found["complete"] and found["static"]["tokens"] == 149
    assert ("dynamic" in found) == (stop > 4)
    if stop > 4:
        assert found["dynamic"]["tokens"] > 0 and found["along"]["tokens"][0] == 16
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")


def test_a_rate_that_is_too_high_is_named_and_what_was_found_is_kept(trained_run):
    outcome = in_process("evaluate", f"checkpoint={trained_run}", *FAST, "measure.lr=1.0e+30")
    assert refused(outcome, "measure.lr").endswith("what was found by then stands in o.json")
    found = json.loads(Path("o.json").read_text())
    assert not found["complete"] and found["static"]["tokens"] == 48 and Path("o.png").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.rule=adam", "measure.rule"),
        ("measure.lr=-1", "measure.lr"),
        ("measure.lr=.inf", "measure.lr"),
        ("measure.lr=.nan", "measure.lr"),
        ("measure.decay=-0.1", "measure.decay"),
        ("measure.rule=sgd measure.decay=1.5", "measure.decay"),
        ("measure.epsilon=0", "measure.epsilon"),
        ("measure.statistics=0", "measure.statistics"),
        ("measure.statistics=2.5", "measure.statistics"),
        ("measure.max_segments=0", "measure.max_segments"),
        ("+measure.clip=1", "measure.clip"),
        ("precision=fp16", "precision"),
        ("data.train=missing.txt split=train", "data.train"),
        ("batch_size=2000", "batch_size"),
    ],
)
def test_a_bad_value_is_one_line(override, key, trained_run):
    outcome = in_process("evaluate", f"checkpoint={trained_run}", *FAST, *override.split())
    refused(outcome, key)
    assert not Path("o.json").exists()
