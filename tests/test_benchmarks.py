"""The benchmarks run; what they measure is for their readers."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_benchmark_of_the_output_layer_prints_its_table():
    sizes = ["--words", "300", "--width", "64", "--cutoffs", "50", "100", "200", "--tokens", "16", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.output_layer", *sizes, "--targets", "uniform"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines()[2:]]
    assert rows[:3] == ["ours, div_val 1", "ours, div_val 4", "ours, full softmax"] and len(rows) == 5


@pytest.mark.slow
def test_the_benchmark_of_speed_prints_its_table_and_draws(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed",
        "--scale",
        "16",
        "--rounds",
        "1",
        "--plot",
        f"{tmp_path}/p.png",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 9 and rows[0].startswith("attention block") and rows[-1].startswith("peak memory")
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_benchmark_of_saving_prints_its_table(tmp_path):
    command = [sys.executable, "-m", "benchmarks.saving", "--million", "20", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert "| ours until on disk | " in done.stdout and "an update with all checks takes " in done.stdout


@pytest.mark.slow
def test_the_benchmark_of_converting_prints_its_table():
    command = [sys.executable, "-m", "benchmarks.interop", "--layers", "1", "--words", "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines()[2:]]
    assert rows == ["import", "export .pt", "export .safetensors"]
