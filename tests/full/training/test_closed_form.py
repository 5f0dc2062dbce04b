"""Runs whose head is fitted in closed form."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from pictures import picture
from PIL import Image

import mldec
from mldec.checkpoint import load_model
from mldec.config.compose import compose
from mldec.evaluation import frozen_features, left_out
from mldec.evaluation.left_out import read_training_images
from mldec.evaluators.average_precision import average_precision
from mldec.files.torch_files import read_torch
from mldec.heads import RidgeHead
from mldec.tools.cache import sizes_of
from mldec.training.trainer import Trainer

WORDS = ["+experiment=finetune_frozen", "backbone=tiny", "data.root=own"]
WORDS += ["data.cache_dir=cache", "data.image_size=32", "train.workers=0", "device=cpu"]
COLORS = {"red": (220, 40, 40), "green": (40, 200, 40), "dark": (20, 20, 20)}


@pytest.fixture
def photos(here):
    """Write 36 photos of noise around one of three colors, and a table without splits."""
    rng = np.random.default_rng(0)
    folder = Path("own")
    folder.mkdir()
    rows = []
    for number in range(36):
        name = list(COLORS)[number % 3]
        pixels = rng.integers(-20, 20, (40, 40, 3)) + COLORS[name]
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:02}.png")
        labels = [name] if name != "dark" else ["dark", "night"]
        rows.append((f"{number:02}.png", ";".join(labels)))
    with (folder / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "labels"), *rows])
    return folder


def lines(name):
    text = Path("outputs", name, "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def evaluated(cli, *words):
    cli.out("evaluate", *words, "--json=metrics.json")
    return json.loads(Path("metrics.json").read_text())


def test_every_photo_trains_and_is_scored_without_itself(cli, photos):
    cli.out("train", *WORDS, "name=mine")
    [line] = lines("mine")
    assert line["source"] == "leave-one-out"
    assert line["val/mAP_skip_empty"] > 90

    run = Path("outputs/mine")
    last = read_torch(run / "checkpoints" / "last.pt")
    best = read_torch(run / "checkpoints" / "best.pt")
    for name, tensor in last["model"].items():
        assert torch.equal(best["model"][name], tensor)
    assert last["epoch"] == 1
    assert last["config"]["data"]["val_fraction"] == 0

    # All commands use the stored scores.
    with np.load(run / "leave_one_out.npz") as stored:
        assert stored["names"][3] == b"03.png"
        assert stored["logits"].shape == (36, 4)
    content = evaluated(cli, run)
    assert content["source"] == "leave-one-out"
    assert content["images"] == 36
    assert content["metrics"]["mAP_skip_empty"] == pytest.approx(line["val/mAP_skip_empty"])
    cli.out("calibrate", run, "--json=calibrated.json")
    assert json.loads(Path("calibrated.json").read_text())["images"] == 36

    # A copy of the photos has the same scores. Other photos with the same names are scored anew.
    shutil.copytree("own", "copy")
    assert evaluated(cli, run, "data.root=copy")["metrics"] == content["metrics"]
    for name, other in zip(("00", "01", "02"), ("01", "02", "00"), strict=True):
        shutil.copy(photos / f"{other}.png", f"copy/{name}.png")
    assert evaluated(cli, run, "data.root=copy")["metrics"] != content["metrics"]
    cli.out("report", run, "--out=report.html")
    out = cli.out("check-data", "--checkpoint", run / "checkpoints" / "best.pt")
    assert "36 images x 4 classes" in out

    # A model of other photos, or without the file, does not use them.
    (run / "leave_one_out.npz").unlink()
    assert "leave_one_out.npz" in cli.out("evaluate", run)


def test_left_out_scores_equal_runs_without_the_photo(cli, photos):
    cli.out("train", *WORDS, "name=all", "head.kernel=linear")
    with np.load("outputs/all/leave_one_out.npz") as stored:
        logits = dict(zip(stored["names"].tolist(), stored["logits"], strict=True))

    # The photo with an exchanged label is suspicious in the left-out scores only.
    rows = Path("own/data.csv").read_text().replace("04.png,green", "04.png,red")
    Path("own/data.csv").write_text(rows)
    cli.out("train", *WORDS, "name=wrong", "head.kernel=linear")
    with np.load("outputs/wrong/leave_one_out.npz") as stored:
        wrong = dict(zip(stored["names"].tolist(), stored["logits"], strict=True))
    names = read_torch(Path("outputs/wrong/checkpoints/best.pt"))["classes"]["names"]
    green, red = names.index("green"), names.index("red")
    assert wrong[b"04.png"][green] > wrong[b"04.png"][red]
    assert logits[b"04.png"][green] > 0


def test_validation_split_is_evaluated_as_usual(cli, photos):
    cli.out("train", *WORDS, "name=split", "data.val_fraction=0.25")
    left_out, validation = lines("split")
    assert "loo/mAP_skip_empty" in left_out
    assert "source" not in validation
    content = evaluated(cli, "outputs/split")
    assert "source" not in content
    assert content["images"] == 9
    assert content["metrics"]["mAP"] == pytest.approx(validation["val/mAP"])
    # Gradient heads keep a tenth, and need validation photos.
    cli.out("train", *WORDS, "head=csra", "name=csra", "train.epochs=1", "train.min_steps=null")
    fraction = read_torch(Path("outputs/csra/checkpoints/last.pt"))["config"]["data"][
        "val_fraction"
    ]
    assert fraction == 0.1
    assert "head=ridge" in cli.fault("train", *WORDS, "head=csra", "data.val_fraction=0")


def test_scores_are_probabilities_with_thresholds_at_once(photos):
    run = mldec.fit("finetune_frozen", "own", name="python", overrides=[WORDS[1], *WORDS[3:]])
    model = run.load()
    assert set(model.thresholds) == {"dark", "green", "night", "red"}
    rows = model.predict(["own/00.png", "own/02.png"])
    assert [name for name, _ in rows[0]] == ["red"]
    assert {name for name, _ in rows[1]} == {"dark", "night"}

    # `init` copies the backbone only.
    start = f"init={run.folder}/checkpoints/best.pt"
    words = [WORDS[1], *WORDS[3:], "head=gap", start]
    again = mldec.fit("finetune_frozen", "own", name="next", epochs=1, overrides=words)
    one, other = (load_model(each.folder).model for each in (run, again))
    assert isinstance(one.head, RidgeHead)
    for name, tensor in other.backbone.state_dict().items():
        assert torch.equal(one.backbone.state_dict()[name], tensor)

    # Features are the mean token with both heads.
    photo = ["own/00.png"]
    torch.testing.assert_close(model.features(photo), again.load().features(photo))


@pytest.mark.parametrize(
    "word",
    [
        "loss=asl",
        "optim.lr=1e-3",
        "mix.prob=0.5",
        "train.epochs=3",
        "train.min_steps=5",
        "data.sampler=repeat_factor",
        "data.repeat_threshold=0.5",
    ],
)
def test_settings_of_gradient_heads_are_refused(cli, photos, word):
    err = cli.fault("train", *WORDS, "name=x", word)
    assert word in err
    assert "head=csra" in err
    assert not Path("outputs/x").exists()


def test_sampler_of_an_experiment_is_ignored(photos, capfd):
    words = [WORDS[0], WORDS[1], *WORDS[3:]]
    config = compose([*words, "data.sampler=repeat_factor", "data.repeat_threshold=1"])
    run = mldec.fit(config, "own", name="sampled")
    assert "images per epoch" not in capfd.readouterr().out
    saved = read_torch(run.folder / "checkpoints" / "last.pt")
    assert (saved["step"], saved["steps_per_epoch"]) == (1, 1)


def test_backbone_must_be_frozen(cli, photos):
    words = ["train.freeze=[]", "train.cache_features=false"]
    assert "head=csra" in cli.fault("train", *WORDS, "name=x", *words)


def test_run_continues_after_a_stop_during_the_features(cli, photos, monkeypatch):
    cli.out("train", *WORDS, "name=whole", "data.cache_dir=other")
    with monkeypatch.context() as patched:
        save = frozen_features.np.save
        files = []

        def save_and_stop(file, array):
            save(file, array)
            files.append(file)
            # Each file has two arrays.
            if len(files) == 10:
                os.kill(os.getpid(), signal.SIGTERM)

        patched.setattr(frozen_features.np, "save", save_and_stop)
        words = [*WORDS, "name=parts", "train.eval_batch_size=4"]
        assert cli("train", *words).status == 143
    assert 5 <= len(list(Path("cache").rglob("*.npy"))) < 36
    cli.out("train", *words, "resume=auto")
    whole, parts = (
        read_torch(Path("outputs", name, "checkpoints", "best.pt")) for name in ("whole", "parts")
    )
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=1e-3, atol=1e-3)
    # An ended run has nothing left to do.
    assert "nothing is left" in cli("train", *words, "resume=auto").out


def test_photos_of_two_folders_may_have_the_same_names(cli, photos):
    """Their keys inside the folders are equal, but the training did not see the validation."""
    rng = np.random.default_rng(1)
    for split in ("train", "val"):
        for number in range(12):
            name = ["red", "green"][number % 2]
            path = Path("classes", split, name, f"{number:02}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(-20, 20, (40, 40, 3)) + COLORS[name]
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    words = [word for word in WORDS if not word.startswith("data.root")]
    out = cli.out("train", *words, "data=folders", "data.root=classes", "name=two")
    [loo, line] = lines("two")
    assert "loo/top1" in loo
    assert "source" not in line
    assert "val/top1" in line

    tokens = list(Path("cache").glob("tokens-*/*.npy"))
    assert len(tokens) == 24, out
    cli.out("evaluate", "outputs/two")
    assert "leave-one-out" not in cli.out("evaluate", "outputs/two")


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_training_photos_speak_for_the_photos_that_resemble_them(cli, photos, kernel):
    # The fit has the photos in the order of their names and without the unreadable one.
    header, *rows = (photos / "data.csv").read_text().split()
    (photos / "data.csv").write_text("\n".join([header, *reversed(rows)]))
    (photos / "07.png").write_text("text")
    cli.out("train", *WORDS, "name=mine", f"head.kernel={kernel}", "data.bad_images=skip")
    loaded = load_model("outputs/mine")
    training = read_training_images(loaded)
    assert len(training.names) == 35
    assert "07.png" not in training.names

    for name, color in (("03.png", "red"), ("04.png", "green"), ("05.png", "dark")):
        image = loaded.transform(Image.open(photos / name))[None]
        tokens = loaded.model.backbone(image)
        index = loaded.classes.names.index(color)
        [every] = training.speaking_for(loaded.model.head, tokens, [index], count=36)
        values = [value for _, value in every]
        assert values == sorted(values, reverse=True)
        assert values[-1] > 0
        # Every third photo has this color.
        assert {int(other[:2]) % 3 for other, _ in every} == {int(name[:2]) % 3}
        own = every[0][0]
        [three] = training.speaking_for(loaded.model.head, tokens, [index], without=own)
        assert three == every[1:4]

    # The training images of another fit are not used.
    cli.out("train", *WORDS, "name=other", "data.bad_images=skip", "data.val_fraction=0.5")
    other = Path("outputs/other/leave_one_out.npz")
    assert read_training_images(load_model("outputs/other")) is not None
    other.write_bytes(Path("outputs/mine/leave_one_out.npz").read_bytes())
    assert read_training_images(load_model("outputs/other")) is None


def write_more(folder, count):
    """Write photos and a table, as a user who adds photos and a class does."""
    folder.mkdir(exist_ok=True)
    lines = ["path,labels"]
    for number in range(count):
        picture(seed=number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{'cat' if number % 2 else 'dog'}{';new' if number > 8 else ''}")
    (folder / "data.csv").write_text("\n".join(lines))


def test_more_photos_and_classes_reuse_the_features(cli, here):
    def cached():
        return {path: path.stat().st_mtime_ns for path in Path("cache").glob("tokens-*/*.npy")}

    overrides = [word for word in WORDS[1:] if word != "data.root=own"]
    for count in (8, 12, 14):
        write_more(Path("own"), count)
        before = cached()
        # The second training is in Python, and the third one in the same process.
        if count == 8:
            cli.out("train", *WORDS)
        else:
            run = mldec.fit("finetune_frozen", "own", overwrite=True, overrides=overrides)
            assert "new" in run.load().classes
        after = cached()
        assert len(after) == count
        assert before.items() <= after.items()


def test_size_of_the_features_is_listed_by_data_set_and_network(cli, here):
    for name, count, size in (("one", 4, 32), ("two", 6, 32), ("one", 4, 64)):
        write_more(Path(name), count)
        words = [word for word in WORDS if not word.startswith(("data.root", "data.image"))]
        words += [f"data.root={name}", f"data.image_size={size}", f"name={name}{size}"]
        cli.out("train", *words, "train.precision=fp32")
    # The first four photos of both folders are equal, so they are stored once.
    sizes = {}
    for folder in Path("cache").glob("tokens-*"):
        sizes |= sizes_of(folder)
    network = "features of resnet10t"
    assert set(sizes) == {
        f"{network}, 32 pixels, fp32  {here / 'one'}",
        f"{network}, 32 pixels, fp32  {here / 'two'}",
        f"{network}, 64 pixels, fp32  {here / 'one'}",
    }
    files = Path("cache").glob("tokens-*/*")
    assert sum(sizes.values()) == sum(path.stat().st_size for path in files)
    assert str(here / "two") in cli.out("cache", "--cache-dir=cache")


def test_metrics_with_new_photos_are_reported_as_too_high(cli, photos):
    cli.out("train", *WORDS, "name=mine")
    for name in ("36", "37"):
        shutil.copy(photos / "00.png", photos / f"{name}.png")
        with (photos / "data.csv").open("a") as file:
            file.write(f"{name}.png,red\n")
    assert "36 of 38 images" in cli.out("evaluate", "outputs/mine")
    assert "36 of 38 images" in cli.out("calibrate", "outputs/mine")
    # The new photos alone are not training photos, and neither are others with the same names.
    (photos / "new.csv").write_text("path,labels,split\n36.png,red,val\n37.png,red,val\n")
    words = ["data.file=new.csv", "data.classes=[dark,green,night,red]"]
    assert "too high" not in cli.out("evaluate", "outputs/mine", *words)
    for path in photos.glob("*.png"):
        Image.new("RGB", (40, 40)).save(path)
    assert "images trained" not in cli.out("evaluate", "outputs/mine")


def test_scores_are_found_from_the_folder_of_the_checkpoint(cli, photos, monkeypatch):
    cli.out("train", *WORDS, "name=mine")
    words = [f"data.root={photos.absolute()}", f"data.cache_dir={Path('cache').absolute()}"]
    monkeypatch.chdir("outputs/mine/checkpoints")
    assert "leave-one-out scores of" in cli.out("evaluate", "best.pt", *words)


def test_photo_that_was_repaired_after_the_training_is_named(cli, photos, monkeypatch):
    # The repaired photo is not in the sample of compared photos.
    monkeypatch.setattr(left_out, "NUM_CHECKED", 2)
    content = (photos / "07.png").read_bytes()
    (photos / "07.png").write_bytes(b"")
    cli.out("train", *WORDS, "name=mine", "data.bad_images=skip")
    (photos / "07.png").write_bytes(content)
    assert "07.png" in cli.fault("evaluate", "outputs/mine", "data.bad_images=stop")
    content = evaluated(cli, "outputs/mine")
    assert content["images"] == 35
    assert "07.png" in content["left_out"][0]


def test_class_without_a_readable_positive_is_reported(cli, photos):
    (photos / "rare.png").write_bytes(b"")
    with (photos / "data.csv").open("a") as file:
        file.write("rare.png,rare\n")
    out = cli.out("train", *WORDS, "name=mine", "data.bad_images=skip")
    assert "constant score: rare" in out


def test_wrong_labels_are_found_in_the_training_photos(cli, photos):
    cli.out("train", *WORDS, "name=mine")
    words = ["--checkpoint", "outputs/mine", "--split=train"]
    assert "was trained on these images" not in cli.out("check-data", *words)


def test_comparison_with_a_model_of_the_same_photos_is_reported(cli, photos):
    cli.out("train", *WORDS, "name=mine")
    cli.out("train", *WORDS, "name=csra", "head=csra", "train.epochs=1", "train.min_steps=null")
    words = ["report", "outputs/mine", "--compare=outputs/csra", "--out=report.html"]
    assert "too high" in cli.out(*words)
    assert "leave-one-out" in Path("report.html").read_text()
    words = ["report", "outputs/csra", "--compare=outputs/mine", "--out=report.html"]
    assert "too high" not in cli.out(*words)


def test_init_of_a_fitted_run_keeps_the_blocks_of_its_classifier(cli, photos):
    network = compose([*WORDS[:2]]).backbone
    backbone = timm.create_model(network["name"], num_classes=7, **network["model_args"])
    torch.save(backbone.state_dict(), "weights.pth")
    cli.out("train", *WORDS, "name=one", "backbone.pretrained=weights.pth")
    cli.out("train", *WORDS, "name=two", "init=outputs/one/checkpoints/best.pt")
    one, two = (load_model(f"outputs/{name}").model for name in ("one", "two"))
    assert one.backbone.block_sizes["top"] == 7
    assert two.backbone.block_sizes == one.backbone.block_sizes
    for name, tensor in one.head.state_dict().items():
        assert torch.equal(two.head.state_dict()[name], tensor), name


class KilledError(BaseException):
    """Ends a run without any cleanup, like a signal that cannot be caught."""


def kill(*_):
    raise KilledError


def test_resume_before_the_evaluation_logs_each_line_once(cli, photos, monkeypatch):
    words = [*WORDS, "name=mine", "data.val_fraction=0.25"]
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "evaluate", kill)
        with pytest.raises(KilledError):
            cli("train", *words)
    assert len(lines("mine")) == 1
    cli.out("train", *words, "resume=auto")
    left_out_line, validation = lines("mine")
    assert "loo/mAP_skip_empty" in left_out_line
    assert "val/mAP_skip_empty" in validation


class Listed(torch.utils.data.Dataset):
    """A data set in memory: images and labels [K]."""

    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def test_copies_of_a_photo_in_memory_have_their_own_scores(here):
    rng = np.random.default_rng(0)
    images = []
    for number in range(30):
        pixels = rng.integers(-90, 90, (40, 40, 3)) + list(COLORS.values())[number % 3]
        images.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    labels = np.eye(3, dtype=np.int8)[np.arange(31) % 3]
    labels[::5, 0] = 1
    # A copy with other labels.
    images.append(images[0])
    labels[30] = [0, 1, 0]

    words = [WORDS[1], *WORDS[3:]]
    data = Listed(images, torch.from_numpy(labels))
    run = mldec.fit("finetune_frozen", data, classes=list(COLORS), overrides=words)
    with np.load(run.folder / "leave_one_out.npz") as stored:
        logits = stored["logits"]
        assert len(set(stored["names"].tolist())) == 31
    assert not np.array_equal(logits[0], logits[30])
    expected = average_precision(logits, labels)["none"].mean().item()
    assert run.best.value == pytest.approx(100 * expected)
