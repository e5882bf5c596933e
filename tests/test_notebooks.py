"""The notebooks run, and the .ipynb files are what their .py files make."""

import re
import sys

import matplotlib
import nbformat
import pytest
import torch
from conftest import ROOT
from matplotlib import pyplot
from test_house import imports

from notebooks.execute import SOURCES, executed, read

SHORT = "STEPS, TEXTS = 4, 8\nCHANGES = ['data.max_bytes=20000']"
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_three_notebooks():
    assert [source.name[0] for source in SOURCES] == ["1", "2", "3"]


@each_notebook
@pytest.mark.slow
def test_a_notebook_runs_with_few_updates(source, monkeypatch):
    """In this process: a kernel takes longer to start than most cells to run."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names, cells = {}, code_cells(read(source))
    if "train" in source.stem or "memory" in source.stem:
        (parameters,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
        parameters.source = SHORT
    with torch.enable_grad(), matplotlib.rc_context({"backend": "agg"}):
        for number, cell in enumerate(cells, start=1):
            exec(compile(cell.source, f"{source.name}, code cell {number}", "exec"), names)
        assert len(pyplot.get_fignums()) >= 2
        pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "started_in"),
    list(zip([SOURCES[0], *SOURCES], [".", "notebooks", ".", "notebooks"], strict=True)),
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_notebook_runs_whole_in_a_kernel(source, started_in, tmp_path):
    """Started in the project's folder or in notebooks/; here in a folder that looks like it, to keep its runs apart."""
    for name in ("txl", "conf", "train.py", "evaluate.py", "generate.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notebooks").mkdir()
    made = executed(read(source), tmp_path / started_in)
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert pictures(made) == pictures(committed)


def pictures(notebook):
    """How many each code cell shows."""
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code_cells(notebook)]


@each_notebook
def test_the_ipynb_is_what_the_py_makes(source):
    notebook, wanted = nbformat.read(source.with_suffix(".ipynb"), as_version=4), read(source)
    assert notebook.metadata.kernelspec == wanted.metadata["kernelspec"]
    assert [(cell.cell_type, cell.source, cell.metadata, cell.id) for cell in notebook.cells] == [
        (cell.cell_type, cell.source, cell.metadata, cell.id) for cell in wanted.cells
    ], "make notebooks"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(pictures(notebook)) >= 3


@each_notebook
def test_the_ipynb_has_no_noise(source):
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 400_000
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            shown = output.get("text", "") + str({**output.get("data", {}), "image/png": ""})
            assert not re.search(r"/(home|root|tmp|work|Users|usr|mnt)/|\x1b|\\x1b|Warning", shown), shown


def test_no_picture_of_the_project_takes_the_notebook_s_backend():
    """pyplot's backend is the notebook's: a picture that is drawn with it, or chooses it, leaves later cells without theirs."""
    for path in sorted((ROOT / "txl").rglob("*.py")):
        assert "matplotlib.pyplot" not in imports(path) and "matplotlib.use" not in path.read_text(), path
