import json
import shutil
from pathlib import Path

import pytest

from txl import report


def copy(run: Path, name: str, nll: float, **changes: str) -> None:
    """A finished run with another valid and test nll and other lines in its configuration."""
    path = shutil.copytree(run, Path("runs") / name)
    result = json.loads((path / "result.json").read_text())
    for split in ("valid", "test"):
        result[split]["nll"] = nll
    (path / "result.json").write_text(json.dumps(result))
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


def test_a_folder_without_a_run_is_told(capsys):
    assert report.main(["."]) == 1 and capsys.readouterr().err == ". holds no finished run (no result.json)\n"
    assert report.main([]) == 1
