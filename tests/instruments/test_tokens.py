"""measure=tokens: the nll of each token, and where two checkpoints differ."""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import characters_run, finished, in_process, refused
from pyarrow import parquet

from txl import archive, checkpoint
from txl import config as hydra_config
from txl.instruments.rows import write_rows
from txl.instruments.showing import readable, whole_characters
from txl.instruments.subject import Subject
from txl.instruments.taking import take
from txl.instruments.tokens import Tokens
from txl.signals import Stopped

KNOBS = dict(format="jsonl", against=None, top=5, around=4, max_segments=None)


def asked(run, *overrides):
    return hydra_config.plain(hydra_config.compose("evaluate", [f"checkpoint={run}", "measure=tokens", *overrides]))


def slow_nll(run, split="test"):
    """The nll of each token but the first, segment by segment, as the model gives it."""
    content = checkpoint.load(run / "best.pt")
    model, tokens = checkpoint.load_model(content), Subject.of(asked(run, f"split={split}")).split.tokens
    values, mems = [], None
    for start in range(0, len(tokens) - 1, 16):
        both = torch.from_numpy(np.asarray(tokens[start : start + 17]).astype(np.int64))[None]
        nll, mems = model(both[:, :-1], mems, both[:, 1:])
        values += nll[0].tolist()
    return np.array(values), tokens


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to be written to."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def measured(run, *overrides):
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=tokens", "out=o.json", *overrides)
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    return json.loads(line), json.loads(Path("o.json").read_text())


def rows_in(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("split", ["test", "valid"])
def test_every_token_has_a_row_and_their_mean_is_the_figure(run, split):
    expected, tokens = slow_nll(run, split)
    line, found = measured(run, f"split={split}")
    table = parquet.read_table("o.parquet").to_pydict()
    assert list(table) == ["position", "id", "text", "nll"]
    assert table["position"] == list(range(1, len(tokens)))
    assert table["id"] == tokens[1:].tolist()
    assert table["text"] == [readable(bytes([token])) for token in tokens[1:].tolist()]
    np.testing.assert_allclose(table["nll"], expected, rtol=1e-5, atol=1e-6)
    figure = json.loads((run / "result.json").read_text())[split]["nll"]
    assert np.mean(table["nll"]) == pytest.approx(figure, rel=1e-9)
    assert line["nll"] == found["nll"]["mean"] == pytest.approx(figure, rel=1e-9)
    assert line["tokens"] == found["tokens"] == len(expected) and found["complete"]
    assert found["nll"]["quantiles"]["0.5"] == pytest.approx(np.median(expected), rel=1e-5)
    assert sum(found["nll"]["histogram"]["counts"]) == len(expected)
    top = np.sort(expected)[::-1]
    assert found["costliest"]["0.1"] == pytest.approx(top[: round(len(top) / 10)].sum() / top.sum(), rel=1e-5)


def test_the_files_stand_beside_the_figure(run):
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=tokens")
    assert outcome.status == 0, outcome.stderr
    stem = run / "evaluate" / "test-default_measure-tokens"
    assert json.loads(stem.with_suffix(".json").read_text())["file"] == "test-default_measure-tokens.parquet"
    assert len(parquet.read_table(stem.with_suffix(".parquet"))) == 999
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_json_lines_hold_what_parquet_holds(run):
    measured(run)
    table = parquet.read_table("o.parquet").to_pylist()
    _, found = measured(run, "measure.format=jsonl")
    assert rows_in("o.jsonl") == table and found["file"] == "o.jsonl"


def test_the_costliest_tokens_are_listed_with_the_text_around_them(run):
    expected, tokens = slow_nll(run)
    _, found = measured(run, "measure.top=7", "measure.around=3")
    assert found["listed_by"] == "nll" and len(found["listed"]) == 7
    order = sorted(range(len(expected)), key=lambda place: -expected[place])[:7]
    text = bytes(tokens.tolist())
    for place, row in zip(order, found["listed"], strict=True):
        assert row["position"] == place + 1 and row["nll"] == pytest.approx(expected[place], rel=1e-5)
        assert row["before"] == readable(text[max(0, place - 2) : place + 1])
        assert row["text"] == readable(text[place + 1 : place + 2])
        assert row["after"] == readable(text[place + 2 : place + 5])
    assert len(measured(run, "measure.around=0")[1]["listed"][0]["before"]) == 0


def test_against_another_checkpoint(run, tmp_path):
    """Both columns, their difference, and the tokens that the two differ on most, first."""
    other = tmp_path / "other"
    other.mkdir()
    content = torch.load(run / "best.pt", weights_only=True)
    content["model"] = {name: tensor * 1.5 for name, tensor in content["model"].items()}
    archive.write(other / "best.pt", content)
    mine, theirs = slow_nll(run)[0], slow_nll(other)[0]
    line, found = measured(run, f"measure.against={other}", "measure.top=9")
    table = parquet.read_table("o.parquet").to_pydict()
    np.testing.assert_allclose(table["nll"], mine, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table["nll_against"], theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table["difference"], mine - theirs, rtol=1e-3, atol=1e-5)
    order = sorted(range(len(mine)), key=lambda place: -abs(mine[place] - theirs[place]))[:9]
    assert [row["position"] - 1 for row in found["listed"]] == order
    assert found["listed_by"] == "difference" and found["against"] == str(other)
    swapped = measured(other, f"measure.against={run}", "measure.top=9")[1]
    assert [row["position"] - 1 for row in swapped["listed"]] == order  # whichever is the better one
    assert line["nll_against"] == pytest.approx(theirs.mean(), rel=1e-6)
    assert line["difference"] == pytest.approx((mine - theirs).mean(), rel=1e-4)


def test_max_segments_reads_the_beginning(run):
    line, _ = measured(run, "measure.max_segments=3")
    table = parquet.read_table("o.parquet").to_pydict()
    assert line["tokens"] == 48 and table["position"] == list(range(1, 49))
    np.testing.assert_allclose(table["nll"], slow_nll(run)[0][:48], rtol=1e-5, atol=1e-6)
    measured(run, "measure.max_segments=3", "batch_size=2")
    table = parquet.read_table("o.parquet").to_pydict()
    assert table["position"] == [*range(1, 49), *range(501, 549)]


def test_interrupted_it_keeps_the_rows_that_were_read(run):
    """With both models about equally far: what is interrupted can be compared."""
    subject = Subject.of(asked(run, "tgt_len=16"))
    for knobs in (KNOBS, {**KNOBS, "against": str(run)}):
        answers = iter([None, None, None, signal.SIGINT, signal.SIGINT])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("txl.evaluation.AT_ONCE", 64)
            with pytest.raises(Stopped, match="interrupted") as stopped:
                take(Tokens(**knobs), subject, Path("o.json"), received=lambda: next(answers))  # noqa: B023
        assert stopped.value.status == 130
        found, rows = json.loads(Path("o.json").read_text()), rows_in("o.jsonl")
        n_read = 256 if knobs["against"] is None else 128
        assert not found["complete"] and found["tokens"] == len(rows) == n_read
        np.testing.assert_allclose([row["nll"] for row in rows], slow_nll(run)[0][:n_read], rtol=1e-5, atol=1e-6)
        if knobs["against"]:
            assert {row["difference"] for row in rows} == {0.0}
        assert Path("o.png").exists()


def test_interrupted_before_the_other_has_read_it_has_nulls(run):
    subject = Subject.of(asked(run))
    answers = iter([signal.SIGTERM, signal.SIGTERM])
    for kind in ("jsonl", "parquet"):
        answers = iter([signal.SIGTERM, signal.SIGTERM])
        with pytest.raises(Stopped) as stopped:
            instrument = Tokens(**{**KNOBS, "format": kind, "against": str(run)})
            take(instrument, subject, Path("o.json"), received=lambda: next(answers))  # noqa: B023
        assert stopped.value.status == 75
    rows = parquet.read_table("o.parquet").to_pylist()
    assert rows == rows_in("o.jsonl") and len(rows) == 999
    assert {(row["nll_against"], row["difference"]) for row in rows} == {(None, None)}
    assert json.loads(Path("o.json").read_text())["listed"] == []


def test_other_tokens_cannot_be_compared(run, tmp_path):
    Path("other.txt").write_bytes(b"another text altogether")
    other = characters_run(tmp_path)
    line = refused(
        in_process("evaluate", f"checkpoint={run}", "measure=tokens", f"measure.against={other}"), "measure.against"
    )
    assert "vocabulary" in line
    short = finished("short", "data.max_bytes=10000")
    line = refused(
        in_process("evaluate", f"checkpoint={run}", "measure=tokens", f"measure.against={short}"), "measure.against"
    )
    assert "another text" in line
    both = [f"measure.against={short}", "data.test=other.txt"]
    assert measured(run, *both)[0]["tokens"] == 22


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.against=nowhere", "measure.against"),
        ("measure.against=text.pt", "measure.against"),
        ("measure.format=csv", "measure.format"),
        ("measure.top=0", "measure.top"),
        ("measure.around=-1", "measure.around"),
        ("measure.max_segments=0", "measure.max_segments"),
        ("measure.top=many", "measure.top"),
        ("+measure.topp=3", "measure.topp"),
        ("out=o.parquet", "out"),
        ("processes=2", "processes"),
    ],
)
def test_a_bad_value_is_refused(override, key, run):
    Path("text.pt").write_text("no checkpoint")
    refused(in_process("evaluate", f"checkpoint={run}", "measure=tokens", override), key)
    assert not Path("o.parquet").exists() and not list(run.glob("evaluate/*"))


def test_parquet_without_its_package_is_refused(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = refused(in_process("evaluate", f"checkpoint={run}", "measure=tokens"), "measure.format")
    assert "jsonl" in line
    measured(run, "measure.format=jsonl")


def test_rows_are_written_in_parts(run, monkeypatch):
    """However many rows are made at a time, the file is the same."""
    split = Subject.of(asked(run)).split
    losses = {"nll": np.arange(len(split.tokens) - 1, dtype=np.float64)}
    places = np.arange(3, 900)
    for kind in ("parquet", "jsonl"):
        write_rows(Path(f"whole.{kind}"), kind, split, places, losses)
    monkeypatch.setattr("txl.instruments.rows.AT_ONCE", 100)
    for kind in ("parquet", "jsonl"):
        write_rows(Path(f"parts.{kind}"), kind, split, places, losses)
    assert parquet.read_table("parts.parquet") == parquet.read_table("whole.parquet")
    assert rows_in("parts.jsonl") == rows_in("whole.jsonl")


def test_bytes_that_are_no_text_are_shown_readably():
    assert readable(b"a\xffb\x00\x1b\t\n") == "a\\xffb\\x00\\x1b\t\n"
    assert readable("é日".encode()) == "é日"
    assert readable("é".encode()[:1]) == "\\xc3"


def test_groups_of_tokens_hold_whole_characters():
    from txl.data.vocab import Bytes

    text = "aé日\x00".encode() + b"\xffz\xe6\x97"
    groups = list(whole_characters(Bytes(), list(text)))
    assert [text for _, _, text in groups] == ["a", "é", "日", "\\x00", "\\xff", "z", "\\xe6\\x97"]
    assert [(first, stop) for first, stop, _ in groups] == [(0, 1), (1, 3), (3, 6), (6, 7), (7, 8), (8, 9), (9, 11)]
