import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pictures import picture, saved
from PIL import Image

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.errors import DataError
from mldec.predict import inputs as decoding
from mldec.predict.inputs import Decoder, Inputs, Item, decoded, read_item

TRANSFORM = EvalTransform(image_size=24)


def items_of(folder: Path, count: int) -> list[Item]:
    """Images, of which those with an odd tens digit cannot be read."""
    for number in range(count):
        path = folder / f"{number:03}.png"
        if number % 10 == 7:
            path.write_text("no image")
        else:
            saved(picture(30, 20, seed=number), path)
    return list(Inputs([str(folder)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_the_order_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(decoding, "FEW", 3)
    items = items_of(tmp_path, 23)
    batches = list(decoded(items, Decoder(TRANSFORM), batch_size=4, workers=workers))
    assert [len(batch.items) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert [item for batch in batches for item in batch.items] == items

    for batch in batches:
        images = iter(batch.images)
        for index, item in enumerate(batch.items):
            if index in batch.faults:
                assert batch.faults[index].startswith(f"{item.path}: not an image")
            else:
                with Image.open(item.path) as image:
                    assert torch.equal(next(images), TRANSFORM(image))
        assert next(images, None) is None
    assert sum(len(batch.faults) for batch in batches) == 2


def test_images_are_taken_a_few_batches_ahead(tmp_path: Path) -> None:
    [item] = items_of(tmp_path, 1)
    taken = 0

    def endless() -> Iterator[Item]:
        nonlocal taken
        while True:
            taken += 1
            yield item

    batches = decoded(endless(), Decoder(TRANSFORM), batch_size=2, workers=0)
    for _ in range(50):
        next(batches)
    assert taken <= decoding.FEW + 1 + 2 * 50


def test_images_of_several_sizes_stay_apart(tmp_path: Path) -> None:
    for width in (20, 30):
        saved(picture(width, 20), tmp_path / f"{width}.png")
    [batch] = decoded(Inputs([str(tmp_path)]), Decoder(to_tensor), batch_size=4, workers=0)
    assert [list(image.shape) for image in batch.images] == [[3, 20, 20], [3, 20, 30]]


def test_an_error_of_the_input_ends_the_work(tmp_path: Path) -> None:
    [item] = items_of(tmp_path, 1)

    def broken() -> Iterator[Item]:
        for _ in range(decoding.FEW + 20):
            yield item
        raise DataError("the list is damaged")

    batches = decoded(broken(), Decoder(TRANSFORM), batch_size=8, workers=1)
    with pytest.raises(DataError, match=r"^the list is damaged$"):
        list(batches)


def test_an_image_in_a_tar_file_is_the_image(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(40, 30).save(buffer, "PNG")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(buffer.getvalue())
        tar.addfile(member, io.BytesIO(buffer.getvalue()))

    [item] = Inputs([str(tmp_path)])
    assert read_item(item).tobytes() == picture(40, 30).tobytes()
    assert torch.equal(Decoder(to_tensor)[item], to_tensor(picture(40, 30)))

    os.truncate(item.path, item.offset + 10)
    with pytest.raises(DataError, match=r"x\.tar/a\.png: .*x\.tar is cut short; restore it"):
        read_item(item)
    Path(item.path).unlink()
    assert "x.tar/a.png: No such file or directory" in str(Decoder(to_tensor)[item])
    with pytest.raises(DataError, match=r"^known$"):
        read_item(Item("a", "a", fault="known"))


def test_a_draft_is_decoded_smaller_and_looks_alike(tmp_path: Path) -> None:
    path = saved(picture(900, 600).resize((1800, 1200)), tmp_path / "x.jpg", quality=95)
    item = Item(str(path), str(path))
    sizes = []

    def noting(image: Image.Image) -> torch.Tensor:
        sizes.append(image.size)
        return EvalTransform(image_size=64)(image)

    whole = Decoder(noting)[item]
    draft = Decoder(noting, draft=64)[item]
    assert sizes == [(1800, 1200), (225, 150)]
    assert isinstance(whole, torch.Tensor)
    assert isinstance(draft, torch.Tensor)
    assert (whole.float() - draft.float()).abs().mean() < 4
