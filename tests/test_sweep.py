"""A sweep ends in a table and a plot of its runs, whatever became of one of them."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TINY, compose, in_process, run_files
from test_experiments import ABLATIONS, ENCODINGS, parameters

from txl.config import check, load_yaml, plain
from txl.runs import result
from txl.sweep import name_of


def points(name):
    """What a committed sweep varies, and over what."""
    given = load_yaml(ROOT / "conf" / "sweep" / f"{name}.yaml")["hydra"]["sweeper"]["params"]
    return {key: [word.strip() for word in str(values).split(",")] for key, values in given.items()}


def test_rows_of_the_ablations_end_in_a_table_and_a_plot():
    rows = ["ablation_wt103_recurrence_relative_half", "ablation_wt103_no_recurrence_shaw_full"]
    given = ["sweep=ablations", f"experiment={','.join(rows)}", *TINY[:5], *TINY[6:]]
    outcome = in_process("train", "-m", *given)
    assert outcome.status == 0, outcome.stderr
    *_, first, second, _, table, picture = outcome.stdout.decode().splitlines()
    assert {line.split()[1] for line in (first, second)} == set(rows)
    files = [Path(line.removeprefix("sweep: ")) for line in (picture, table)]
    assert {file.parent for file in files} == {Path("outputs/.sweep")} and files[0].name.startswith("ablations_")
    assert files[0].read_bytes().startswith(b"\x89PNG")
    with open(files[1]) as file:
        assert {row["run"] for row in csv.DictReader(file)} == set(rows)
    runs = [run for row in rows for run in Path("outputs", row).iterdir()]
    assert len(runs) == 2
    before = [run_files(run) for run in runs]
    again = in_process("train", "-m", *given)
    assert again.status == 0 and again.stdout == outcome.stdout
    assert [run_files(run) for run in runs] == before


def test_a_failed_point_is_named_and_loses_nothing_else():
    outcome = in_process("train", "-m", "model.n_layer=1,0,2", "steps=2", *TINY[1:6], *TINY[7:])
    assert outcome.status == 1
    why = "model.n_layer: must be at least 1 and below 2^31, got 0"
    assert outcome.stderr.splitlines()[-1] == why
    shown = outcome.stdout.decode().splitlines()
    (failed,) = [line for line in shown if line.startswith("failed: ")]
    assert failed.startswith("failed: model.n_layer=0: ") and failed.endswith(why)
    assert {line.split()[1] for line in shown if "│ n_layer=" in line} == {"n_layer=1", "n_layer=2"}
    assert shown[-1].startswith("sweep: outputs/.sweep/") and Path(shown[-1].removeprefix("sweep: ")).exists()


def test_a_file_that_cannot_be_written_costs_no_other_and_no_table():
    given = ["seed=1,2", "steps=2", *TINY[1:6], *TINY[7:]]
    assert in_process("train", "-m", *given).status == 0
    (table,), (picture,) = (list(Path("outputs/.sweep").glob(f"*.{ending}")) for ending in ("csv", "png"))
    picture.unlink()
    table.unlink()
    picture.mkdir()
    outcome = in_process("train", "-m", *given)
    assert outcome.status == 1 and table.exists()
    assert outcome.stderr.splitlines()[-1].startswith(f"sweep: {picture} cannot be written (")
    assert "│ " in outcome.stdout.decode()


def test_a_sweep_of_failures_has_no_table_but_says_why():
    outcome = in_process("train", "-m", "model.n_layer=0", *TINY[1:])
    assert outcome.status == 1 and "failed: model.n_layer=0" in outcome.stdout.decode()
    assert not [path for path in Path("outputs/.sweep").iterdir() if path.suffix in (".csv", ".png")]


def test_a_sweep_of_evaluations_prints_its_figures_alone(trained_run):
    outcome = in_process("evaluate", "-m", f"checkpoint={trained_run}", "mem_len=4,8", "out=out.json")
    assert outcome.status == 0, outcome.stderr
    assert [json.loads(line)["mem_len"] for line in outcome.stdout.splitlines()] == [4, 8]


def test_a_sweep_that_goes_on_with_a_run_reports_that_run(trained_run):
    shutil.copytree(trained_run, "run")
    outcome = in_process("train", "-m", "resume=run", "log_every=1,2")
    assert outcome.status == 0, outcome.stderr
    nll = f"{result(trained_run)['valid']['nll']:.4f}"
    (row,) = [line for line in outcome.stdout.decode().splitlines() if line.startswith("│ tiny ")]
    assert row.split()[5] == "1" and nll in row


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sweep=ablations"], "ablations"),
        (["sweep=ablations", "device=cpu"], "ablations"),
        (["steps=5", "sweep=ablations"], "ablations_steps-5"),
        (["steps=5"], "steps-5"),
        (["name=x"], "default"),
    ],
)
def test_names_of_the_files(overrides, expected):
    assert name_of(overrides) == expected


def test_the_sweep_of_the_ablations_runs_every_row_at_a_small_size():
    assert points("ablations") == {"experiment": [f"ablation_{row}" for row in ABLATIONS]}
    seen, counts = [], {}
    for name in points("ablations")["experiment"]:
        cfg = compose(f"experiment={name}", "sweep=ablations")
        check(cfg)
        paper = compose(f"experiment={name}")
        for group, keys in {"model": ("position", "memory"), "eval": ("tgt_len", "mem_len")}.items():
            assert all(cfg[group][key] == paper[group][key] for key in keys), name
        assert (cfg.loss, cfg.tgt_len) == (paper.loss, paper.tgt_len)
        assert (cfg.model.d_model, cfg.model.n_layer, cfg.steps, cfg.seed, cfg.name) == (128, 4, 300, 1, name)
        assert cfg.data._target_.endswith("python_docs") and cfg.data.vocab._target_.endswith("Bytes")
        seen.append({**plain(cfg), "name": None})
        counts[name] = parameters(name, 256, "sweep=ablations")
    assert all(one not in seen[:index] for index, one in enumerate(seen))
    assert all(abs(count / counts["ablation_wt103_recurrence_relative_full"] - 1) < 0.08 for count in counts.values())


def test_the_sweep_of_the_encodings_runs_each_with_three_seeds():
    assert {key: sorted(values) for key, values in points("encodings").items()} == {
        "experiment": ENCODINGS,
        "seed": ["1", "2", "3"],
    }
