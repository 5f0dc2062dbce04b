"""A callable that names what batches of images show, for engines such as Ray Data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mldec.errors import DataError
from mldec.runtime.signals import StopRequest
from mldec.tools.predict import opened
from mldec.tools.predict.answers import Predictor, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.photos import to_item
from mldec.tools.predict.results import cells_of

KINDS = ("image", "bytes", "path")  # columns of images; the first one of these is read
_opened: dict[str, Any] = {}  # of this process


class Tagger:
    """Name what a batch of images shows.

    It can be pickled by its arguments, which are options of the command and of `mldec.load`, such
    as plugin=["mine"]. A process loads a checkpoint once, at its first batch.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "auto",
        content: str = "top",
        top: int = 10,
        threshold: float | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> None:
        self._checkpoint, self._content, self._batch_size = str(checkpoint), content, batch_size
        self._options = {**options, "device": device, "threshold": threshold, "top": top}

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the columns of a batch without its images, and the answers.

        The batch has a column `image` (uint8 [H, W, 3]), `bytes` (of image files) or `path` (paths
        or addresses), else it is a `DataError`. The answers are `error`, None or why there is none,
        and as in a Parquet file of the command `classes` and `scores`, a list per image.
        """
        kind = next((name for name in KINDS if name in batch), None)
        if kind is None:
            raise DataError(f"no column {' or '.join(KINDS)}, but {', '.join(batch)}: rename one")
        names = batch.get("path", range(len(batch[kind])))
        items = []
        for name, value in zip(map(str, names), batch[kind], strict=True):
            # Engines pass arrays, and `datasets` may pass PIL images.
            if kind == "image":
                items.append(to_item(value, name))
            else:
                items.append(Item(name, name, content=None if kind == "path" else value))

        key = repr((self._checkpoint, self._options, self._content))
        if key not in _opened:
            _opened[key] = opened(self._checkpoint, self._options, self._content)
        engine, rule = _opened[key]
        predictor = Predictor(engine, rule, batch_size=self._batch_size, workers=0)
        rows = predictor.rows(iter(items), StopRequest())
        cells = [cells_of(entries(rule, row)) for row in rows]

        answers = {"error": [cell.get("error") for cell in cells]}
        for name, without in (("classes", "scores"), ("scores", "decisions")):
            if self._content != without:
                answers[name] = [cell.get(name, []) for cell in cells]
        others = {name: batch[name] for name in batch if name not in KINDS[:2]}
        return {**others, **answers}
