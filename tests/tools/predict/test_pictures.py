import copy
import dataclasses
from pathlib import Path

import hostile
import pytest
import torch
from pictures import picture

from mldec.checkpoint import Loaded, load_model
from mldec.data.transforms import EvalTransform
from mldec.errors import OutOfMemoryError
from mldec.predict import answers as pictures_module
from mldec.predict.answers import Pictures, Prediction
from mldec.predict.heat_maps import Typeface
from mldec.predict.inputs import Item


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("pictures") / "x.pt"
    torch.save(hostile.good(), path)
    return load_model(path)


@pytest.mark.parametrize(("crop", "size"), [(None, (400, 200)), (0.5, (100, 100))])
def test_a_picture_shows_the_part_that_the_model_saw(
    whole: Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    crop: float | None,
    size: tuple[int, int],
) -> None:
    drawn = []
    monkeypatch.setattr(pictures_module, "draw", lambda image, *rest: drawn.append(image) or image)
    path = str(tmp_path / "x.png")
    picture(400, 200).save(path)
    loaded = dataclasses.replace(whole, transform=EvalTransform(image_size=64, crop=crop))

    pictures = Pictures(loaded, tmp_path / "drawn", Typeface())
    target = pictures.add(Item(path, path), [Prediction(1, loaded.classes.names[1], 0.5)])
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
        Pictures(dataclasses.replace(whole, model=model), tmp_path, Typeface())
