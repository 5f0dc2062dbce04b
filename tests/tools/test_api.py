"""`mldec.fit`, `mldec.Run` and `mldec.load` from Python."""

import csv
import json
import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas
import patches
import pytest
import torch
from PIL import Image
from support import assert_equal, experiment, numbers
from trees import write_texts

import mldec
from mldec.api import _data_option, _parse_table
from mldec.config.compose import compose
from mldec.errors import Stopped
from mldec.files.torch_files import read_torch

SMALL = ["plugins=[patches]", "backbone._target_=patches.Patches", "train.workers=0"]
SMALL += ["log.images=0", "device=cpu"]
DIGITS = SMALL + ["data.train_images=48", "data.val_images=24", "train.batch_size=16"]
DIGITS += ["head.embed_dim=32", "head.mlp_dim=32"]
PHOTOS = SMALL + ["head=csra", "data.image_size=32", "train.cache_features=false"]
PLUGIN = {"plugin": ["patches"]}
DOT = np.zeros((8, 8, 3), np.uint8)


@pytest.fixture(autouse=True)
def same_handlers():
    """Restore the handlers of the log: `fit` logs to the console of the test."""
    log = logging.getLogger("mldec")
    handlers = list(log.handlers)
    yield
    log.handlers[:] = handlers


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve photos in a folder with data.csv. A photo is bright or dark, with a red corner."""
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    for number in range(12):
        labels = []
        pixels = np.full((40, 50, 3), 30 + number, np.uint8)
        if number % 2:
            labels.append("bright; sunny")
            pixels += 180
        if number % 3 == 0:
            labels.append("corner")
            pixels[:20, :20] = (250, 0, 0)
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        rows.append((path.name, labels, "val" if number >= 8 else "train"))

    with (folder / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "labels", "split"])
        for name, labels, split in rows:
            text = '["' + '", "'.join(labels) + '"]' if labels else ""
            writer.writerow([name, text, split])
    return folder, rows


@pytest.fixture
def run(digits_run):
    return mldec.Run(digits_run)


def test_fit_gives_the_bits_of_the_command(cli, here):
    settings = ["train.epochs=1", "seed=3", "name=mine"]
    cli.out("train", "+experiment=digits", *DIGITS, *settings)
    command = (here / "outputs" / "mine").rename(here / "command")

    torch.rand(3)  # the state of the random generator does not matter
    run = mldec.fit("digits", epochs=1, seed=3, name="mine", overrides=DIGITS)
    for name in ("last.pt", "best.pt"):
        expected = read_torch(command / "checkpoints" / name)
        assert_equal(read_torch(run.folder / "checkpoints" / name), expected)
    assert numbers(run.folder) == numbers(command)


def test_overrides_may_depend_on_the_number_of_epochs(here):
    # The experiment has two epochs.
    run = mldec.fit("digits", epochs=5, overrides=[*DIGITS, "train.stop_epoch=3"])
    assert run.history["epoch"].max() == 3


def test_all_forms_of_data_give_the_same_run(photos, here):
    folder, rows = photos
    frame = pandas.DataFrame(rows, columns=["path", "labels", "split"])
    frame["path"] = [folder / name for name in frame["path"]]
    found = []
    for name, data in (("folder", folder), ("file", str(folder / "data.csv")), ("frame", frame)):
        run = mldec.fit(data=data, epochs=1, name=name, overrides=PHOTOS)
        found.append(run.metrics)
        assert run.load(**PLUGIN).classes == ("bright; sunny", "corner")
    assert found[0] == found[1] == found[2]
    assert found[0]
    assert run.evaluate("train", **PLUGIN)["images"] == 8

    pairs = [(folder / name, labels) for name, labels, _ in rows]
    run = mldec.fit(
        data=pairs, epochs=1, name="pairs", overrides=[*PHOTOS, "data.val_fraction=0.3"]
    )
    assert run.evaluate(**PLUGIN)["images"] == 4


def test_run_reads_its_folder(run):
    assert run.metrics[run.metric] == run.value == run.best.value
    assert run.ended == "train.epochs is 2"
    assert run.history["step"].tolist() == [2, 4, 6, 8]
    assert run.history["val/mAP"].notna().tolist() == [False, True, False, True]
    assert str(run.folder) in repr(run)


def test_evaluate_and_calibrate_return_the_json_of_the_commands(run, here):
    content = run.evaluate(**PLUGIN, threshold=0.4)
    assert content["metrics"][run.metric] == pytest.approx(run.value, abs=1e-4)
    assert content["images"] == 40

    out = str(here / "calibrated.pt")
    content = run.calibrate(objective="precision:0.5", out=out, **PLUGIN)
    assert content["objective"] == "precision:0.5"
    model = mldec.load(out, **PLUGIN)
    assert list(model.thresholds) == list(model.classes)
    assert run.load(**PLUGIN).thresholds is None


def test_model_predicts_and_has_features(run, photos):
    folder, _ = photos
    model = run.load(**PLUGIN, device="cpu", top=3)
    paths = [folder / "0.png", folder / "1.png"]
    rows = model(paths)
    assert [len(row) for row in rows] == [3, 3]
    scores = rows[0].scores
    assert all(name in repr(rows[0]) for name, _ in rows[0])
    [row] = model.predict(paths[:1], threshold=0.5, top=10)
    expected = [name for name, score in zip(model.classes, scores, strict=True) if score >= 0.5]
    assert {name for name, _ in row} == set(expected)

    images = torch.stack([model.transform(Image.open(path)) for path in paths])
    with torch.no_grad():
        tokens = model.module.backbone(images)
        logits = model.module(images)
    torch.testing.assert_close(model.features(paths), tokens.mean(1))
    torch.testing.assert_close(rows[0].scores, logits[0].sigmoid())
    assert "10 (" in repr(model)


def test_predictions_as_arrays_frames_and_dictionaries(run, photos, here):
    folder, _ = photos
    model = run.load(**PLUGIN, device="cpu", threshold=0.5)
    (here / "broken.png").write_bytes(b"no image")
    paths = [folder / "0.png", here / "broken.png", folder / "1.png"]

    scores = model.predict_proba(paths)
    images = torch.stack([model.transform(Image.open(path)) for path in paths[::2]])
    with torch.no_grad():
        expected = model.module(images).sigmoid().numpy()
    assert (scores.shape, scores.dtype) == ((3, 10), np.float32)
    np.testing.assert_allclose(scores[::2], expected, rtol=1e-5)
    assert np.isnan(scores[1]).all()

    rows = model(paths)
    frame = rows.to_frame()
    assert list(frame) == ["image", "error", "predictions", *model.classes]
    np.testing.assert_array_equal(frame[list(model.classes)].to_numpy(), scores)
    assert frame["image"].tolist() == list(map(str, paths))
    assert frame["error"].notna().tolist() == [False, True, False]
    assert frame["predictions"].map(len).tolist() == (scores >= 0.5).sum(1).tolist()
    assert model([]).to_frame().shape == (0, 13)

    content = json.loads(json.dumps([row.to_dict() for row in rows]))
    assert [list(entry) for entry in content] == [
        ["image", "predictions"],
        ["image", "error"],
        ["image", "predictions"],
    ]
    assert [(item["name"], item["score"]) for item in content[0]["predictions"]] == list(rows[0])


def test_heat_maps_cover_the_photo(run, photos):
    folder, _ = photos
    model = run.load(**PLUGIN, device="cpu", top=2)
    photo = Image.open(folder / "0.png")  # 50 x 40 pixels
    maps = model.heat_maps(photo)
    assert list(maps) == [name for name, _ in model(photo)]
    [raw] = model._engine.heat_maps(model.transform(photo)[None], [[3]])
    [heat] = model.heat_maps(folder / "0.png", classes=[model.classes[3]]).values()
    assert heat.shape == (40, 50)
    assert (heat.min() >= 0, heat.max(), heat.dtype) == (True, 1, np.float32)
    # The maximum stays at its place, except for rounding.
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    y, x = np.unravel_index(raw[0].argmax().item(), raw[0].shape)
    assert abs((row + 0.5) / 40 - (y + 0.5) / 32) < 0.05
    assert abs((column + 0.5) / 50 - (x + 0.5) / 32) < 0.05


def test_overwrite_renames_the_earlier_run(digits_run, here):
    shutil.copytree(digits_run, here / "outputs" / "digits")
    with pytest.raises(mldec.UserError, match="outputs/digits"):
        mldec.fit("digits", epochs=1, overrides=DIGITS)
    run = mldec.fit("digits", epochs=1, overwrite=True, overrides=DIGITS)
    assert run.ended == "train.epochs is 1"
    assert mldec.Run("outputs/digits.old").ended == "train.epochs is 2"


def test_silent_run_prints_nothing(here, capfd, monkeypatch):
    monkeypatch.setattr("mldec.runtime.console.on_terminal", lambda: True)
    monkeypatch.setattr("mldec.training.log.on_terminal", lambda: True)
    monkeypatch.setattr("mldec.training.trainer.ConstantScores.classes", lambda self: [])
    settings = dict(word.split("=") for word in DIGITS)
    settings |= {"optim.lr": 5e-4, "train": {"epochs": 1, "compile": False}, "head": "gap"}
    del settings["head.embed_dim"], settings["head.mlp_dim"]
    run = mldec.fit("digits", verbose=False, overrides=settings)
    options = {**PLUGIN, "overrides": {"data.val_images": 8}}
    assert run.evaluate(verbose=False, **options)["images"] == 8
    assert capfd.readouterr() == ("", "")
    assert "lr: 0.0005" in (run.folder / "config.yaml").read_text()
    assert "starting" not in (run.folder / "train.log").read_text()
    assert "ended after epoch 1" in (run.folder / "train.log").read_text()

    run.evaluate(**PLUGIN, threshold=0.5)
    assert "mAP" in capfd.readouterr().out


def test_ctrl_c_saves_and_returns_the_run_in_a_notebook(here, monkeypatch):
    config = compose(["+experiment=digits", *DIGITS])
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", "SIGINT:4")
    with pytest.raises(Stopped):
        mldec.fit(config, name="program")

    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    run = mldec.fit(config)
    assert run.ended is None
    assert run.best is not None

    # A second run in the same process continues it.
    monkeypatch.delenv("PATCHES_SIGNAL")
    run = mldec.fit(config, resume="auto")
    assert run.ended == "train.epochs is 2"


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (lambda run: mldec.fit("digitz"), "digits"),
        (lambda run: mldec.fit("digits", overrides=["train.epoch=1"]), "train.epoch"),
        (lambda run: mldec.fit("digits", epochs=0), "epochs"),
        (lambda run: mldec.fit("digits", overrides="head=gap"), "overrides"),
        (lambda run: mldec.fit("digits", overrides={"optim": {"rate": 1}}), "optim.rate"),
        (lambda run: mldec.fit("digits", overwrite=True, resume="auto"), "overwrite"),
        (lambda run: mldec.fit(data="nowhere"), "nowhere"),
        (lambda run: mldec.fit("coco_smoke", "nowhere"), "MS-COCO"),
        (lambda run: mldec.fit(data=[("a.png",)]), "row 0"),
        (lambda run: mldec.fit(data=[("none/a.png", "dog")]), "none/a.png"),
        (lambda run: mldec.fit(data=run.folder / "checkpoints"), "checkpoints"),
        (lambda run: mldec.fit("digits", resume=True), "resume"),
        (lambda run: mldec.fit("digits", name=5), "name"),
        (lambda run: mldec.fit("digits", name="a\0b"), "name"),
        (lambda run: mldec.fit("digits", seed="x"), "seed"),
        (lambda run: mldec.fit("digits", seed=1.5), "seed"),
        (lambda run: mldec.fit("digits", overrides=None), "overrides"),
        (lambda run: mldec.Run(None), "Run: None"),
        (lambda run: run.calibrate(objectives="f1"), "objectives"),
        (lambda run: run.evaluate(threshold=3), "threshold"),
        (lambda run: run.calibrate(objective="f2"), "^objective f2: "),
        (lambda run: run.export("a.onnx", precision="int8"), "^precision int8.* pass verify "),
        (lambda run: run.load(**PLUGIN, class_names="names"), "^class_names names: "),
        (lambda run: run.load(**PLUGIN, classes="a,b"), "^classes: "),
        (lambda run: run.load(**PLUGIN).heat_maps([]), "heat_maps"),
        (lambda run: run.load(**PLUGIN).heat_maps(DOT, ["ten"]), "classes.*ten"),
        (lambda run: mldec.Run("nowhere"), "nowhere"),
    ],
)
def test_errors_are_user_errors_with_a_name(work, named, run, here):
    Path("names").write_text("a\n\n")
    with pytest.raises(mldec.UserError, match=named):
        work(run)
    assert not Path("outputs").exists() or not list(Path("outputs").glob("*/checkpoints"))


REPEATED = pandas.DataFrame([["a.png", "b.png", "dog"]], columns=["path", "path", "labels"])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "data"),
        (3, "data: 3"),
        (pandas.DataFrame({"image": ["a.png"]}), "data.labels_column"),
        ([("a.png", "dog"), None], "row 1"),
        (["ab"], "row 0"),
        ({"a.png": "dog"}, "data"),
        ({"train": REPEATED, "val": REPEATED}, "data: .*column split"),
        ([(5.5, "dog")], "5.5"),
        ([(None, "dog")], "row 0"),
        ([(float("nan"), "dog")], "row 0"),
        ([(b"a.png", "dog")], "row 0"),
        ([(Image.new("RGB", (9, 9)), "dog")], "row 0"),
        (REPEATED, "listed twice"),
    ],
)
def test_other_tables_in_memory_are_an_error(data, named, here):
    with pytest.raises(mldec.UserError, match=named) as error:
        _parse_table(experiment("finetune_frozen"), data, here)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "labels",
    [
        {"a": 1, "b": 0},
        b"a",
        True,
        torch.tensor([1]),
        [None, "a"],
        [float("nan"), "a"],
        [["a"], ["b"]],
        [True, "a"],
        [0, 1, 0],
    ],
)
def test_other_labels_are_an_error(labels, here):
    with pytest.raises(mldec.UserError, match="row 0"):
        _parse_table(experiment("finetune_frozen"), [("a.png", labels), ("b.png", "b")], here)


def test_any_iterable_of_text_is_a_list_of_labels(here):
    labels = [frozenset("a"), {"a": 1}.keys(), (name for name in "ab"), np.array(["b"])]
    labels += [pandas.Series(["a", "b"]), None, float("nan"), pandas.NA, "c; d", (2, 7)]
    pairs = [(here / f"{number}.png", cell) for number, cell in enumerate(labels)]
    folder = here / "outputs" / "mine"
    config, annotations = _parse_table(experiment("finetune_frozen"), pairs, folder)
    table = annotations.table
    assert table.classes == ("2", "7", "a", "b", "c; d")
    assert table.labels.counts_per_image().tolist() == [1, 1, 2, 1, 2, 0, 0, 0, 1, 2]
    with Path(config.data["file"]).open(encoding="utf-8") as file:
        assert [row["labels"] for row in csv.DictReader(file)][2] == '["a", "b"]'


def test_unusable_paths_of_photos_are_errors(run):
    model = run.load(**PLUGIN, device="cpu")
    for path in ("", "x" * 5000, "a\0b"):
        with pytest.raises(mldec.UserError):
            model(path)


def test_tables_are_found_before_class_folders(photos, here):
    folder, _ = photos
    for name in ("a", "b"):
        (here / "own" / name).mkdir(parents=True)
        shutil.copy(folder / "1.png", here / "own" / name / "1.png")
    assert _data_option("finetune_frozen", here / "own", []) == ["data=folders"]
    write_texts(here / "own", {"train.csv": "path,labels\na/1.png,x\n"})
    assert _data_option("finetune_frozen", here / "own", []) == []
    write_texts(here / "own", {"obj.names": "x\n"})
    with pytest.raises(mldec.UserError, match=r"obj\.names .*data=csv"):
        _data_option("finetune_frozen", here / "own", [])


def test_names_are_listed():
    assert set(mldec.__all__) <= set(dir(mldec))
    with pytest.raises(AttributeError, match="fitt"):
        mldec.fitt  # noqa: B018
