import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import finished, in_process, refused, text_data
from loud import loud, measured, subject_of

from txl.evaluation import evaluate
from txl.instruments.context import Context
from txl.instruments.taking import take
from txl.signals import Stopped

SMALL = "data.max_bytes=3000"  # 149 targets


def by_hand(subject, *, max_segments=None, **reading):
    """The slow twin: a list of (tokens seen, nll) by a loop over lanes, documents and segments, the memory carried."""
    model, tokens = subject.model(**reading), torch.from_numpy(subject.split.tokens.astype("int64"))[None]
    n_target, tgt_len, pairs = tokens.shape[1] - 1, subject.tgt_len, []
    lane_len = -(-n_target // subject.batch_size)
    borders = subject.split.borders
    marks = None if borders is None else torch.zeros_like(tokens, dtype=torch.bool)
    if marks is not None:
        marks[0, borders.tolist()] = True
    for lane in range(0, n_target, lane_len):
        end, mems, before = min(lane + lane_len, n_target), None, -1
        for start in range(lane, end, tgt_len)[:max_segments]:
            stop = min(start + tgt_len, end)
            starts = None if marks is None else marks[:, start:stop]
            nll, mems = model(tokens[:, start:stop], mems, tokens[:, start + 1 : stop + 1], starts=starts)
            for offset, loss in enumerate(nll[0].tolist()):
                before = 0 if starts is not None and starts[0, offset] else before + 1
                kept = model.memory.mem_len or 0
                window = kept - 1 if kept and model.same_length else kept + offset
                pairs.append((min(before, window), loss))
    return pairs


@pytest.mark.parametrize("same_length", ["false", "true"])
@pytest.mark.parametrize(("batch_size", "max_segments"), [(1, None), (3, 2)])
def test_each_pair_is_the_figure_and_the_loss_by_what_is_seen(same_length, batch_size, max_segments, trained_run):
    file = loud(trained_run, "loud.pt")
    settings = [f"checkpoint={file}", SMALL, "tgt_len=7", f"batch_size={batch_size}", f"same_length={same_length}"]
    subject = subject_of(*settings)
    found = measured(Context(mem_lens=[None, 5, 40], clamp_lens=[None, 3], max_segments=max_segments), subject)
    edges, nlls, furthest = found["seen"], [], 0
    pairs = [(one["mem_len"], one["clamp_len"]) for one in found["settings"]]
    assert pairs == list(itertools.product([None, 5, 40], [None, 3]))
    for one in found["settings"]:
        reading = {"mem_len": one["mem_len"], "clamp_len": one["clamp_len"]}
        how = {"tgt_len": 7, "batch_size": batch_size, "precision": "fp32", "max_segments": max_segments}
        figure = evaluate(subject.model(**reading), subject.split, **how)
        for name in ("nll", "ppl", "bits_per_token", "bits_per_byte"):
            assert one[name] == pytest.approx(figure[name], rel=1e-12)
        for name in ("tokens", "bytes", "mem_len", "clamp_len", "same_length"):
            assert one[name] == figure[name]
        slow = by_hand(subject, max_segments=max_segments, **reading)
        for k, (first, end) in enumerate(itertools.pairwise(edges)):
            inside = [loss for seen, loss in slow if first <= seen < end]
            assert one["tokens_by_seen"][k] == len(inside)
            mean = sum(inside) / len(inside) if inside else None
            assert one["nll_by_seen"][k] == (mean and pytest.approx(mean, rel=1e-5))
            error = np.std(inside) / len(inside) ** 0.5 if inside else None
            assert one["error_by_seen"][k] == (pytest.approx(error, rel=1e-3, abs=1e-5) if inside else None)
        assert sum(one["tokens_by_seen"]) == len(slow) == one["tokens"]
        nlls.append(one["nll"])
        furthest = max(furthest, *(seen for seen, _ in slow))
    assert len(set(nlls)) == 6
    assert edges[0] == 0 and edges[-1] == furthest + 1 and len(edges) <= 33
    best = min(found["settings"], key=lambda one: one["nll"])
    assert found["best"] == {name: best[name] for name in ("mem_len", "clamp_len", "nll", "ppl")}


def test_what_is_seen_ends_where_a_document_begins():
    data = text_data(train=b"abc de\nfg hijkl mno\n" * 60, valid=b"ab cd\n" * 9, test=b"abcdefghi\nklm n\n\nop\n" * 5)
    reset = ["data.document_separator='\\n'", "data.reset_at_document=true"]
    run = finished("documents", *data, *reset, "data.max_bytes=null")
    subject = subject_of(f"checkpoint={loud(run, 'loud.pt')}", "tgt_len=4", "batch_size=2")
    found = measured(Context(mem_lens=[6], clamp_lens=[None], max_segments=None), subject)
    (one,) = found["settings"]
    slow = by_hand(subject, mem_len=6)
    assert found["seen"] == list(range(len(found["seen"])))
    assert one["tokens_by_seen"] == [sum(seen == k for seen, _ in slow) for k in found["seen"][:-1]]
    assert one["nll"] == pytest.approx(sum(loss for _, loss in slow) / len(slow), rel=1e-6)


def test_there_are_at_most_32_bins(trained_run):
    subject = subject_of(f"checkpoint={trained_run}", "tgt_len=100")
    found = measured(Context(mem_lens=[500], clamp_lens=[None], max_segments=None), subject)
    edges = found["seen"]
    assert edges[:4] == [0, 1, 2, 3] and edges[-1] == 600 and 20 < len(edges) <= 33
    assert sum(found["settings"][0]["tokens_by_seen"]) == 999


def test_as_a_user_asks_for_it(trained_run):
    short = ["measure=context", "measure.mem_lens=[null,16,32]", "measure.clamp_lens=[null,8]"]
    outcome = in_process("evaluate", f"checkpoint={trained_run}", "split=valid", "out=o.json", *short)
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    found, said = json.loads(Path("o.json").read_text()), json.loads(line)
    assert said == {"measure": "Context", "split": "valid", "best": found["best"]}
    assert found["complete"] and len(found["settings"]) == 6
    assert Path("o.png").read_bytes()[:4] == b"\x89PNG"
    for one in found["settings"]:
        pair = [f"{name}={json.dumps(one[name])}" for name in ("mem_len", "clamp_len")]
        figure = json.loads(
            in_process("evaluate", f"checkpoint={trained_run}", "split=valid", "out=f.json", *pair).stdout
        )
        assert figure["nll"] == pytest.approx(one["nll"], rel=1e-12)
    one = ["measure=context", "measure.mem_lens=[8]", "measure.max_segments=1", "out=t.json"]
    said = json.loads(in_process("evaluate", f"checkpoint={trained_run}", *one).stdout)
    assert "split=valid" in said["warning"] and json.loads(Path("t.json").read_text())["settings"][0]["tokens"] == 16


def test_memories_of_other_kinds_are_read_with_other_lengths():
    run = finished(
        "compressive", "model/memory=compressive", "model.memory.mem_len=8", "model/position=rotary", "steps=1"
    )
    subject = subject_of(f"checkpoint={loud(run, 'loud.pt')}", SMALL)
    found = measured(Context(mem_lens=[None, 4, 12], clamp_lens=[None], max_segments=None), subject)
    for one in found["settings"]:
        slow = by_hand(subject, mem_len=one["mem_len"])
        assert one["nll"] == pytest.approx(sum(loss for _, loss in slow) / len(slow), rel=1e-5)
    clamped = ["measure=context", "measure.clamp_lens=[null,8]"]
    line = refused(in_process("evaluate", f"checkpoint={run}", *clamped), "measure.clamp_lens")
    assert "RotaryPosition" in line


@pytest.mark.parametrize("through", [0, 2])
def test_what_was_read_before_an_interruption_is_kept(through, trained_run, capsys):
    subject = subject_of(f"checkpoint={trained_run}", "data.max_bytes=60000", "split=valid", "batch_size=2")
    instrument = Context(mem_lens=[None, 8, 16], clamp_lens=[None], max_segments=None)
    whole = measured(instrument, subject)
    shares = list(instrument.run(subject, {}, Path("o.json")))
    assert shares == pytest.approx([number / 9 for number in range(1, 10)], abs=0.01)  # three for each length
    assert len(list(replace(instrument, max_segments=1).run(subject, {}, Path("o.json")))) == 3  # reads no more
    answers = iter([*[None] * (3 * through), *[signal.SIGINT] * 2])
    with pytest.raises(Stopped) as stop:
        take(instrument, subject, Path("o.json"), received=lambda: next(answers))
    assert stop.value.status == 130 and "o.json" in str(stop.value)
    found = json.loads(Path("o.json").read_text())
    assert not found["complete"] and found["settings"] == whole["settings"][:through]
    assert (found["best"] is None) == (through == 0)
    assert Path("o.png").exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.mem_lens=[]", "measure.mem_lens"),
        ("measure.mem_lens=[8,0]", "measure.mem_lens"),
        ("measure.mem_lens=[8,8]", "measure.mem_lens"),
        ("measure.mem_lens=[many]", "measure.mem_lens"),
        ("measure.mem_lens=8", "measure.mem_lens"),
        ("measure.clamp_lens=[]", "measure.clamp_lens"),
        ("measure.clamp_lens=[-1]", "measure.clamp_lens"),
        ("measure.clamp_lens=[3000000000]", "measure.clamp_lens"),
        ("measure.max_segments=0", "measure.max_segments"),
        ("+measure.mem_len=8", "measure.mem_len"),
        ("mem_len=8", "mem_len"),
        ("clamp_len=null", "clamp_len"),
    ],
)
def test_a_bad_value_is_refused(override, key, trained_run):
    refused(in_process("evaluate", f"checkpoint={trained_run}", "measure=context", "out=o.json", override), key)
    assert not Path("o.json").exists()
