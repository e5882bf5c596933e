import csv
import json
import shutil
from pathlib import Path

import pytest

from txl import report
from txl.runs import result


def copy(run: Path, folder: str, nll: float, /, **changes: str) -> None:
    """A finished run with another valid and test nll and other lines in its configuration."""
    path = shutil.copytree(run, Path("runs") / folder)
    figures = json.loads((path / "result.json").read_text())
    for split in ("valid", "test"):
        figures[split]["nll"] = nll
    (path / "result.json").write_text(json.dumps(figures))
    text = (path / "config.yaml").read_text()
    for line, new in changes.items():
        assert f"{line}: " in text
        text = "\n".join(new if one.strip().startswith(f"{line}: ") else one for one in text.splitlines()) + "\n"
    (path / "config.yaml").write_text(text)


def test_runs_that_differ_in_the_seed_alone_are_one_row_with_mean_and_spread(trained_run, capsys):
    copy(trained_run, "a", 1.0)
    copy(trained_run, "b", 2.0, seed="seed: 2", log_every="log_every: 7")
    copy(trained_run, "c", 1.75, seed="seed: 3")
    copy(trained_run, "d", 1.25, clip="clip: 0.5")
    rows = report.leaderboard(report.find([Path("runs")]))
    assert [row["settings"] for row in rows] == [{"clip": 0.5}, {"clip": 0.25}]
    assert rows[1]["seeds"] == [1, 2, 3] and rows[0]["seeds"] == [1]
    assert rows[1]["valid"]["nll"] == pytest.approx(4.75 / 3)
    assert (rows[1]["valid"]["least"], rows[1]["valid"]["most"]) == (1.0, 2.0)
    assert report.main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "1.5833 (1.0000 to 2.0000)" in shown and "clip=0.5" in shown and "log_every" not in shown


def test_rows_are_told_apart_by_their_names_where_these_differ(trained_run):
    copy(trained_run, "a", 1.0, name="name: one")
    copy(trained_run, "b", 2.0, name="name: two", clip="clip: 0.5")
    copy(trained_run, "c", 3.0, name="name: two", clip="clip: 1.0", log_every="log_every: 7")
    rows = report.leaderboard(report.find([Path("runs")]))
    assert [row["label"] for row in rows] == ["one", "two clip=0.5", "two clip=1.0"]
    assert [row["label"] for row in report.leaderboard([Path("runs/a"), Path("runs/a")])] == ["one"]
    assert rows[0]["parameters"] == result(trained_run)["parameters"]


def test_what_differs_is_told_in_short():
    """The last parts of a key, a class by its last name, and no null for a key that other rows do not have."""
    settings = [
        {"steps": 5, "clip": None, "eval.mem_len": 1, "model.memory.mem_len": 2, "position._target_": "a.Rotary"},
        {"steps": 5, "clip": 0.5, "eval.mem_len": 3, "model.memory.mem_len": 4, "position._target_": "a.ALiBi"}
        | {"position.clamp_len": None},
    ]
    assert report._labels(["x", "x"], settings) == [
        "clip=None eval.mem_len=1 memory.mem_len=2 position=Rotary",
        "clip=0.5 eval.mem_len=3 memory.mem_len=4 position=ALiBi",
    ]
    settings = [{"tgt_len": 1, "eval.tgt_len": 2}, {"tgt_len": 3, "eval.tgt_len": 4}]
    assert report._labels(["x", "x"], settings) == ["eval.tgt_len=2 tgt_len=1", "eval.tgt_len=4 tgt_len=3"]


def test_a_picture_and_a_table_for_other_programs(trained_run, capsys):
    copy(trained_run, "a", 1.0)
    copy(trained_run, "b", 2.0, seed="seed: 2")
    copy(trained_run, "c", 3.0, clip="clip: 0.5")
    assert report.main(["runs", "--plot", "p.svg", "--csv", "p.csv"]) == 0
    picture = Path("p.svg").read_text()
    assert picture.startswith("<?xml") and "test bits per byte" in picture
    with open("p.csv") as file:
        first, second = csv.DictReader(file)
    assert (first["run"], first["seeds"], float(first["test/nll"])) == ("clip=0.25", "1 2", 1.5)
    assert (float(second["valid/least"]), float(second["valid/most"])) == (3.0, 3.0)
    assert report.main(["runs/a", "--plot", "p.png"]) == 0 and Path("p.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for wrong in (
        ["runs", "--plot"],
        ["runs", "--plot", "p.xyz"],
        ["runs", "--plto=p.png"],
        ["runs", "--csv", "no/p.csv"],
    ):
        assert report.main(wrong) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert any(option in line for option in ("--plot", "--csv", "--plto")), line


def test_a_folder_without_a_run_is_told(capsys):
    assert report.main(["."]) == 1 and capsys.readouterr().err == ". holds no finished run (no result.json)\n"
    assert report.main([]) == 1


def test_the_table_has_speed_and_settings_and_the_plot_their_panels(trained_run, monkeypatch):
    """Mean seconds, mean of the runs' median tokens/s; a column for each key that differs, a panel for those that all have."""
    for name, nll, changes in (
        ("a", 1.0, {"clip": "clip: 0.5"}),
        ("b", 2.0, {"clip": "clip: null"}),
        ("c", 3.0, {"clip": "clip: null", "seed": "seed: 2"}),
    ):
        copy(trained_run, name, nll, **changes)
    speeds = {"b": [1.0, 8.0, 3.0], "c": [5.0]}
    for name, values in speeds.items():
        lines = [{"step": n, "tokens": 10 * n, "tokens_per_second": value} for n, value in enumerate(values, 1)]
        lines.append({"step": 9, "tokens": 90, "valid/nll": 2.5})
        (Path("runs") / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = json.loads(Path("runs/c/result.json").read_text())
    Path("runs/c/result.json").write_text(json.dumps({**seconds, "seconds": seconds["seconds"] + 10}))
    rows = report.leaderboard(report.find([Path("runs")]))
    assert rows[1]["tokens_per_second"] == 4.0 and rows[1]["seconds"] == pytest.approx(seconds["seconds"] + 5)
    assert rows[1]["curves"] == [[(90, 2.5)]] * 2
    assert report.swept(rows) == ["clip"]
    drawn = []
    monkeypatch.setattr(report, "_draw_against", lambda axis, rows, key: drawn.append(key))
    report.plot(rows, Path("p.png"))
    report.write_csv(rows, Path("p.csv"))
    assert drawn == ["clip"]
    with open("p.csv") as file:
        assert [(row["clip"], row["tokens_per_second"]) for row in csv.DictReader(file)][1] == ("", "4.0")


def test_of_a_part_of_another_class_the_class_alone_is_a_key():
    settings = [
        {"model.memory._target_": "x.A", "model.memory.mem_len": 3, "clip": 1.0},
        {"model.memory._target_": "x.B", "model.memory.mem_len": 4, "clip": 2.0, "rest": 1},
    ]
    assert report.swept([{"settings": one} for one in settings]) == ["model.memory._target_", "clip"]
    assert report.swept([]) == []


def test_what_has_no_figures_is_told_below_the_table(trained_run, capsys):
    """The error of a sweep's point, or how far a run came."""
    copy(trained_run, "a", 1.0)
    for name in ("failed", "cut"):
        copy(trained_run, name, 1.0)
        (Path("runs") / name / "result.json").unlink()
    Path("runs/failed/error.txt").write_text("clip=0\nclip: must be above 0\n\nTraceback\n")
    Path("runs/a/error.txt").write_text("clip=0\nof an earlier try\n")
    assert report.main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "runs/cut: unfinished: logged up to update 6",
        "runs/failed: failed: clip: must be above 0",
    ]
