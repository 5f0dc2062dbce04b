"""The notebooks in examples/notebooks run from the first cell to the last."""

import re
from pathlib import Path

import pytest
from forked import run

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
# A number in the printed output of each notebook, and its lowest value.
EXPECTED = {
    "hugging_face.ipynb": (r"best mAP_skip_empty (\S+)", 22),  # chance: 19
    "own_model.ipynb": (r"epoch 3/3 .* val mAP (\S+)", 25),  # chance: 19
    "own_photos.ipynb": (r"best mAP_skip_empty (\S+)", 25),  # chance: 19
    "zero_shot.ipynb": (r"zero-shot mAP (\S+)", 25),  # chance: 14
}
# Code of each notebook, and its replacement for a shorter training.
SHORTER = {
    "hugging_face.ipynb": {"epochs=6": "epochs=2", 'image_size": 64': 'image_size": 32'},
    "own_model.ipynb": {
        "train_writings, 4096": "train_writings, 1024",
        "val_writings, 512": "val_writings, 128",
    },
    "own_photos.ipynb": {"epochs=6": "epochs=3", "data.image_size=64": "data.image_size=32"},
    "zero_shot.ipynb": {"train_images=5000": "train_images=1200"},
}
# Files that a notebook writes.
FILES = {
    "hugging_face.ipynb": ["outputs/digits/checkpoints/calibrated.pt"],
    "own_photos.ipynb": ["report.html", "model.onnx", "outputs/photos/checkpoints/best.pt"],
}


def test_every_notebook_has_an_expected_number():
    assert EXPECTED.keys() == {path.name for path in FOLDER.glob("*.ipynb")}


def run_cells(sources):
    """Run cells as in a kernel, without its process; test_kernel.py starts a kernel."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for source in sources:
        shell.run_cell(source).raise_error()


@pytest.mark.parametrize("name", EXPECTED)
def test_notebook_runs_without_outputs_in_git(here, name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    sources = [cell.source for cell in cells]
    for long, short in SHORTER[name].items():
        assert sum(long in source for source in sources) == 1, long
        sources = [source.replace(long, short) for source in sources]

    # The working folder has the place of the notebook in a checkout, which has the script.
    work = here / "examples" / "notebooks"
    work.mkdir(parents=True)
    (here / "scripts").symlink_to(ROOT / "scripts")
    # Notebooks must not download anything.
    environment = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "HOME": str(here)}
    done = run(run_cells, sources, cwd=work, env=environment)
    assert done.status == 0, done.out + done.err
    pattern, lowest = EXPECTED[name]
    assert float(re.search(pattern, done.out)[1]) >= lowest
    for file in FILES.get(name, []):
        assert (work / file).stat().st_size > 0
