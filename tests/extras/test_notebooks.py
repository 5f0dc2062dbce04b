"""The notebooks in examples/notebooks run from the first cell to the last."""

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
# A number in the printed output of each notebook, and its lowest value.
EXPECTED = {"own_model.ipynb": (r"epoch 3/3 .* val mAP (\S+)", 50)}


def test_every_notebook_has_an_expected_number():
    assert EXPECTED.keys() == {path.name for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("name", EXPECTED)
def test_notebook_runs_without_outputs_in_git(here, name, monkeypatch):
    # Notebooks must not download anything.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)

    resources = {"metadata": {"path": str(here)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pattern, lowest = EXPECTED[name]
    assert float(re.search(pattern, printed)[1]) >= lowest
