"""Commands with a published folder, and with names of classes in files."""

import json

import pytest
from support import QUICK, one_line

from mldec.checkpoint import load_model, loading, published
from mldec.files.torch_files import read_torch, save

ORDER = [3, 1, 4, 9, 5, 2, 6, 8, 7, 0]  # of the ten classes in the reordered checkpoint
FEW = ["--plugin", "patches", "data.val_images=20", "device=cpu"]


def test_every_command_takes_a_published_folder(cli, best, here):
    saved, folder = loading.load(best), here / "mine"
    published.write(folder, published.with_weights(saved, saved.best.weights, best))
    weights = folder / published.WEIGHTS
    outcomes = [cli("evaluate", path, *FEW) for path in (best, folder, weights)]
    tables = [outcome.out.splitlines()[1:] for outcome in outcomes]
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) > 5

    # A calibrated copy is a file of the other kind.
    cli.out("calibrate", folder, *FEW, "--out", "calibrated.pt")
    copy = load_model("calibrated.pt", plugins=["patches"])
    assert copy.calibration is not None

    assert " of " in loading.initialise(copy.model, folder)
    for name in (str(weights), "hf:me/mine"):
        err = cli.fault("train", *QUICK, f"resume={name}", "name=again")
        one_line(err, "a published checkpoint holds no training state", "pass init=")


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


def test_names_and_order_of_the_data_are_followed(cli, best, tmp_path):
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
    out = cli.out("evaluate", best, "--plugin", "patches", "--write-classes", names)
    assert out == f"{names}: the names of the 10 classes of {best}\n"

    # The file gives the names back to a checkpoint that lost them.
    path = changed(best, tmp_path / "numbered.pt", [f"class {index}" for index in range(10)])
    err = cli.fault("evaluate", path, *FEW)
    one_line(err, "has other classes than the data, 10 and 10: number 0 is 'class 0' there")
    assert evaluated(path, "--class-names", names)["per_class"] == expected["per_class"]


def test_bad_names_end_in_one_line(cli, best, tmp_path):
    # The file is read first: there is no checkpoint yet.
    err = cli.fault("evaluate", "no.pt", "--class-names", tmp_path / "none.txt")
    one_line(err, "none.txt cannot be read (No such file or directory)")
