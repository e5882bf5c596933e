"""measure=sliding: the vanilla window and ours read what they say they read; no test looks at a clock but one of our own."""

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from conftest import in_process, mostly_slow, refused
from loud import loud, measured, subject_of
from remade import SCHEMES, remade

from txl.instruments import sliding
from txl.instruments.sliding import Sliding, Taken, timed
from txl.instruments.taking import take
from txl.signals import Stopped

SMALL = ["measure=sliding", "measure.lengths=[8,20]", "measure.tokens=5", "measure.repeats=1", "out=o.json"]


@pytest.fixture
def quick(monkeypatch):
    """No more than what the window predicts is read, all in one go."""
    monkeypatch.setattr(sliding, "OURS", 1)
    monkeypatch.setattr(sliding, "BURST", math.inf)


def by_windows(subject, *, length, first, n_target):
    """The slow twin of the vanilla way: each window by itself, a model without memory; absolute places need a whole segment."""
    model, tokens, nll = subject.model(mem_len=None), torch.from_numpy(subject.split.tokens.astype("int64")), []
    for place in range(first, first + n_target):
        window = tokens[place - length + 1 : place + 1]
        if not model.position.by_distance and length < subject.tgt_len:
            window = torch.cat([window, window.new_zeros(subject.tgt_len - length)])
        log_probs, _ = model(window[None])
        nll.append(-log_probs[0, length - 1, tokens[place + 1]].item())
    return sum(nll) / n_target


def by_segments(subject, *, length, first, n_target):
    """The slow twin of ours: from the beginning of the text, hidden states carried."""
    model, tokens = subject.model(mem_len=length), torch.from_numpy(subject.split.tokens.astype("int64"))[None]
    mems, nll = None, []
    for start in range(0, first + n_target, subject.tgt_len):
        both = tokens[:, start : start + subject.tgt_len + 1]
        found, mems = model(both[:, :-1], mems, both[:, 1:])
        nll += found[0].tolist()
    return sum(nll[first : first + n_target]) / n_target


@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, fast=3))
def test_both_ways_equal_slow_ones(scheme, trained_run, quick):
    subject = subject_of(f"checkpoint={remade(trained_run, 'other.pt', *SCHEMES[scheme])}")
    with torch.no_grad():
        for batch in (1, 4):
            found = measured(Sliding(lengths=[20, 8], tokens=10, repeats=2, batch=batch), subject)
            assert [row["length"] for row in found["by_length"]] == [8, 20]
            for row in found["by_length"]:
                stretch = dict(length=row["length"], first=32, n_target=10)  # whole segments before the first target
                assert row["repeats"] == 2
                assert row["vanilla"]["nll"] == pytest.approx(by_windows(subject, **stretch), rel=1e-5)
                assert row["ours"]["nll"] == pytest.approx(by_segments(subject, **stretch), rel=1e-5)
                assert row["vanilla"]["nll"] != pytest.approx(row["ours"]["nll"], rel=1e-5)


def test_a_window_does_not_reach_into_another_document(trained_run):
    Path("lines.txt").write_bytes(b"abc bca\ncab\n" * 20)
    borders = ["data.test=lines.txt", "data.document_separator='\\n'", "data.reset_at_document=true"]
    subject = subject_of(f"checkpoint={loud(trained_run, 'loud.pt')}", *borders)
    text, model = subject.split.tokens, subject.model(mem_len=None)
    windows = sliding.Windows(subject, length=20, batch=3, first=24, n_target=9)
    found = torch.cat(list(windows.read())).tolist()
    for place, nll in zip(range(24, 33), found, strict=True):
        begin = max(start for start in subject.split.starts if start <= place)
        alone = torch.from_numpy(text[begin : place + 2].astype("int64"))[None]
        expected, _ = model(alone[:, :-1], None, alone[:, 1:])
        assert nll == pytest.approx(expected[0, -1].item(), rel=1e-5)


def test_the_clock_runs_only_while_something_is_read(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sliding.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sliding.time, "process_time", lambda: 2 * now[0])

    def steps():
        for _ in range(5):
            now[0] += 0.2
            yield torch.ones(4)

    taken: list[Taken] = []
    for _ in timed(steps(), torch.device("cpu"), taken, n_warming=2):
        now[0] += 100.0  # whoever shows the progress takes his time
    assert (taken[0].wall, taken[0].cpu) == (pytest.approx(0.6 / 12), pytest.approx(1.2 / 12))
    assert taken[0].nll.tolist() == [1.0] * 12


def test_the_median_and_the_slowdown():
    made = [Taken(cpu, wall, torch.tensor([1.0, 3.0, 99.0])) for cpu, wall in ((3.0, 5.0), (1.0, 9.0), (2.0, 7.0))]
    ours = [Taken(0.5, 0.1, torch.tensor([2.0, 3.0]))]
    row = Sliding(lengths=[8], tokens=2, repeats=3, batch=1)._row(8, {"vanilla": made, "ours": ours})
    assert row["vanilla"] == {"cpu_seconds": 2.0, "wall_seconds": 7.0, "nll": 2.0}
    assert row["ours"] == {"cpu_seconds": 0.5, "wall_seconds": 0.1, "nll": 2.5}
    assert (row["cpu_slowdown"], row["wall_slowdown"]) == (4.0, 70.0)


def test_as_a_command(trained_run):
    outcome = in_process("evaluate", f"checkpoint={trained_run}", *SMALL, "measure.batch=2")
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    printed, written = json.loads(line), json.loads(Path("o.json").read_text())
    assert printed["measure"] == written["measure"] == "Sliding" and written["complete"]
    assert printed["lengths"] == [8, 20]
    assert printed["vanilla_nll"] == [row["vanilla"]["nll"] for row in written["by_length"]]
    assert printed["ours_nll"] == [row["ours"]["nll"] for row in written["by_length"]]
    assert all(slowdown > 0 for name in ("wall_slowdown", "cpu_slowdown") for slowdown in printed[name])
    given = {"tokens": 5, "tokens_ours": 999 - 32, "repeats": 1, "batch": 2, "tgt_len": 16, "batch_size": 1}
    assert {name: written[name] for name in given} == given
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")


def test_every_setting_of_the_reading_counts(trained_run, quick, monkeypatch):
    file, calls, once = loud(trained_run, "loud.pt"), [], sliding.Windows.nll

    def counted(self, places):
        calls.append(len(places))
        return once(self, places)

    def rows(*overrides, **knobs):
        calls.clear()
        knobs = {"lengths": [8], "tokens": 5, "repeats": 1, "batch": 1} | knobs
        found = measured(Sliding(**knobs), subject_of(f"checkpoint={file}", *overrides))
        return [row[way]["nll"] for row in found["by_length"] for way in ("vanilla", "ours")]

    monkeypatch.setattr(sliding.Windows, "nll", counted)
    plain = rows()
    assert calls == [1] * 5
    assert rows(lengths=[9]) != plain and rows(tokens=6) != plain
    assert rows(repeats=2) == plain and calls == [1] * 10
    assert rows(batch=3) == pytest.approx(plain, rel=1e-5) and calls == [3, 2]
    for override in ("split=valid", "clamp_len=3", "same_length=true"):
        assert rows(override) != plain, override


@pytest.mark.parametrize(("stop", "through"), [(0, 0), (8, 1)])
def test_interrupted_it_keeps_the_lengths_that_are_through(stop, through, trained_run, quick):
    """Ours is warmed by two segments, and each reading takes one burst: 1 + 3 shares for a length, and one when it is through."""
    subject, shares = subject_of(f"checkpoint={trained_run}"), []
    whole = measured(Sliding(lengths=[8, 20], tokens=5, repeats=1, batch=1), subject)["by_length"]

    def received():
        shares.append(1)
        return signal.SIGINT if len(shares) > stop else None

    with pytest.raises(Stopped) as stopped:
        take(Sliding(lengths=[8, 20], tokens=5, repeats=1, batch=1), subject, Path("o.json"), received=received)
    found = json.loads(Path("o.json").read_text())
    assert stopped.value.status == 130 and not found["complete"]
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")
    assert [row["ours"]["nll"] for row in found["by_length"]] == [row["ours"]["nll"] for row in whole[:through]]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.lengths=[]", "measure.lengths"),
        ("measure.lengths=[8,8]", "measure.lengths"),
        ("measure.lengths=[0]", "measure.lengths"),
        ("measure.lengths=8", "measure.lengths"),
        ("measure.lengths=[900]", "measure.tokens"),
        ("measure.tokens=0", "measure.tokens"),
        ("measure.tokens=968", "measure.tokens"),
        ("measure.tokens=many", "measure.tokens"),
        ("measure.repeats=0", "measure.repeats"),
        ("measure.batch=0", "measure.batch"),
        ("+measure.batches=2", "measure.batches"),
    ],
)
def test_a_bad_value_is_one_line(override, key, trained_run):
    more = ["measure.tokens=200"] if "900" in override else []
    refused(in_process("evaluate", f"checkpoint={trained_run}", *SMALL, override, *more), key)


def test_the_longest_stretch_that_fits(trained_run):
    """The last target is the text's last token."""
    Path("short.txt").write_bytes(b"abc \n" * 20)
    arguments = [f"checkpoint={trained_run}", *SMALL, "data.test=short.txt"]
    outcome = in_process("evaluate", *arguments, "measure.tokens=67")
    assert outcome.status == 0, outcome.stderr
    refused(in_process("evaluate", *arguments, "measure.tokens=68"), "measure.tokens")
