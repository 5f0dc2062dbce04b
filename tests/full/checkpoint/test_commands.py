"""Commands with published folders and with files of class names."""

import json

import pytest
from support import QUICK, one_line

from mldec.checkpoint import load_model, loading, published
from mldec.files.torch_files import read_torch, save

ORDER = [3, 1, 4, 9, 5, 2, 6, 8, 7, 0]  # of the ten classes in the reordered checkpoint
FEW = ["--plugin", "patches", "data.val_images=20", "device=cpu"]


def test_commands_accept_a_published_folder(cli, best, here):
    saved = loading.load(best)
    folder = here / "mine"
    published.write(folder, published.with_weights(saved, saved.best.weights, best))
    weights = folder / published.WEIGHTS
    outputs = [cli.out("evaluate", path, *FEW) for path in (best, folder, weights)]
    tables = [output.splitlines()[1:] for output in outputs]
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) > 5

    cli.out("calibrate", folder, *FEW, "--out", "calibrated.pt")
    copy = load_model("calibrated.pt", plugins=["patches"])
    assert copy.calibration is not None
    assert " of " in loading.initialise(copy.model, folder)
    for name in (str(weights), "hf:me/mine"):
        one_line(cli.fault("train", *QUICK, f"resume={name}", "name=again"), "init=")


def changed(best, path, names):
    """Copy a checkpoint with its classes in `ORDER`, or with other names in the old order."""
    state = read_torch(best)
    if names is not None:
        state["classes"]["names"] = names
    else:
        state["classes"]["names"] = [state["classes"]["names"][index] for index in ORDER]
        for weights in (state["model"], state["ema"]):
            for name in ("head.queries", "head.pool_weight", "head.pool_bias"):
                weights[name] = weights[name][ORDER]
    save(path, state)
    return path


def test_classes_are_matched_by_name(cli, best, tmp_path):
    def evaluated(path, *words):
        cli.out("evaluate", path, *FEW, "--json", tmp_path / "r.json", *words)
        return json.loads((tmp_path / "r.json").read_text())

    expected = evaluated(best)
    report = evaluated(changed(best, tmp_path / "reordered.pt", None))
    assert report["metrics"] == pytest.approx(expected["metrics"])
    assert list(report["per_class"]) == list(expected["per_class"])
    for name, values in expected["per_class"].items():
        assert report["per_class"][name] == pytest.approx(values)

    names = tmp_path / "names.txt"
    cli.out("evaluate", best, "--plugin", "patches", "--write-classes", names)
    path = changed(best, tmp_path / "numbered.pt", [f"class {index}" for index in range(10)])
    one_line(cli.fault("evaluate", path, *FEW), str(path), "'class 0'")
    assert evaluated(path, "--class-names", names)["per_class"] == expected["per_class"]
