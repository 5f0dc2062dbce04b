"""The notebooks in examples/notebooks run from the first cell to the last."""

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
# A number in the printed output of each notebook, and its lowest value.
EXPECTED = {
    "hugging_face.ipynb": (r"best mAP_skip_empty (\S+)", 22),  # chance: 19
    "own_model.ipynb": (r"epoch 3/3 .* val mAP (\S+)", 40),
    "own_photos.ipynb": (r"best mAP_skip_empty (\S+)", 25),  # chance: 19
    "zero_shot.ipynb": (r"zero-shot mAP (\S+)", 25),  # chance: 14
}
# Code of each notebook, and its replacement for a shorter training.
SHORTER = {
    "hugging_face.ipynb": ("epochs=6", "epochs=2"),
    "own_model.ipynb": ("train_writings, 4096", "train_writings, 2048"),
    "own_photos.ipynb": ("epochs=6", "epochs=3"),
    "zero_shot.ipynb": ("train_images=5000", "train_images=2500"),
}
# Files that a notebook writes.
FILES = {
    "hugging_face.ipynb": ["outputs/digits/checkpoints/calibrated.pt"],
    "own_photos.ipynb": ["report.html", "model.onnx", "outputs/photos/checkpoints/best.pt"],
}


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
    assert sum(SHORTER[name][0] in cell.source for cell in cells) == 1
    for cell in cells:
        cell.source = cell.source.replace(*SHORTER[name])

    # The working folder has the place of the notebook in a checkout, which has the script.
    work = here / "examples" / "notebooks"
    work.mkdir(parents=True)
    (here / "scripts").symlink_to(ROOT / "scripts")
    resources = {"metadata": {"path": str(work)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pattern, lowest = EXPECTED[name]
    assert float(re.search(pattern, printed)[1]) >= lowest
    for file in FILES.get(name, []):
        assert (work / file).stat().st_size > 0
