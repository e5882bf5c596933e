"""Makes the .ipynb files: runs each notebook's .py in a kernel of its own, from the folder that Jupyter would start it in.

python -m notebooks.execute                 all of them (`make notebooks`)
python -m notebooks.execute 2_*.py          some, named as they are in the folder
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("[0-9]_*.py"))
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read(source: Path) -> NotebookNode:
    """The notebook that a .py file in percent format is, without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # else random: each execution would change the file
        cell.metadata.pop("lines_to_next_cell", None)
    return notebook


def executed(notebook: NotebookNode, folder: Path = FOLDER) -> NotebookNode:
    """The same with its outputs, the kernel working in `folder`. Raises CellExecutionError for a cell that fails."""
    resources = {"metadata": {"path": str(folder)}}
    options = dict(timeout=600, record_timing=False, coalesce_streams=True)
    return NotebookClient(notebook, kernel_name="python3", resources=resources, **options).execute()


def without_noise(notebook: NotebookNode) -> NotebookNode:
    """Leaves out progress and warnings, which go to standard error, colours for terminals, and the version of Python."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text/plain" in output.get("data", {}):
                    output.data["text/plain"] = COLOURS.sub("", output.data["text/plain"])
    return notebook


def main(names: list[str]) -> None:
    for source in [FOLDER / name for name in names] or SOURCES:
        nbformat.write(without_noise(executed(read(source))), source.with_suffix(".ipynb"))
        print(f"written: {source.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main(sys.argv[1:])
