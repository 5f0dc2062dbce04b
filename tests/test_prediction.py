"""The functions that score images; the command is in test_predict.py."""

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from pictures import picture
from PIL import Image

from mldec import prediction
from mldec.checkpoint import Loaded, load_model
from mldec.data.base import Classes
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError
from mldec.explain.pictures import Typeface
from mldec.prediction import Pictures, best, find_images, named, predict, scores, with_classes

CPU = torch.device("cpu")


class Given(torch.nn.Module):
    """A model whose logits are the mean colours, and which keeps its queries."""

    queries: torch.Tensor | None = None

    def forward(self, images: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        self.queries = queries
        images = images if images.is_floating_point() else images.float() / 255
        return 4 * images.mean((2, 3)).half() - 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("prediction") / "x.pt"
    torch.save(hostile.good(), path)
    return load_model(path)


def with_model(whole: Loaded, model: Any, **classes: Any) -> Loaded:
    return dataclasses.replace(whole, model=model, classes=Classes(("r", "g", "b"), **classes))


@pytest.fixture
def loaded(whole: Loaded) -> Loaded:
    return with_model(whole, Given())


def test_scores_are_sigmoids_or_a_softmax_in_float32(whole: Loaded) -> None:
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    logits = Given()(images).float()
    several = scores(with_model(whole, Given()), images)
    assert several.dtype == torch.float32
    torch.testing.assert_close(several, 1 / (1 + (-logits).exp()))
    one = scores(with_model(whole, Given(), exclusive=True), images)
    torch.testing.assert_close(one, logits.exp() / logits.exp().sum(1, keepdim=True))
    torch.testing.assert_close(scores(with_model(whole, Given()), images / 255), several)


def test_a_zero_shot_model_gets_its_word_vectors(whole: Loaded) -> None:
    words, model = torch.randn(3, 5), Given()
    scores(with_model(whole, model, queries=words), torch.zeros(1, 3, 8, 8))
    assert model.queries is words


def test_files_are_taken_and_folders_searched(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "deep/er/c.webp", "notes.txt", "d.eps", "e.svg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    found = find_images([str(tmp_path / "notes.txt"), str(tmp_path), str(tmp_path / "a.png")])
    names = ["notes.txt", "a.png", "b.JPG", "deep/er/c.webp", "a.png"]
    assert [str(path.relative_to(tmp_path)) for path in found] == names
    with pytest.raises(DataError, match="empty: the folder holds no image"):
        find_images([str(tmp_path / "a.png"), str(tmp_path / "empty")])
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        find_images([str(tmp_path / "nothing")])


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Five files; the second and the fifth are no images."""
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        picture(seed=number).save(path)
    for broken in (paths[1], paths[4]):
        broken.write_text("no image")
    return paths


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_each_path_has_its_scores_or_its_error(
    loaded: Loaded, photos: list[Path], batch_size: int
) -> None:
    answers = list(predict(loaded, photos, batch_size=batch_size, device=CPU))
    assert [path for path, _ in answers] == photos
    for number, (path, answer) in enumerate(answers):
        if number in (1, 4):
            assert isinstance(answer, DataError)
            assert str(answer).startswith(f"{path}: ")
        else:
            with Image.open(path) as image:
                expected = scores(loaded, loaded.transform(image)[None])[0]
            torch.testing.assert_close(answer, expected)


def test_a_request_to_stop_is_seen_between_batches(loaded: Loaded, photos: list[Path]) -> None:
    stop: Any = []
    answered = []
    for path, _ in predict(loaded, photos, batch_size=2, device=CPU, stop=stop):
        answered.append(path)
        stop.append("SIGTERM")
    assert answered == photos[:2], "the batch is finished"


def test_scores_that_are_not_finite_are_an_error(whole: Loaded, photos: list[Path]) -> None:
    class Broken(Given):
        def forward(self, images: torch.Tensor, queries: Any = None) -> torch.Tensor:
            logits = super().forward(images)
            logits[0, 1] = torch.nan
            return logits

    answers = predict(with_model(whole, Broken()), [photos[0], photos[2]], batch_size=2, device=CPU)
    (_, first), (_, second) = answers
    assert isinstance(first, DataError)
    assert "its scores are not finite" in str(first)
    assert isinstance(second, torch.Tensor)


def test_too_large_a_batch_names_the_option(whole: Loaded, photos: list[Path]) -> None:
    class Hungry(Given):
        def forward(self, images: torch.Tensor, queries: Any = None) -> torch.Tensor:
            raise MemoryError

    message = "^out of memory on cpu: 3 images of 64 pixels at a time; pass a smaller --batch-size$"
    with pytest.raises(OutOfMemoryError, match=message):
        list(predict(with_model(whole, Hungry()), photos, batch_size=3, device=CPU))


@pytest.mark.parametrize(
    ("top", "threshold", "names"),
    [
        (3, 0.0, "bca"),
        (10**30, 0.0, "bcad"),
        (1, 0.0, "b"),
        (4, 0.5, "bca"),
        (4, 0.6, "b"),
        (4, 1.0, ""),
    ],
)
def test_the_best_classes(top: int, threshold: float, names: str) -> None:
    row = torch.tensor([0.5, 0.75, 0.5, 0.25])
    row[2] += 0.01
    answers = best(tuple("abcd"), row, top=top, threshold=threshold)
    assert "".join(answer["name"] for answer in answers) == names
    assert [answer["score"] for answer in answers] == [row["abcd".index(n)].item() for n in names]


def test_of_equal_scores_the_lower_class_comes_first() -> None:
    answers = best(tuple("abcde"), torch.full((5,), 0.5), top=3, threshold=0.5)
    assert [answer["name"] for answer in answers] == ["a", "b", "c"]


def test_a_path_that_is_not_utf8_is_named_in_hexadecimal_too() -> None:
    assert named(Path("a/\u65e5.png")) == {"image": "a/\u65e5.png"}
    odd = os.fsdecode(b"a/\xff.png")
    assert named(Path(odd)) == {"image": "a/\\xff.png", "image_bytes": b"a/\xff.png".hex()}


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    """A file of word vectors of width 2."""
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0\ndog 0 1\nred 1 1\npanda -1 0\n")
    return str(path)


def test_other_classes_of_a_zero_shot_model(whole: Loaded, vectors: str) -> None:
    zero_shot = with_model(whole, Given(), queries=torch.zeros(3, 2))
    other = with_classes(zero_shot, " dog, cat,,", vectors)
    assert other.classes.names == ("dog", "cat")
    assert other.classes.queries is not None
    assert other.classes.queries.tolist() == [[0, 1], [1, 0]]
    assert other.model is zero_shot.model
    assert zero_shot.classes.names == ("r", "g", "b")


@pytest.mark.parametrize(
    ("width", "names", "error", "message"),
    [
        (None, "cat", CheckpointError, "knows its own classes only"),
        (2, " , ", ConfigError, "names no class: pass names with commas"),
        (2, "cat,cat", DataError, "cat"),
        (2, "cat,unicorn", DataError, "unicorn"),
        (5, "cat", CheckpointError, "by word vectors of 5 numbers, the data has vectors of 2"),
    ],
)
def test_other_classes_that_cannot_be_scored(
    whole: Loaded, vectors: str, width: int | None, names: str, error: Any, message: str
) -> None:
    queries = None if width is None else torch.zeros(3, width)
    with pytest.raises(error, match=message):
        with_classes(with_model(whole, Given(), queries=queries), names, vectors)


@pytest.mark.parametrize(("crop", "size"), [(None, (400, 200)), (0.5, (100, 100))])
def test_a_picture_shows_the_part_that_the_model_saw(
    whole: Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    crop: float | None,
    size: tuple[int, int],
) -> None:
    drawn = []
    monkeypatch.setattr(prediction, "draw", lambda image, *rest: drawn.append(image) or image)
    picture(400, 200).save(tmp_path / "x.png")
    loaded = dataclasses.replace(whole, transform=EvalTransform(image_size=64, crop=crop))

    pictures = Pictures(loaded, tmp_path / "drawn", Typeface(), CPU)
    target = pictures.add(tmp_path / "x.png", [{"name": loaded.classes.names[1], "score": 0.5}])
    assert target.is_file()
    [image] = drawn
    assert image.size == size
    left, top = (400 - size[0]) // 2, (200 - size[1]) // 2
    expected = picture(400, 200).crop((left, top, left + size[0], top + size[1]))
    assert image.tobytes() == expected.tobytes()


def test_too_large_a_heat_map_names_the_option(whole: Loaded, tmp_path: Path) -> None:
    class Hungry(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    model = copy.copy(whole.model)
    model._modules = {**model._modules, "backbone": Hungry()}
    with pytest.raises(OutOfMemoryError, match="a heat map of one image of 64 pixels; leave --pic"):
        Pictures(dataclasses.replace(whole, model=model), tmp_path, Typeface(), CPU)
