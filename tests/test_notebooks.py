"""The notebooks run from beginning to end, and their saved outputs are whole and say nothing of a machine."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [["".join(o.text for o in c.outputs if o.get("name") == "stdout")] for c in code_cells(notebook)]
    saved = [["".join(o.text for o in c.outputs)] for c in code_cells(nbformat.read(path, as_version=4))]
    # The numbers differ in their last digits from machine to machine, the words do not.
    assert [len(text[0].splitlines()) for text in printed] == [len(text[0].splitlines()) for text in saved]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "the cells were not run in order"
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type == "stream" and output.name == "stdout"
            assert not re.search(r"/(home|root|tmp|work|Users)/|Warning|Traceback", output.text)
