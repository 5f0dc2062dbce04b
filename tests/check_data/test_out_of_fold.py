"""Which model may judge which images, and what is said of one that has seen them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import one_line

from mldec.check_data.out_of_fold import judge, left_out_folds
from mldec.checkpoint import load_model
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch

Cli = Callable[..., tuple[int, str, str]]


def models(*folds: object) -> list[Any]:
    nodes = [{} if fold is None else {"fold": fold} for fold in folds]
    return [SimpleNamespace(config=SimpleNamespace(data=node)) for node in nodes]


@pytest.mark.parametrize("folds", [[None], ["2/5"], ["1/2", "2/2"], ["3/3", "1/3", "2/3"]])
def test_one_model_or_one_per_fold(folds: list[str | None]) -> None:
    paths = [f"{number}.pt" for number in range(len(folds))]
    assert left_out_folds(paths, models(*folds)) == folds


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        (["1/2", None], "1.pt was trained without data.fold: give one --checkpoint, or one per"),
        (["1/3", "2/3"], "0.pt left out fold 1/3, and there are 2 checkpoints: give one"),
        (["1/2", "2/3"], "1.pt left out fold 2/3, and there are 2 checkpoints: give one"),
        (["1/2", "1/2"], "1.pt left out fold 1/2, as 0.pt did: give one --checkpoint for each"),
        (["1/2", "01/2"], "the config in 1.pt cannot be used: data.fold is '01/2': it must be"),
        ([["1/2"], "1/2"], "the config in 0.pt cannot be used: data.fold is "),
    ],
)
def test_other_models_are_refused_with_the_file(folds: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        left_out_folds(["0.pt", "1.pt"], models(*folds))
    assert str(caught.value).startswith(message)


def test_every_training_image_is_judged_by_the_model_that_did_not_see_it(judges) -> None:
    loaded = [load_model(run, plugins=["patches"]) for run in judges.runs]
    judged = judge(judges.runs, loaded, ["device=cpu"], split="val")

    names = [Path(judged.name(image)).name for image in range(len(judged.labels))]
    assert sorted(names) == sorted(f"{number}.png" for number in range(200))
    assert not judged.bad

    rows = dict(line.split(",")[:2] for line in (judges.root / "data.csv").open())
    for image in range(0, 200, 17):
        model = loaded[judged.models[image]]
        pixels = model.transform(judged.picture(image))
        with torch.no_grad():
            logits = model.model(pixels[None])[0]
        np.testing.assert_allclose(judged.logits[image], logits, atol=1e-4)
        labels = [judged.classes[k] for k in np.flatnonzero(judged.labels[image])]
        assert ";".join(sorted(labels)) == ";".join(
            sorted(filter(None, rows[names[image]].split(";")))
        )


def test_one_model_judges_its_fold_or_what_it_was_trained_on_and_says_so(
    judges, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "mldec")
    path = judges.runs[0]
    loaded = load_model(path, plugins=["patches"])

    fold = judge([path], [loaded], ["device=cpu"], split="val")
    assert not caplog.messages
    rest = judge([path], [loaded], ["device=cpu"], split="train")
    assert f"{path} was trained on these images, and their wrong labels too" in caplog.messages[0]
    names = [part.name(image) for part in (fold, rest) for image in range(len(part.labels))]
    assert len(names) == len(set(names)) == 200
    assert isinstance(rest.datasets[0].transform, EvalTransform)

    # The fold is kept where data=NAME replaces the node of the data.
    words = ["data=csv", f"data.root={judges.root}", f"data.cache_dir={judges.root.parent}"]
    again = judge([path], [loaded], ["device=cpu", *words], split="val")
    np.testing.assert_array_equal(again.logits, fold.logits)
    assert len(caplog.messages) == 1

    official = judge([path], [loaded], ["device=cpu", "data.fold=null"], split="val")
    assert len(official.labels) == 40
    assert " training images, now 200): if these images were among it" in caplog.messages[1]


def test_wrong_options_are_one_line(judges, cli: Cli, tmp_path: Path) -> None:
    def refused(*words: str | Path) -> str:
        status, _, err = cli("check_data", "--plugin", "patches", "device=cpu", *words)
        assert status == 1
        one_line(err)
        return err

    first, second = judges.runs
    both = ("--checkpoint", first, "--checkpoint", second)
    assert "--split train: the folds are all training images" in refused(*both, "--split", "train")
    assert "data.fold: each checkpoint says which" in refused(*both, "data.fold=1/2")
    assert "--decode has no effect with --checkpoint" in refused(*both, "--decode", "3")
    assert "no file at nowhere.pt" in refused("--checkpoint", "nowhere.pt")

    (tmp_path / "data.csv").write_text(
        "path,labels\n" + "".join(f"{n}.png,sea\n" for n in range(9))
    )
    words = [f"data.root={tmp_path}", "data.absent=unchecked", f"data.cache_dir={tmp_path}"]
    assert f"{first} knows 3 classes, the data has 1" in refused("--checkpoint", first, *words)

    status, _, err = cli("check_data", "data=csv", "--errors", tmp_path / "e.csv")
    assert status == 1
    one_line(err, "--errors needs a model: pass --checkpoint FILE")


def test_models_of_other_images_are_refused(judges, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    shutil.copytree(judges.root, root)
    header, _, *rows = (root / "data.csv").read_text().splitlines()
    (root / "data.csv").write_text("\n".join([header, *rows]) + "\n")
    words = ["--plugin", "patches", "device=cpu", f"data.root={root}", f"data.cache_dir={tmp_path}"]
    words += ["--checkpoint", judges.runs[0], "--checkpoint", judges.runs[1]]

    status, _, err = cli("check_data", *words)
    assert status == 1
    one_line(err, "was trained on other data (", "go on with this one with data.changed=allow")
    assert any(run in err for run in judges.runs)
    status, out, err = cli("check_data", *words, "data.changed=allow")
    assert status == 0, err
    assert "199 images x 3 classes of 2 folds" in out


def test_scores_that_are_not_finite_are_refused(judges, cli: Cli, tmp_path: Path) -> None:
    state = read_torch(Path(judges.runs[0], "checkpoints", "best.pt"))
    for weights in (state["model"], state["ema"] or {}):
        weights["head.fc.weight"].fill_(torch.nan)
    torch.save(state, tmp_path / "nan.pt")
    status, _, err = cli(
        "check_data", "--plugin", "patches", "device=cpu", "--checkpoint", tmp_path / "nan.pt"
    )
    assert status == 1
    one_line(err, f"{tmp_path / 'nan.pt'}: a score is not finite")


def test_data_with_one_label_per_image_is_refused(judges, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "single"
    shutil.copytree(judges.root, root)
    rows = [f"{number}.png,{('red', 'green', 'blue')[number % 3]},train" for number in range(9)]
    (root / "data.csv").write_text("\n".join(["path,labels,split", *rows]) + "\n")
    words = [f"data.root={root}", f"data.cache_dir={tmp_path}", "data.exclusive=true"]
    status, _, err = cli(
        "check_data", "--plugin", "patches", "device=cpu", "--checkpoint", judges.runs[0], *words
    )
    assert status == 1
    one_line(err, "--checkpoint: wrong labels are looked for where an image may have several")
