"""What all measurements have in common: where their files go, what they keep, what stands beside a figure."""

import errno
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from conftest import finished, in_process, refused, text_data

from txl import evaluation, report, runtime

MEASURES = {
    "tokens": [],
    "dynamic": ["measure.rule=sgd", "measure.max_segments=2"],
    "attention": ["measure.length=40"],
    "hidden": ["measure.max_tokens=40"],
    "page": ["measure.length=20"],
    "sliding": ["measure.lengths=[8]", "measure.tokens=2", "measure.repeats=1"],
    "context": ["measure.mem_lens=[8]", "measure.max_segments=2"],
    "recl": ["measure.positions=2", "measure.longest=64"],
}
CHINESE = "".join(chr(0x4E00 + 7 * n % 999) for n in range(300)) + "\n"


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("best.pt", [[], ["measure=tokens"]]),
        ("other.pt", [[], ["measure=tokens"]]),
        ("result.json", [[], ["measure=tokens"]]),
        ("curves.json", [["measure=tokens"]]),
        ("o.png", [["measure=tokens"], ["measure=attention"]]),
        ("o.npz", [["measure=attention"]]),
        ("o.html", [["measure=page"]]),
        ("o.parquet", [["measure=tokens"]]),
        ("o.safetensors", [["measure=hidden"]]),
    ],
)
def test_no_file_of_a_run_and_no_picture_is_written_over(name, measures, trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "copy")
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    for measure in measures:
        line = refused(in_process("evaluate", f"checkpoint={run}", *measure, f"out={run / name}"), "out")
        assert name.partition(".")[0] in line
        assert {file.name: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("measure", MEASURES)
def test_what_a_figure_was_measured_with_stands_beside_it(measure, trained_run):
    how = ["same_length=true", *([] if measure == "context" else ["mem_len=24", "clamp_len=20"])]
    outcome = in_process(
        "evaluate", f"checkpoint={trained_run}", f"measure={measure}", *MEASURES[measure], *how, "out=o.json"
    )
    assert outcome.status == 0, outcome.stderr
    found = json.loads(Path("o.json").read_text())
    assert found["same_length"] is True and found["step"] > 0 and found["split"] == "test"
    if measure == "context":
        assert "mem_len" not in found and found["settings"][0]["mem_len"] == 8
    elif measure == "sliding":
        assert "mem_len" not in found and found["clamp_len"] == 20
    else:
        assert (found["mem_len"], found["clamp_len"]) == (24, 20)


@pytest.mark.parametrize("measure", ["figure", *MEASURES])
def test_a_full_disk_is_one_line_and_the_summary_is_printed(measure, trained_run, monkeypatch):
    digest = hashlib.sha256((trained_run / "best.pt").read_bytes()).digest()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("txl.instruments.taking.write_json", full)
    if measure == "figure":
        monkeypatch.setattr(runtime, "write_json", full)
        monkeypatch.setattr("txl.runs.write_json", lambda *_: None)
    outcome = in_process(
        "evaluate", f"checkpoint={trained_run}", f"measure={measure}", *MEASURES.get(measure, []), "out=o.json"
    )
    assert outcome.status == 1
    assert outcome.stderr.splitlines()[-1].startswith("out: ") and "No space left" in outcome.stderr.splitlines()[-1]
    assert json.loads(outcome.stdout)
    assert hashlib.sha256((trained_run / "best.pt").read_bytes()).digest() == digest


def test_what_has_no_bytes_or_words_has_no_figure_of_them():
    found = evaluation.figure(2.0, 4, 0, 0)
    assert found["nll"] == 0.5 and found["bits_per_byte"] is None and found["ppl_per_word"] is None
    assert found["words"] == 0 == found["bytes"]
    assert evaluation.figure(2.0, 4, 8, 2)["ppl_per_word"] == pytest.approx(2.718281828)


@pytest.mark.parametrize(
    ("vocab", "scored"),
    [
        (["data/vocab=bpe", "data.vocab.max_size=300"], CHINESE),  # long stretches without a border between words
        (["data/vocab=words"], "one"),  # of which the line end alone is scored
    ],
)
def test_a_text_without_words_or_bytes_is_trained_on_measured_and_reported(vocab, scored):
    given = text_data(train=CHINESE.encode() * 9 + b"one two\n" * 90, valid=CHINESE.encode(), test=scored.encode())
    small = ["tgt_len=16", "steps=3", "eval.max_segments=1"]
    run = finished("run", *given, *vocab, *small)
    for measure in ("figure", "dynamic", "context", "tokens"):
        knobs = ["measure.lr=0"] if measure == "dynamic" else []
        outcome = in_process("evaluate", f"checkpoint={run}", f"measure={measure}", *knobs, "out=o.json")
        assert outcome.status == 0, outcome.stderr
    assert report.main([str(run.parent), "--plot", "p.png", "--csv", "p.csv"]) == 0
