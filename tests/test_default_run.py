"""The default run, whole: what README promises of it."""

import json

import pytest
from conftest import command


@pytest.mark.slow
def test_the_default_run_stays_below_two_bits_per_byte(tmp_path):
    outcome = command("train", cwd=tmp_path, seconds=1800, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="PASSIVE")
    assert outcome.status == 0, outcome.stderr
    result = json.loads((tmp_path / "outputs" / "python_docs" / "default" / "result.json").read_text())
    assert result["test"]["bits_per_byte"] < 2.0
    run = tmp_path / "outputs" / "python_docs" / "default"
    figure = command("evaluate", f"checkpoint={run}", "split=test", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert json.loads(figure.stdout) == result["test"]
    no_memory = command("evaluate", f"checkpoint={run}", "mem_len=null", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert json.loads(no_memory.stdout)["nll"] > result["test"]["nll"]
