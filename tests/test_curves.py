"""curves.png: drawn from any rows, quickly, and showing what one looks for."""

import math
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from txl import curves
from txl.curves import draw_curves  # as it is, not as every test has it

ROW = {"step": 1, "tokens": 10, "train/nll": 2.0, "train/lr": 0.1, "train/grad_norm": 1.0, "tokens_per_second": 5.0}


def run_of(n: int) -> list[dict]:
    """A run of n logged updates that comes down from 8 to 2 nats, with a valid figure at every tenth."""
    rows = []
    for i in range(1, n + 1):
        nll = 2 + 6 * math.exp(-i / (n / 20))
        rows.append({**ROW, "step": i, "tokens": 5000 * i, "train/nll": nll})
        if i % 10 == 0:
            valid = {"valid/nll": nll + 0.1, "valid/ppl": math.exp(nll + 0.1), "valid/bits_per_byte": nll / math.log(2)}
            rows.append({"step": i, "tokens": 5000 * i, **valid})
    return rows


def panels(rows, monkeypatch) -> tuple[Figure, list]:
    """The picture as it is saved."""
    kept = []
    with monkeypatch.context() as patched:
        patched.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
        draw_curves(Path("curves.png"), rows)
    (figure,) = kept
    return figure, figure.axes


def test_curves_are_drawn_from_any_rows():
    nan, huge = float("nan"), 1e300
    strange = {**ROW, "train/nll": nan, "train/grad_norm": float("inf"), "valid/nll": nan, "train/lr": 0.0}
    for rows in (
        [],
        [ROW],
        [ROW, {"step": 1, "tokens": 10, "valid/nll": 2.5, "valid/ppl": None, "valid/bits_per_byte": None}],
        [strange],
        [strange, {**ROW, "train/nll": huge, "train/grad_norm": huge, "tokens_per_second": huge}],
        [{"step": 0, "tokens": 0}],
    ):
        draw_curves(Path("curves.png"), rows)
        assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
        Path("curves.png").unlink()


def test_curves_cost_no_more_than_their_drawing(monkeypatch):
    """A layout engine would take half as long again, which training does without; pyplot would keep the figure."""
    figure, _ = panels(run_of(20), monkeypatch)
    assert figure.get_layout_engine() is None
    draw_curves(Path("curves.png"), run_of(20))
    assert not pyplot.get_fignums()


def test_the_best_valid_figure_is_written_and_marked(monkeypatch):
    rows = run_of(200)
    best = min((row for row in rows if "valid/nll" in row), key=lambda row: row["valid/nll"])
    figure, (nll, *_) = panels(rows, monkeypatch)
    assert (
        nll.get_title("right")
        == f"best valid {best['valid/nll']:.4f} = {best['valid/bits_per_byte']:.3f} bits per byte"
    )
    assert [[best["tokens"], best["valid/nll"]]] in [line.get_xydata().tolist() for line in nll.lines]
    folder = Path.cwd()
    assert figure.get_suptitle() == f"{folder.parent.name}/{folder.name}"
    assert curves.in_other_units({"valid/ppl": 12.3456, "valid/bits_per_byte": None}) == " = ppl 12.35"


def test_first_losses_and_spikes_do_not_flatten_the_curve(monkeypatch):
    rows = run_of(500)
    rows[300]["train/nll"] = 900.0
    _, (nll, *_) = panels(rows, monkeypatch)
    low, high = nll.get_ylim()
    assert low < 2.0 and 2.1 < high < 4.0


def test_gradients_over_decades_are_on_a_log_scale(monkeypatch):
    rows = [{**ROW, "tokens": n, "train/grad_norm": 10.0**n} for n in range(4)]
    assert panels(rows, monkeypatch)[1][2].get_yscale() == "log"
    assert panels(run_of(20), monkeypatch)[1][2].get_yscale() == "linear"


def test_numbers_are_short():
    assert [curves.short(value) for value in (0, 950, 1500, 2e6, 3.21e9)] == ["0", "950", "1.5k", "2M", "3.21G"]
