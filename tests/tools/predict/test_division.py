from pathlib import Path

import pytest

from mldec.errors import DataError
from mldec.predict.answers import Row
from mldec.predict.inputs import Item
from mldec.predict.results import BLOCK, Division, Parts, Record, Text

NAMES = Text(lambda row: f"{row.image}\n")


def items(count: int) -> list[Item]:
    return [Item(f"{number}.png", f"{number}.png") for number in range(count)]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    parts = Parts({tmp_path / "out.txt": NAMES})
    parts.make_folder()
    return parts


def answer(division: Division, most: int = 10**9) -> int:
    """Answer images until so many are done, with a look-ahead as in decoding; return how many."""
    answered = 0
    waiting: list[Item] = []
    for item in division.to_do():
        waiting.append(item)
        if len(waiting) > 50:
            division.add(Row(waiting.pop(0).name))
            answered += 1
        if answered == most:
            return answered
    for item in waiting:
        division.add(Row(item.name))
    return answered + len(waiting)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_processes_answer_every_image_once(
    parts: Parts, tmp_path: Path, count: int, world_size: int
) -> None:
    # One process after another: what an earlier one has finished must not change the division.
    for rank in range(world_size):
        division = Division(items(count), parts, set(), rank=rank, world_size=world_size)
        answer(division)
        assert (division.images, division.blocks) == (count, -(-count // BLOCK))

    parts.finish(Record(made_with={}), division.blocks)
    assert (tmp_path / "out.txt").read_text().split() == [item.name for item in items(count)]


def test_what_is_done_is_not_done_again(parts: Parts, tmp_path: Path) -> None:
    count = 10 * BLOCK + 3
    total, done = 0, set()
    # Stopped after different numbers of images, and gone on with by other numbers of processes.
    for most, world_size in ((BLOCK + 5, 1), (3 * BLOCK, 2), (BLOCK - 1, 3), (10**9, 2)):
        done = parts.done()
        for rank in range(world_size):
            division = Division(items(count), parts, done, rank=rank, world_size=world_size)
            total += answer(division, most)
    assert total < count + 5 * BLOCK
    assert len(parts.done()) == division.blocks == 11

    parts.finish(Record(made_with={}), division.blocks)
    assert (tmp_path / "out.txt").read_text().split() == [item.name for item in items(count)]


def test_other_images_under_a_finished_block_are_refused(parts: Parts) -> None:
    answer(Division(items(2 * BLOCK), parts, set()))
    division = Division(items(2 * BLOCK)[1:], parts, parts.done())
    with pytest.raises(DataError, match=r"the images are not those .*from number 1 on"):
        answer(division)
