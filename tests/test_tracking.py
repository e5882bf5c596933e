import io
import json
import sys
from pathlib import Path

from txl import tracking


def test_metrics_drop_what_lies_after_the_step_they_go_on_from():
    path = Path("metrics.jsonl")
    lines = [json.dumps({"step": step, "tokens": 10 * step, "a": step}) for step in (1, 2, 3)]
    strange = ["5", "null", "{}", '{"step": "x", "tokens": 1}', "not json", '{"step": 4, "a"']
    path.write_text("\n".join(lines + strange))
    metrics = tracking.Metrics(path, step=2)
    metrics.log({"step": 3, "tokens": 30, "a": 30})
    assert [row["a"] for row in tracking.read_metrics(path)] == [1, 2, 30]  # there before it is closed
    metrics.close()
    assert tracking.read_metrics(Path("missing.jsonl")) == []


def test_speed_counts_updates_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    speed = tracking.Speed()
    speed.add(100)
    now[0] = 2.0
    with speed.paused():
        now[0] = 50.0
    speed.add(100)
    now[0] = 52.0
    assert speed.take() == {"tokens_per_second": 50.0}
    speed.add(10)
    now[0] = 53.0
    assert speed.take() == {"tokens_per_second": 10.0}


def test_plain_lines_where_there_is_no_terminal(capsys):
    with tracking.Display(steps=20, step=0) as display:
        display.advance(10)
        display.show({"step": 10, "train/nll": 1.25, "tokens_per_second": 1234.5})
    assert capsys.readouterr().err.startswith("step 10/20  train nll 1.2500  1,234 tokens/s  ETA ")


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with tracking.Display(steps=20, step=0) as display:
        display.advance(10)
        display.show({"step": 10, "train/nll": 1.25, "tokens_per_second": 1234.5})
        display.show({"step": 10, "valid/nll": 1.5})
    shown = terminal.getvalue()
    assert "10/20" in shown and "train nll 1.2500" in shown and "1,234 tokens/s" in shown and "ETA" in shown
    assert "step 10/20  valid nll 1.5000" in shown


def test_curves_are_drawn_now_and_then_and_at_the_end(monkeypatch):
    drawn = []
    monkeypatch.setattr(tracking, "draw_curves", lambda path, rows: drawn.append(len(rows)))
    metrics = tracking.Metrics(Path("metrics.jsonl"), step=0)
    for step in range(1, 6):
        metrics.log({"step": step, "tokens": step})
        metrics.draw(Path("curves.png"), last=step == 4)
    metrics._drawn -= tracking.REDRAW
    metrics.draw(Path("curves.png"))
    metrics.close()
    assert drawn == [1, 4, 5]
