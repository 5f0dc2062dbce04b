import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import picture
from PIL import Image
from torch import Tensor

from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import Stopped
from mldec.predict import answers as answering_module
from mldec.predict.answers import Answering, Rule, counted
from mldec.predict.engine import Answers
from mldec.predict.inputs import Inputs, Item
from mldec.runtime.signals import NothingCame, StopRequest

CPU = torch.device("cpu")


class MeanColours:
    """An engine whose scores are the mean colours."""

    classes = Classes(("r", "g", "b"))
    thresholds = None
    transform = EvalTransform(image_size=8)
    decoder = "pillow"
    image_size = shorter_side = 8

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        scores = torch.stack([image.float().mean((1, 2)) / 255 for image in images])
        return Answers(scores, 2 * scores if features else None)


def answering(engine: Any = None, **options: Any) -> Answering:
    rule = Rule(classes=MeanColours.classes)
    return Answering(engine or MeanColours(), rule, CPU, workers=0, **options)


@pytest.fixture
def photos(tmp_path: Path) -> list[Item]:
    """Five files; the second and the fifth are no images."""
    for number in range(5):
        path = tmp_path / f"{number}.png"
        if number in (1, 4):
            path.write_text("no image")
        else:
            picture(seed=number).save(path)
    return list(Inputs([str(tmp_path)]))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_each_image_has_its_scores_or_its_error(photos: list[Item], batch_size: int) -> None:
    made = answering(batch_size=batch_size, features=True)
    rows = list(made.rows(iter(photos), StopRequest()))
    assert [row.image for row in rows] == [item.name for item in photos]
    for number, row in enumerate(rows):
        if number in (1, 4):
            assert str(row.error).startswith(f"{photos[number].path}: not an image")
            assert (row.scores, row.features, row.predictions) == (None, None, ())
        else:
            with Image.open(photos[number].path) as image:
                expected = MeanColours.transform(image).float().mean((1, 2)) / 255
            assert row.scores is not None
            assert row.features is not None
            torch.testing.assert_close(row.scores, expected)
            torch.testing.assert_close(row.features, 2 * expected)
            assert [item.score for item in row.predictions] == sorted(
                expected.tolist(), reverse=True
            )


def test_scores_that_are_not_finite_are_an_error(photos: list[Item]) -> None:
    class Broken(MeanColours):
        def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
            answers = super().answer(images, features=features)
            answers.scores[0, 1] = torch.nan
            return answers

    first, second = answering(Broken()).rows(iter([photos[0], photos[2]]), StopRequest())
    assert "its scores are not finite" in str(first.error)
    assert second.error is None


def test_a_request_to_stop_is_seen_between_batches(photos: list[Item]) -> None:
    stop = StopRequest()
    rows = answering(batch_size=2).rows(iter(photos), stop, then="; and then?")
    answered = [next(rows)]
    stop.signal = signal.SIGTERM
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM after 2 images; and then\?$") as error:
        answered.extend(rows)
    assert [row.image for row in answered] == [item.name for item in photos[:2]]
    assert error.value.status == 143


def test_a_stop_after_the_last_batch_stops_nothing(photos: list[Item]) -> None:
    stop = StopRequest()
    rows = answering(batch_size=10).rows(iter(photos), stop)
    next(rows)
    stop.signal = signal.SIGTERM
    assert len(list(rows)) == 4


def test_a_decoder_that_hangs_does_not_keep_the_process(
    photos: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(*arguments: Any, **options: Any) -> Any:
        stop.signal = signal.SIGINT
        raise NothingCame
        yield

    stop = StopRequest()
    monkeypatch.setattr(answering_module, "decoded", hanging)
    with pytest.raises(Stopped, match=r"^stopped by SIGINT after 0 images$") as error:
        list(answering().rows(iter(photos), stop))
    assert error.value.status == 130


def test_a_single_processor_is_not_shared_with_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, on_cpu, on_gpu in ((1, 0, 1), (2, 2, 2)):
        monkeypatch.setattr(answering_module, "processors", lambda count=count: count)
        assert answering_module._default_workers(on_gpu=False) == on_cpu
        assert answering_module._default_workers(on_gpu=True) == on_gpu


def test_numbers_of_images_in_words() -> None:
    assert [counted(number) for number in (0, 1, 12345)] == ["0 images", "1 image", "12,345 images"]
