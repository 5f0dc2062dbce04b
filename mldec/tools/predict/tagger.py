"""A callable that predicts the classes of batches, for engines such as Ray Data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from mldec.errors import DataError, OptionError
from mldec.evaluation.options import naming_keywords
from mldec.runtime.signals import StopRequest
from mldec.tools.predict.answers import Predictor, Rule, chosen_rule, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import Engine, open_engine
from mldec.tools.predict.formats import cells_of
from mldec.tools.predict.options import Content, ScoringOptions
from mldec.tools.predict.photos import to_item

KINDS = ("image", "bytes", "path")  # columns of images; the first match is used
# Engines and rules of this process
_opened: dict[tuple[ScoringOptions, Content], tuple[Engine, Rule]] = {}


class Tagger:
    """Predicts the classes of batches of images.

    The arguments are options of the command and of `mldec.load`. Only they are pickled. Each
    process loads the checkpoint once, at its first batch.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        content: Content = "top",
        batch_size: int = 64,
        **options: Any,
    ) -> None:
        options = {"batch_size": batch_size, "workers": 0, **options}
        self._options = ScoringOptions.from_keywords(options, checkpoint=str(checkpoint))
        self._content = content
        if content not in get_args(Content):
            raise OptionError(
                "content", f"{content!r} is not one of {', '.join(get_args(Content))}"
            )

    @naming_keywords(ScoringOptions)
    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the columns without images, and the columns `error`, `classes` and `scores`.

        Args:
            batch: Columns with `image` (uint8 [H, W, 3]), `bytes` (image files) or `path`.
        """
        kind = next((name for name in KINDS if name in batch), None)
        if kind is None:
            raise DataError(f"no column {' or '.join(KINDS)} in {', '.join(batch)}; rename one")
        names = batch.get("path", range(len(batch[kind])))
        items = []
        for name, value in zip(map(str, names), batch[kind], strict=True):
            # Engines pass arrays, and Hugging Face datasets may pass PIL images.
            if kind != "image":
                items.append(Item(name, name, content=None if kind == "path" else value))
                continue
            # An array of another shape is an error of its row, not of the batch.
            try:
                items.append(to_item(value, name))
            except DataError as error:
                items.append(Item(name, name, fault=str(error)))

        options = self._options
        key = (options, self._content)
        if key not in _opened:
            engine = open_engine(options)
            rule = chosen_rule(
                engine, content=self._content, top=options.top, threshold=options.threshold
            )
            _opened[key] = engine, rule
        engine, rule = _opened[key]
        predictor = Predictor(engine, rule, batch_size=options.batch_size, workers=options.workers)
        results: dict[str, list[Any]] = {"error": [], "classes": [], "scores": []}
        for row in predictor.rows(iter(items), StopRequest()):
            cells = cells_of(entries(rule, row))
            results["error"].append(cells.get("error"))
            results["classes"].append(cells.get("classes", []))
            results["scores"].append(cells.get("scores", []))
        if self._content == "scores":
            del results["classes"]
        if self._content == "decisions":
            del results["scores"]

        columns = {name: batch[name] for name in batch if name not in ("image", "bytes")}
        return columns | results
