"""Training on Hugging Face data sets, in memory and by name."""

import io
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import mldec
from mldec.data.columns import Rules
from mldec.data.readers import dataset
from mldec.data.readers.hugging_face import is_single_label
from mldec.data.splits import HoldOut
from mldec.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

NAMES = ["dog", "cat; big", "none"]
INDICES = [[0], [1, 2], [], [0, 1], [2], [1]]
ONE_LABEL = [0, 1, 2, 0, 1, 2]
QUICK = ["backbone=tiny", "data.image_size=32", "train.workers=0", "device=cpu"]
TRAINED = [*QUICK, "head=csra", "train.cache_features=false"]


@pytest.fixture(autouse=True)
def offline(here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache" / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def photo(number: int) -> bytes:
    pixels = np.full((30, 40, 3), 20 * number, np.uint8)
    pixels[: 5 * number, :10] = (250, 0, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90 + number)
    return buffer.getvalue()


PHOTOS = [photo(number) for number in range(6)]


def table(features, start=0, image="image", **columns):
    """Return a data set of six photos, whose numbers begin with `start`."""
    cells = []
    for number in range(start, start + 6):
        cells.append(
            {"bytes": photo(number), "path": None}
            if start
            else {"bytes": PHOTOS[number], "path": f"{number}.jpg"}
        )
    features = datasets.Features({image: datasets.Image(), **features})
    return datasets.Dataset.from_dict({image: cells, **columns}, features=features)


def class_label(names=NAMES):
    return datasets.ClassLabel(names=names)


def multi_label(start=0):
    return table({"tags": datasets.List(class_label())}, start, tags=INDICES)


def load(data, **arguments):
    return dataset(in_memory=data, division=HoldOut(val_fraction=0), **arguments).load(
        "train", None
    )


def columns(**cells):
    """Return features and cells of class columns."""
    kinds = {bool: datasets.Value("bool"), int: datasets.Value("int8")}
    features = {name: kinds[type(values[0])] for name, values in cells.items()}
    return features, cells


DENSE = [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 0]]
SINGLE = [[1, 0, 0], [0, 1, 0], [0, 0, 1]] * 2
TEXT = datasets.Value("string")
YES_NO = class_label(["yes", "no"])
WORDS = [["dog"], ["cat; big", "none"], [], ["dog", "cat; big"], ["none"], ["cat; big"]]
FORMS = {
    "list of ClassLabel": ({"tags": datasets.List(class_label())}, {"tags": INDICES}, {}, DENSE),
    "only ClassLabel": ({"genre": class_label()}, {"genre": ONE_LABEL}, {}, SINGLE),
    "chosen ClassLabel": (
        {"coarse_label": class_label(["x", "y"]), "fine_label": class_label()},
        {"coarse_label": [0, 1] * 3, "fine_label": ONE_LABEL},
        {"rules": Rules(labels_column="fine_label")},
        SINGLE,
    ),
    "list of names": (
        {"labels": datasets.List(TEXT), "width": datasets.Value("int32")},
        {"labels": WORDS, "width": [40] * 6},
        {"classes": NAMES},
        DENSE,
    ),
    "vector": (
        {"labels": datasets.List(datasets.Value("int8"), length=3)},
        {"labels": DENSE},
        {"classes": NAMES},
        DENSE,
    ),
    "numbers": (
        {"label": datasets.Value("int64")},
        {"label": ONE_LABEL},
        {"classes": NAMES},
        SINGLE,
    ),
    "class columns": (
        {"dog": datasets.Value("bool"), "cat; big": datasets.Value("int8"), "none": YES_NO},
        {
            "dog": [True, False, False, True, False, False],
            "cat; big": [0, 1, 0, 1, 0, 1],
            "none": [1, 0, 1, 1, 0, 1],
        },
        {},
        DENSE,
    ),
}


@pytest.mark.parametrize(("features", "cells", "arguments", "expected"), FORMS.values(), ids=FORMS)
def test_labels_are_read_by_their_features(features, cells, arguments, expected):
    images = load(table(features, **cells), **arguments)
    assert images.classes == tuple(NAMES)
    assert images.labels.dense().tolist() == expected
    assert [images.storage.content(index) for index in range(6)] == PHOTOS


def test_missing_labels_and_boxes_are_not_labels():
    features = {
        "labels": datasets.List(class_label()),
        "objects": {"bbox": datasets.List(datasets.List(datasets.Value("float32")))},
    }
    cells = {"labels": [None, *INDICES[1:]], "objects": [{"bbox": [[0, 0, 1, 1]]}] * 6}
    assert load(table(features, **cells)).labels.dense()[0].tolist() == [0, 0, 0]

    data = table({"label": class_label()}, label=[-1, None, 2, 0, 1, 2])
    assert load(data).labels.counts_per_image().tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(DataError, match=r"row 0.*data\.exclusive"):
        load(data, exclusive=True)


def test_single_labels_are_those_of_class_label():
    rules = Rules()
    assert is_single_label(table({"label": class_label()}, label=ONE_LABEL), rules)
    assert not is_single_label(multi_label(), rules)
    assert not is_single_label(table({"label": TEXT}, label=["dog"] * 6), rules)


def test_order_and_formats_of_a_data_set_are_kept(here):
    data = multi_label()
    shuffled = data.select([3, 0, 5]).with_format("torch")
    shuffled = shuffled.with_transform(lambda batch: {"image": [0] * len(batch["image"])})
    images = load(shuffled)
    assert [images.storage.content(index) for index in range(3)] == [PHOTOS[i] for i in (3, 0, 5)]
    assert images.labels.dense().tolist() == [DENSE[i] for i in (3, 0, 5)]

    # Images as paths, which `datasets` does not embed.
    (here / "a.jpg").write_bytes(PHOTOS[4])
    cells = {"photo": [str(here / "a.jpg"), None], "label": [1, 0]}
    features = datasets.Features({"photo": datasets.Image(), "label": class_label()})
    images = load(datasets.Dataset.from_dict(cells, features=features))
    assert images.storage.content(0) == PHOTOS[4]
    with pytest.raises(DataError, match=r"data\[1\]"):
        images.storage.content(1)


UNSUPPORTED = {
    "no images": lambda: datasets.Dataset.from_dict({"text": ["a"] * 1000}),
    "two columns": lambda: multi_label().add_column("b", PHOTOS).cast_column("b", datasets.Image()),
    "no labels": lambda: multi_label().remove_columns("tags"),
    "several labels": lambda: table(
        {"a_label": class_label(), "b_label": class_label()}, a_label=ONE_LABEL, b_label=ONE_LABEL
    ),
    "stream": lambda: multi_label().to_iterable_dataset(),
    "streams": lambda: {"train": multi_label().to_iterable_dataset()},
    "column": lambda: multi_label()["tags"],
    "empty": lambda: datasets.DatasetDict(),
    "other": lambda: datasets.Features({"a": TEXT}),
}


@pytest.mark.parametrize("data", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_data_ends_in_a_short_message(data):
    with pytest.raises(mldec.UserError) as error:
        mldec.fit(data=data(), overrides=QUICK)
    assert len(str(error.value)) < 320
    assert not Path("outputs/finetune_frozen").exists()


def written_csv(folder, splits):
    """Write the photos of `multi_label` as files with a table, in the given splits."""
    folder.mkdir()
    lines = ["path,labels,split"]
    for split, start in splits.items():
        for number in range(6):
            path = f"{split}{number}.jpg"
            content = PHOTOS[number] if start == 0 else photo(start + number)
            (folder / path).write_bytes(content)
            names = [NAMES[index] for index in INDICES[number]]
            cell = "[" + ",".join(f'""{name}""' for name in names) + "]"
            lines.append(f'{path},"{cell}",{split}')
    (folder / "data.csv").write_text("\n".join(lines))


def test_runs_on_files_and_in_memory_are_the_same(here):
    written_csv(here / "files", {"train": 0, "val": 6})
    options = {"epochs": 1, "overrides": TRAINED}
    expected = mldec.fit(data=here / "files", classes=NAMES, name="files", **options)
    data = datasets.DatasetDict({"train": multi_label(), "validation": multi_label(6)})
    run = mldec.fit(data=data, name="memory", **options)
    assert run.metrics == expected.metrics
    assert run.load().classes == tuple(NAMES)

    assert run.evaluate(data=data)["metrics"] == expected.evaluate()["metrics"]
    assert run.evaluate("train", data=data)["metrics"] == expected.evaluate("train")["metrics"]
    # A model that was trained on files is evaluated on a data set.
    assert expected.evaluate(data=data)["metrics"] == expected.evaluate()["metrics"]
    run.calibrate(data=data)
    assert run.report("report.html", data=data).exists()

    # No image was written.
    for path in Path().rglob("*"):
        inside = path.is_file() and "files" not in path.parts
        assert not (inside and any(content in path.read_bytes() for content in PHOTOS)), path


def test_cached_features_and_left_out_scores_follow_the_content(here, caplog):
    data = multi_label()
    run = mldec.fit(data=data, name="ridge", overrides=QUICK)
    tokens = set((here / "cache").rglob("*.npy"))
    assert len(tokens) == 6
    expected = run.evaluate(data=data)["metrics"]
    assert expected["mAP"] == run.metrics["mAP"]

    # The same images in another order have the same left-out scores, with a warning.
    caplog.clear()
    reverse = data.select(range(5, -1, -1))
    assert run.evaluate(data=reverse)["metrics"] == pytest.approx(expected)
    assert "validation images" in caplog.text
    assert set((here / "cache").rglob("*.npy")) == tokens
    # Other images with the same names and labels do not.
    other = run.evaluate(data=multi_label(6))
    assert len(set((here / "cache").rglob("*.npy"))) == 12
    assert other["metrics"] != expected


def test_resume_compares_the_data(here):
    data = datasets.DatasetDict({"train": multi_label(), "val": multi_label(6)})
    mldec.fit(data=data, name="memory", epochs=1, overrides=TRAINED)
    options = {"name": "memory", "epochs": 2, "resume": "auto", "overrides": TRAINED}
    for split, start in (("train", 6), ("val", 0)):
        changed = datasets.DatasetDict({**data, split: multi_label(start)})
        with pytest.raises(mldec.UserError, match="images or their order changed"):
            mldec.fit(data=changed, **options)
    run = mldec.fit(data=data, **options)
    assert run.history["epoch"].max() == 2


def test_commands_of_a_run_in_memory_end_in_one_line(cli, here):
    run = mldec.fit(data=multi_label(), name="memory", overrides=QUICK)
    for words in (["evaluate"], ["calibrate"], ["report", "--out", "report.html"]):
        assert "data.name" in cli.fault(words[0], str(run.folder), *words[1:])
    with pytest.raises(ConfigError, match="data:"):
        run.evaluate(data="folder")
    with pytest.raises(ConfigError, match=r"data\.name"):
        run.evaluate()
    photo_file = here / "a.jpg"
    photo_file.write_bytes(PHOTOS[1])
    assert cli.out("predict", str(run.folder), str(photo_file))


def test_names_train_like_the_data_in_memory(cli, here):
    data = datasets.DatasetDict({"train": multi_label(), "validation": multi_label(6)})
    for split, part in data.items():
        part.to_parquet(here / "owner" / "set" / f"{split}.parquet")
    expected = mldec.fit(data=data, name="memory", epochs=1, overrides=TRAINED)

    settings = ["+experiment=finetune_frozen", "data=hf", "data.name=owner/set", *TRAINED]
    cli.out("train", *settings, "train.epochs=1", "train.min_steps=null", "name=named")
    assert mldec.Run("outputs/named").metrics == expected.metrics
    cli.out("evaluate", "outputs/named", "--json", "found.json")
    found = yaml.safe_load(Path("found.json").read_text())["metrics"]
    assert found == expected.evaluate(data=data)["metrics"]


def test_names_that_cannot_be_read_end_in_one_line(cli, here, monkeypatch):
    def no_network(*arguments, **options):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    command = ["train", "+experiment=finetune_frozen", "data=hf", *QUICK]
    for is_offline in (True, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        [line] = cli.fault(*command, "data.name=owner/none").splitlines()
        assert line.startswith("mldec: data.name=owner/none")

    # A loading script is never run.
    folder = here / "scripts"
    folder.mkdir()
    (folder / "scripts.py").write_text("open('executed', 'w')")
    assert "data.name=scripts" in cli.fault(*command, "data.name=scripts")
    assert not (here / "executed").exists()

    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    assert "3.6.0" in cli.fault(*command, "data.name=owner/none")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert ".[datasets]" in cli.fault(*command, "data.name=owner/none")
