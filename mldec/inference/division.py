"""The division of a stream of images into blocks, and of the blocks over processes."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from mldec.inference.inputs import Item
from mldec.inference.parts import BLOCK, Parts
from mldec.inference.rows import Row


class Division:
    """The images that this process answers, and their way into the parts.

    Args:
        items: the whole input.
        parts: of the result.
        done: numbers of the blocks that were finished when the first process began.
        rank: of this process.
        world_size: number of processes.

    Attributes:
        images: number of images of the input so far, those of other processes included.
        blocks: number of blocks of the input so far, likewise.
    """

    def __init__(
        self,
        items: Iterable[Item],
        parts: Parts,
        done: set[int],
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.images = 0
        self.blocks = 0
        self._items = iter(items)
        self._parts = parts
        self._done = done
        self._rank = rank
        self._world_size = world_size
        # Numbers and sizes of the blocks whose images are on their way, and the rows of the first.
        self._open: deque[tuple[int, int]] = deque()
        self._rows: list[Row] = []

    def to_do(self) -> Iterator[Item]:
        """Yield the images that this process answers, in the order of the input.

        Raises:
            DataError: if the images of a finished block are no longer those of the input.
        """
        turn = 0
        while items := list(islice(self._items, BLOCK)):
            number = self.blocks
            self.blocks += 1
            self.images += len(items)

            if number in self._done:
                self._parts.check_names(number, [item.name for item in items])
                continue
            if turn % self._world_size == self._rank:
                self._open.append((number, len(items)))
                yield from items
            turn += 1

    def add(self, row: Row) -> None:
        """Take the row of the next image; a block is written with its last row.

        Raises:
            DataError: if the block cannot be written.
        """
        self._rows.append(row)

        number, size = self._open[0]
        if len(self._rows) == size:
            self._parts.write(number, self._rows)
            self._open.popleft()
            self._rows = []
