"""The calibrate command, and the use of its thresholds in evaluate."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import QUICK, assert_equal, one_line

from mldec.checkpoint import load_model, loading
from mldec.data.digits import SceneSettings, digits
from mldec.data.types import fixed_sample
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.files.torch_files import duplicate, hash_record, read_torch, save, sha256_of

WORDS = ["--plugin", "patches", "data.val_images=60"]


@pytest.fixture(scope="module")
def best(digits_run, tmp_path_factory):
    """The best checkpoint of a copy of the run, whose folder tests may change."""
    folder = shutil.copytree(digits_run, tmp_path_factory.mktemp("outputs") / "digits")
    return folder / "checkpoints" / "best.pt"


def test_evaluate_uses_the_stored_thresholds(cli, best, tmp_path):
    words = [*WORDS, "--json", tmp_path / "c.json", "--csv", tmp_path / "c.csv"]
    out = cli.out("calibrate", best, *words)
    calibrated = best.with_name("calibrated.pt")
    assert str(calibrated) in out

    # evaluate reports the in-sample metrics of the calibration, for each class.
    content = json.loads((tmp_path / "c.json").read_text())
    stored = loading.load(calibrated).calibration
    assert (stored.error, stored.constant) == (content["metrics"]["ECE"], ())
    assert stored.metrics == content["metrics"]
    words = [*WORDS, "--json", tmp_path / "e.json"]
    cli.out("evaluate", calibrated, *words)
    report = json.loads((tmp_path / "e.json").read_text())
    for name in ("CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1"):
        assert report["metrics"][name] == pytest.approx(content["fitted"][name])
        assert content["metrics"][name] != content["fitted"][name]
    for name, values in report["per_class"].items():
        assert values["threshold"] == content["per_class"][name]["threshold"]
        assert values["precision"] == pytest.approx(content["per_class"][name]["fitted_precision"])
    rows = csv.DictReader((tmp_path / "c.csv").open())
    assert [row["class"] for row in rows] == list(report["per_class"])


def test_number_of_classes_per_image_also_ranks_the_classes(cli, best, tmp_path):
    out = tmp_path / "two.pt"
    words = [*WORDS, "--out", out, "--json", tmp_path / "c.json"]
    cli.out("calibrate", best, "--objective", "per_image:2", *words)
    content = json.loads((tmp_path / "c.json").read_text())
    assert loading.load(out).calibration.objective == "per_image:2"
    assert len({row["threshold"] for row in content["per_class"].values()}) == 10
    cli.out("evaluate", out, *WORDS, "--json", tmp_path / "e.json")
    metrics = json.loads((tmp_path / "e.json").read_text())["metrics"]
    assert metrics["CF1"] == pytest.approx(content["fitted"]["CF1"])

    # Metrics at top-3 rank logits by their margin above the threshold.
    setup = open_for_evaluation(
        load_model(out, plugins=["patches"]),
        EvalOptions(checkpoint=str(out), settings=["data.val_images=60"]),
    )
    scores = setup.scores()
    limits = np.array(setup.thresholds)
    decisions = scores.logits >= np.log(limits / (1 - limits))
    assert decisions.sum() == 2 * 60
    margins = scores.logits - np.log(limits / (1 - limits))
    top = np.argsort(np.argsort(-margins, 1), 1) < 3
    correct = (top & (scores.labels == 1)).sum(0)
    assert metrics["CP@3"] == pytest.approx(100 * np.mean(correct / np.maximum(top.sum(0), 1)))

    # A given threshold has no margins to compare, so the calibrated scores are ranked.
    words = [*WORDS, "--threshold", "0.5", "--json", tmp_path / "e.json"]
    cli.out("evaluate", out, *words)
    changed = json.loads((tmp_path / "e.json").read_text())["metrics"]["CP@3"]
    top = np.argsort(np.argsort(-scores.logits, 1), 1) < 3
    correct = (top & (scores.labels == 1)).sum(0)
    assert changed == pytest.approx(100 * np.mean(correct / np.maximum(top.sum(0), 1)))
    assert changed != pytest.approx(metrics["CP@3"])


def test_class_without_annotations_counts_in_neither_command(cli, digits_run, here):
    scenes = digits(SceneSettings(val_images=40)).val
    rows = [["path", "split", *scenes.classes.names]]
    for index in range(40):
        pixels, labels = fixed_sample(scenes.dataset, index)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(f"{index}.png")
        split = "train" if index < 4 else "val"
        cells = labels.tolist()
        if split == "val":
            cells[3] = ""
            cells[index % 2] = ""
        rows.append([f"{index}.png", split, *cells])
    with Path("data.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)

    words = ["--plugin", "patches", "data=csv", f"data.root={here}", f"data.cache_dir={here}"]
    words += ["data.image_size=64"]
    cli.out("evaluate", digits_run, *words, "--json", "e.json")
    cli.out("calibrate", digits_run, *words, "--out", "x.pt", "--json", "c.json")
    evaluated, calibration = (json.loads(Path(f"{name}.json").read_text()) for name in "ec")
    assert evaluated["metrics"]["classes_without_labels"] == 1
    for name in ("CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1"):
        assert evaluated["metrics"][name] == pytest.approx(calibration["uncalibrated"][name]) != 0
    recalls = [row["recall"] for row in calibration["per_class"].values()]
    assert calibration["metrics"]["CR"] == pytest.approx(np.mean(recalls[:3] + recalls[4:]))


def test_training_resumes_from_calibrated_copy(cli, digits_run, here):
    last = digits_run / "checkpoints" / "last.pt"
    assert cli("calibrate", last, *WORDS, "--out", "x.pt")[0] == 0
    before, after = loading.load(last), loading.load(Path("x.pt"))
    assert after.calibration is not None
    assert_equal(replace(after, calibration=None).to_state(), before.to_state())

    cli.out("train", *QUICK, "name=more", "resume=x.pt", "train.epochs=3")
    resumed = loading.load(Path("outputs/more/checkpoints/last.pt"))
    assert (resumed.epoch, resumed.calibration) == (3, None)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--objective", "cost:1,inf"], "--objective cost:1,inf"),
        (["--objective", "per_image:1,2"], "--objective per_image:1,2"),
        (["--out", "{best}"], "--out"),
        (["data.val_images=1", "data.seed=3"], "calibration"),
        (["--thresholds", "given.txt", "--json", "c.json"], "--thresholds"),
    ],
)
def test_invalid_options_are_errors(cli, best, here, words, name):
    Path("given.txt").write_text("0.5\n" * 10)
    words = [word.format(best=best) for word in words]
    out = [] if "--out" in words else ["--out", "x.pt"]
    one_line(cli.fault("calibrate", best, "--plugin", "patches", *words, *out), name)
    assert not Path("x.pt").exists()


def test_thresholds_of_a_file_are_stored(cli, best, tmp_path):
    names = loading.load(best).classes.names
    given = tmp_path / "given.csv"
    with given.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["class", "AP", "threshold"])
        writer.writerows([name, "", number / 20] for number, name in enumerate(names[::-1]))
    out = tmp_path / "given.pt"
    cli.out("calibrate", best, "--plugin", "patches", "--thresholds", given, "--out", out)

    # evaluate has the same metrics with the copy, and with the original and the file.
    reports = []
    for source, more in ((out, WORDS), (best, [*WORDS, "--thresholds", given])):
        cli.out("evaluate", source, *more, "--json", tmp_path / "e.json")
        reports.append(json.loads((tmp_path / "e.json").read_text()))
    assert reports[0]["metrics"] == reports[1]["metrics"]
    thresholds = {name: row["threshold"] for name, row in reports[0]["per_class"].items()}
    expected = {name: number / 20 for number, name in enumerate(names[::-1])}
    assert thresholds == pytest.approx(expected, abs=1e-6)


def test_calibrated_file_replaces_best_checkpoint_until_it_changes(cli, digits_run, here):
    run = shutil.copytree(digits_run, here / "outputs" / "digits")
    best = run / "checkpoints" / "best.pt"
    last = run / "checkpoints" / "last.pt"
    cli.out("calibrate", run, *WORDS, "--folds", "2")
    calibrated = best.with_name("calibrated.pt")
    assert sha256_of(calibrated) in hash_record(calibrated).read_text()
    assert loading.load(calibrated).calibration.source == sha256_of(best)

    # A folder means the calibrated file, unless --weights is given.
    assert load_model(run, plugins=["patches"]).calibration is not None
    for path, weights in ((run, "raw"), (run, "ema"), (best, None)):
        loaded = load_model(path, weights, plugins=["patches"])
        assert (loaded.path, loaded.calibration) == (best, None)

    # init=FOLDER and a second calibration use best.pt.
    model = load_model(best, plugins=["patches"]).model
    assert f"init from {best}: " in loading.initialize(model, run)
    given = here / "given.txt"
    given.write_text("0.5\n" * 10)
    cli.out("calibrate", run, "--plugin", "patches", "--thresholds", given)
    loaded = load_model(run, plugins=["patches"])
    assert (loaded.path, loaded.calibration.file) == (calibrated, "given.txt")
    assert set(loaded.calibration.slopes) == {1.0}

    # A new best.pt makes the calibrated file stale.
    save(last, {**loading.load(last).to_state(), "epoch": 3})
    duplicate(last, best)
    out = cli.out("evaluate", run, *WORDS)
    assert f"{calibrated} is ignored" in out
    assert f"using {best}\n" in out
    hash_record(best).unlink()
    assert load_model(run, plugins=["patches"]).path == best


def test_values_are_stored_in_the_order_of_the_checkpoint(cli, best, tmp_path):
    state = read_torch(best)
    state["classes"]["names"] = state["classes"]["names"][::-1]
    for weights in (state["model"], state["ema"]):
        for name in ("head.queries", "head.pool_weight", "head.pool_bias"):
            weights[name] = weights[name].flip(0)
    save(tmp_path / "reversed.pt", state)

    stored = []
    for path in (best, tmp_path / "reversed.pt"):
        out = tmp_path / "calibrated.pt"
        cli.out("calibrate", path, *WORDS, "--folds", "2", "--out", out)
        made = loading.load(out).calibration
        stored.append(np.array([made.thresholds, made.slopes, made.offsets]))
    assert stored[1] == pytest.approx(stored[0][:, ::-1])
    assert stored[1] != pytest.approx(stored[0])
