"""A sweep's points, whatever runs them: each as if it were alone, none lost, and a second call runs what is missing."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import torch
import yaml
from conftest import ROOT, TINY, command, compose, in_process, state_of
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from txl import training
from txl.config import check

README = (ROOT / "README.md").read_text()
FEW = [one for one in TINY if not one.startswith(("model.n_layer", "steps", "eval_every"))] + [
    "steps=2",
    "eval_every=2",
]


def same(one: Path, other: Path) -> None:
    """Two runs, bit for bit, but for what they took and where they are."""
    ours, expected = state_of(one), state_of(other)
    assert all(torch.equal(ours["model"][name], expected["model"][name]) for name in expected["model"])
    assert all(map(torch.equal, ours["run"]["mems"], expected["run"]["mems"]))
    figures = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    assert [figure["valid"] for figure in figures[:1]] == [figure["valid"] for figure in figures[1:]]


def runs_of(name: str, folder: Path = Path()) -> dict[str, Path]:
    """The runs of a name, by the part of their folder that tells them apart."""
    return {run.name: run for run in (folder / "outputs" / name).iterdir()}


def test_each_point_of_a_sweep_is_the_run_that_is_alone_bit_for_bit():
    """After others of another seed, precision, size, tracker, dropout and order of summation, in one process; and one that failed."""
    points = ["precision=bf16,fp32", "deterministic=true,false", "model.dropout=0.2", "model.n_layer=1"]
    outcome = in_process("train", "-m", "name=sweep", *points, "tracker=wandb", *FEW)
    assert outcome.status == 0, outcome.stderr
    ids = {(run / "wandb_id").read_text() for run in runs_of("sweep").values()}
    assert len(ids) == 4
    for precision, deterministic in (("fp32", "false"), ("bf16", "true"), ("fp32", "true")):
        given = [f"precision={precision}", f"deterministic={deterministic}", *points[2:]]
        torch.manual_seed(99)
        assert in_process("train", "name=alone", *given, *FEW).status == 0
    alone = runs_of("alone")
    assert len(alone) == 3
    for name, run in alone.items():
        same(runs_of("sweep")[name], run)


def test_the_same_sweep_again_runs_only_what_failed(monkeypatch):
    """The error stands in the folder of its point until it is begun again, and in the table."""
    real, begun = training.updates, []

    def failing(run, **settings):
        begun.append(run.model.softmax.out_bias.shape)
        if len(begun) == 2:
            raise ValueError("a fault of the program")
        return real(run, **settings)

    monkeypatch.setattr(training, "updates", failing)
    given = ["-m", "name=again", "seed=1,2,3", "model.n_layer=1", *FEW]
    outcome = in_process("train", *given)
    assert outcome.status == 1 and len(begun) == 3
    assert "failed: seed=2: a fault of the program" in outcome.stdout.decode()
    (broken,) = [run for run in runs_of("again").values() if not (run / "result.json").exists()]
    error = (broken / "error.txt").read_text()
    assert error.splitlines()[1] == "a fault of the program" and "seed=2" in error.splitlines()[0]
    assert "Traceback" in error and "in failing" in error
    again = in_process("train", *given)
    assert again.status == 0 and len(begun) == 4, again.stderr
    assert not (broken / "error.txt").exists() and "failed" not in again.stdout.decode()
    assert in_process("train", *given).stdout == again.stdout and len(begun) == 4


def test_an_error_is_not_left_in_a_finished_run_or_beside_one(trained_run):
    outcome = in_process("train", "-m", f"resume={trained_run}", "batch_size=4,6")
    assert outcome.status == 1 and outcome.stdout.decode().count("failed: batch_size=") == 2
    assert not (trained_run / "error.txt").exists()


@pytest.mark.slow
def test_joblib_runs_points_side_by_side(tmp_path):
    """As a real command; a failed point is told as it is by the basic launcher, and points are what they are alone."""
    given = [
        "-m",
        "name=many",
        "model.n_layer=1,0",
        "seed=1,2",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        *FEW,
    ]
    outcome = command("train", *given, cwd=tmp_path)
    why = "model.n_layer: must be at least 1 and below 2^31, got 0"
    assert outcome.status == 1 and outcome.stderr.splitlines()[-1] == why, outcome.stderr
    shown = outcome.stdout.decode().splitlines()
    assert [line for line in shown if line.startswith("failed: ")] == [
        f"failed: model.n_layer=0 seed={seed}: {why}" for seed in (1, 2)
    ]
    finished = [run for run in runs_of("many", tmp_path).values() if (run / "result.json").exists()]
    broken = [run for run in runs_of("many", tmp_path).values() if (run / "error.txt").exists()]
    assert len(finished) == len(broken) == 2
    assert in_process("train", "name=alone", "model.n_layer=1", "seed=2", *FEW).status == 0
    ((name, alone),) = runs_of("alone").items()
    same(tmp_path / "outputs" / "many" / name, alone)


SBATCH = """#!{python}
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
tasks = re.search(r"#SBATCH --array=0-(\\d+)", script)
for task in range(int(tasks[1]) + 1 if tasks else 1):
    job = dict(SLURM_JOB_ID=str(8 + task), SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=str(task), SLURM_NTASKS="1",
               SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="here")
    lines = script.replace("%A", "7").replace("%a", str(task))
    subprocess.Popen(["bash", "-c", lines], env={{**os.environ, **job}}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job 7")
"""
SRUN = """#!{python}
import os, sys
rest = sys.argv[1:]
while rest[0].startswith("-"):
    rest = rest[2 if rest[0] in ("--output", "--error") else 1:]
os.execvp(rest[0], rest)
"""
SACCT = """#!{python}
print("JobID|State|NodeList\\n7_0|RUNNING|here\\n7_1|RUNNING|here")
"""


def test_readme_has_every_launcher():
    assert {*re.findall(r"hydra/launcher=(\w+)", README)} == {"joblib", "submitit_local", "submitit_slurm"}
    assert {file.name for file in (ROOT / "conf" / "wandb_sweeps").iterdir()} >= {
        *re.findall(r"wandb_sweeps/(\w+\.yaml)", README)
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm"])
def test_submitit_runs_points_as_jobs(launcher, tmp_path):
    """On this machine, and by Slurm's commands, which small programs stand in for."""
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    given = ["-m", "name=jobs", "clip=0,1", f"hydra/launcher={launcher}", "model.n_layer=1", *FEW]
    outcome = command("train", *given, cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    why = "clip: must be above 0, or null for no clipping; got 0"
    assert outcome.status == 1 and outcome.stderr.splitlines()[-1] == why, outcome.stderr
    assert f"failed: clip=0: {why}" in outcome.stdout.decode() and "│ jobs " in outcome.stdout.decode()
    assert len([run for run in runs_of("jobs", tmp_path).values() if (run / "result.json").exists()]) == 1


def test_optuna_goes_on_with_its_study():
    """Other trials, told together with the first; one that fails ends nothing."""
    rates = "optimizer.lr=choice(1e-3,2e-3,-1.0)"
    given = ["-m", "name=study", "sweep=lr_optuna", "hydra.sweeper.n_trials=3", "model.n_layer=1", *FEW]
    first, second = (in_process("train", *given) for _ in range(2))
    assert first.status == second.status == 0, second.stderr
    storage = "sqlite:///outputs/.sweep/optuna.db"
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study.study_name, storage).trials
    assert len(trials) == len({trial.params["optimizer.lr"] for trial in trials}) == 6
    assert [outcome.stdout.decode().count("│ lr=") for outcome in (first, second)] == [3, 6]
    figures = [json.loads((run / "result.json").read_text())["valid"]["nll"] for run in runs_of("study").values()]
    assert sorted(trial.value for trial in trials) == sorted(figures)
    assert all(1e-4 <= trial.params["optimizer.lr"] <= 1e-2 for trial in trials)
    failing = in_process("train", *given, rates)
    assert failing.status == 1 and len(optuna.get_all_study_summaries(storage)) == 2
    assert "failed: optimizer.lr=-1.0: optimizer" in failing.stdout.decode()


def test_a_study_of_failures_says_why():
    given = ["-m", "name=bad", "sweep=lr_optuna", "hydra.sweeper.n_trials=2", "model.n_layer=0", *FEW]
    outcome = in_process("train", *given)
    assert outcome.status == 1
    assert outcome.stderr.splitlines()[-1] == "model.n_layer: must be at least 1 and below 2^31, got 0"


@pytest.mark.parametrize("file", sorted((ROOT / "conf" / "wandb_sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_what_the_agent_of_a_wandb_sweep_types_is_understood(file, trained_run):
    """By the agent's own code, for the first and the last value of each parameter: overrides that Hydra composes."""
    sweep = yaml.safe_load(file.read_text())
    logged = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    assert any(sweep["metric"]["name"] in row for row in logged) and sweep["metric"]["goal"] == "minimize"
    assert (ROOT / sweep["program"]).is_file()
    for pick in (0, -1):
        drawn = {}
        for key, given in sweep["parameters"].items():
            values = given["values"] if "values" in given else [given["min"], given["max"]]
            drawn[key] = {"value": values[pick]}
        macros = {"env": ["/usr/bin/env"], "program": [sweep["program"]]} | create_sweep_command_args({"args": drawn})
        line = []
        for part in create_sweep_command(list(sweep["command"])):
            line += macros[part[2:-1]] if part.startswith("${") else [part]
        assert line[:3] == ["/usr/bin/env", "python", "train.py"] and len(line) == 5 + len(drawn)
        cfg = compose(*line[3:])
        check(cfg)
        assert cfg.tracker.mode == "online"
        for key, value in drawn.items():
            found = cfg
            for part in key.split("."):
                found = found[part]
            assert found == (None if value["value"] == "null" else value["value"])


@pytest.mark.slow
def test_a_process_of_a_sweep_that_is_killed_is_told_in_a_line(tmp_path):
    """Nobody is left behind, and the same command goes on with the runs."""
    given = [
        "-m",
        "name=killed",
        "seed=1,2",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "model.n_layer=1",
        *FEW,
    ]
    program = [sys.executable, str(ROOT / "train.py"), *given]
    with open(tmp_path / "stderr.txt", "w") as errors:
        process = subprocess.Popen([*program, "steps=100000"], cwd=tmp_path, stderr=errors, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while len(list(tmp_path.glob("outputs/killed/*/last.1.pt"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(one) for one in children if b"LokyProcess" in Path(f"/proc/{one}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(60) == 1
    last = (tmp_path / "stderr.txt").read_text().splitlines()[-1]
    assert last.startswith("hydra/launcher: a process of the sweep ended (") and last.endswith(
        "the same command goes on"
    )
    until = time.monotonic() + 20
    while any(Path(f"/proc/{one}").exists() for one in workers) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{one}").exists() for one in workers)
    reached = [state_of(run)["step"] for run in runs_of("killed", tmp_path).values()]
    again = [*given[:3], *given[5:], f"steps={max(reached) + 2}"]
    assert command("train", *again, cwd=tmp_path).status == 0
