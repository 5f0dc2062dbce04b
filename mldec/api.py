"""Train and predict from Python or a notebook: `mldec.fit` and `mldec.load`."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn, stack

from mldec import build
from mldec.config.compose import compose, flat, override
from mldec.config.schema import Config
from mldec.data.columns import Rules
from mldec.data.readers.hugging_face import READER as DATASET_READER
from mldec.data.readers.hugging_face import is_dataset, is_single_label
from mldec.data.readers.tables import find_layouts, find_tables, parse, to_csv
from mldec.data.types import Annotations
from mldec.errors import ConfigError, DataError, Stopped, log, suggest
from mldec.evaluate import EvaluateOptions, evaluate
from mldec.evaluate import parser as evaluate_parser
from mldec.evaluation.options import naming_keywords
from mldec.files.atomic import replacing
from mldec.files.run_folder import LOG_FILE, find_checkpoint, read_facts, read_log, set_aside
from mldec.files.tables import SUFFIXES, with_index
from mldec.files.text import expand_user
from mldec.names import abbreviate, given_names
from mldec.runtime.console import console_output, to_console
from mldec.runtime.signals import StopRequest
from mldec.tools import calibrate, export, report
from mldec.tools.heat_maps import over_image
from mldec.tools.predict.answers import Predictor, Row, Rows, chosen_rule
from mldec.tools.predict.decode import read_item
from mldec.tools.predict.engine import Engine, TorchEngine, open_engine
from mldec.tools.predict.options import ScoringOptions
from mldec.tools.predict.photos import is_photo, items
from mldec.train import announce
from mldec.train import run as train
from mldec.training.log import Evaluation, read_progress

CSV_READER = "mldec.data.readers.csv_table"
CTRL_C = 130  # status of `Stopped` after Ctrl-C

Overrides = Sequence[str] | Mapping[str, Any]  # see `fit`


def fit(
    experiment: str | Config = "finetune_frozen",
    data: Any = None,
    *,
    classes: Sequence[str] | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    verbose: bool = True,
    overrides: Overrides = (),
) -> "Run":
    """Train a model, like `mldec train`, and return the run.

    The same settings on the command line give bitwise equal weights and metrics. Ctrl-C saves a
    checkpoint. In a notebook, the function then returns the run, and `resume="auto"` continues it.

    Args:
        experiment: Name of an experiment, such as "finetune_frozen", or a `Config`.
        data: The images and labels; None for the data of the experiment. One of

            - a folder: the data root of the experiment. Experiments for own photos also accept one
              folder per class and YOLO folders.
            - a table: CSV, JSON lines, Excel or Parquet, in a form of docs/data.md.
            - a pandas DataFrame in such a form. Labels are text or lists. Paths may be the index.
            - pairs (path, labels), where labels is a class name or any iterable of them.
            - a `datasets.Dataset` of Hugging Face, or a torch `Dataset` of (image, target), or a
              dictionary of these by the name of their split, such as a `DatasetDict`. Images are
              not written to disk. Pass `data` again to evaluate or resume the run.

            Paths in a DataFrame or in pairs may be relative to the working folder. The run stores
            both as a CSV file.
        classes: Names of the classes in order, or a text file with one name per line. Targets of a
            torch `Dataset` may be their indices or vectors.
        epochs: Exact number of epochs (train.epochs=N train.min_steps=null). None for that of the
            experiment; the recipes for own photos raise it if there are few photos.
        seed: Seed of the run; None for that of the experiment.
        name: Name of the run, whose folder is outputs/NAME. None for that of the experiment.
        resume: "auto" continues the run in this folder, if there is one.
        overwrite: Whether to rename the folder of an earlier run of this name to NAME.old, instead
            of raising an error. An older NAME.old is removed.
        verbose: Whether to print messages and progress bars. Warnings are always printed.
        overrides: Settings as on the command line, such as ["head=gap", "optim.lr=1e-3"], or as a
            dictionary, such as {"head": "gap", "optim.lr": 1e-3}.

    Raises:
        UserError: If a setting, a file or the data cannot be used.
        Stopped: If a signal stopped the training, except by Ctrl-C in a notebook.
    """
    if overwrite and resume is not None:
        raise ConfigError(f"overwrite: resume={resume!r} continues the run; pass only one of them")
    for name_of_text, value in (("resume", resume), ("name", name)):
        if not (value is None or isinstance(value, str)):
            raise ConfigError(f"{name_of_text}: {value!r} is not text; pass text or None")
    words: list[str] = []
    # The composition compares other settings with the number of epochs.
    if epochs is not None:
        words += [f"train.epochs={epochs}", "train.min_steps=null"]
    words += _words(overrides)
    if data is not None and not any(word.startswith("data=") for word in words):
        words += _data_option(experiment, data, words)
    config = _compose(experiment, words)

    # Values of arguments need no quotes, unlike settings of the command line.
    config = replace(
        config,
        seed=config.seed if seed is None else seed,
        name=config.name if name is None else name,
        resume=config.resume if resume is None else resume,
    )
    folder = Path("outputs", config.name).absolute()
    if overwrite:
        set_aside(folder)
    if classes is not None:
        names = classes if isinstance(classes, str) else list(classes)
        config = replace(config, data=config.data | {"classes": names})
    config, in_memory = _with_data(config, data, folder)

    try:
        with console_output(verbose=verbose):
            announce(config.name)
            train(config, folder, in_memory=in_memory, typed=words)
    except Stopped as stop:
        is_interactive = hasattr(sys, "ps1")  # also in a notebook
        has_checkpoint = (folder / "checkpoints" / "last.pt").exists()
        if not (is_interactive and stop.status == CTRL_C and has_checkpoint):
            raise
        log.warning(str(stop))
    finally:
        # Remove the folder if the run failed before it wrote a file.
        with suppress(OSError):
            folder.rmdir()
    return Run(folder)


def _words(overrides: Overrides) -> list[str]:
    """Return overrides as words of a command line. There, text is literal."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise ConfigError(f"overrides: {overrides!r} is not a list; pass one, such as ['head=gap']")
    if not isinstance(overrides, Mapping):
        return list(map(str, overrides))

    words = []
    for key, value in flat(overrides).items():
        is_text = isinstance(value, str | Path)
        text = str(value) if is_text else json.dumps(value, ensure_ascii=False, default=str)
        words.append(f"{key}={text}")
    return words


def _compose(experiment: str | Config, words: Sequence[str]) -> Config:
    if isinstance(experiment, Config):
        return override(experiment, list(words))
    return compose([f"+experiment={experiment}", *words])


def _data_option(experiment: str | Config, data: Any, words: Sequence[str]) -> list[str]:
    """Return the override that selects the reader of the data, if the experiment has another."""
    reader = _compose(experiment, words).data["_target_"]
    reads_csv = reader == CSV_READER
    if is_dataset(data):
        # Unlike data=hf, this keeps the image size and other settings of the experiment.
        return [] if reader == DATASET_READER else [f"data._target_={DATASET_READER}"]
    if _is_table(data):
        return [] if reads_csv else ["data=csv"]

    # Tables are the default for own photos, so look for the other forms.
    folder = expand_user(data)
    if not reads_csv or not folder.is_dir() or (folder / "data.csv").exists():
        return []
    layouts = find_layouts(folder)
    if find_tables(folder):
        layouts.pop("class folders", None)
        layouts = layouts and {**layouts, "tables": "data=csv"}
    if len(layouts) > 1:
        found = ", ".join(f"{name} ({settings})" for name, settings in layouts.items())
        raise DataError(f"data: {data} has {found}; pass one of them in overrides")
    return [word for settings in layouts.values() for word in settings.split(" ", 1)]


def _is_table(data: Any) -> bool:
    if not isinstance(data, str | os.PathLike):
        return True
    return Path(data).suffix.lower() in (*SUFFIXES, ".json", ".txt")


def _with_data(config: Config, data: Any, folder: Path) -> tuple[Config, Any]:
    """Return the config for some data, see `fit`, and its parsed table or the data set, if any."""
    if data is None:
        return config, None
    if is_dataset(data):
        part = build.resolve("data", config.data, config.plugins)
        if part.name != DATASET_READER:
            raise ConfigError(f"data: {part.name} reads no data set in memory; pass data=hf")
        if "exclusive" not in config.data and is_single_label(data, part.shared(Rules)):
            config = replace(config, data=config.data | {"exclusive": True})
        return config, data
    if not isinstance(data, str | os.PathLike):
        return _parse_table(config, data, folder)

    path = expand_user(data).absolute()
    settings = {"root": str(path)}
    if _is_table(data):
        settings = {"root": str(path.parent), "file": path.name}
    return replace(config, data=config.data | settings), None


def _parse_table(config: Config, data: Any, folder: Path) -> tuple[Config, Annotations]:
    """Parse a DataFrame or pairs of a path and labels, and write the record of the run's data."""
    import pandas

    part = build.resolve("data", config.data, config.plugins)
    if part.name != CSV_READER:
        raise ConfigError(f"data: {part.name} reads no table in memory; pass a folder or data=csv")
    if isinstance(data, pandas.DataFrame):
        frame = with_index(data)
    elif isinstance(data, Iterable) and not isinstance(data, bytes | Mapping):
        frame = pandas.DataFrame(_columns(data), dtype=object)
    else:
        raise DataError(
            f"data: {abbreviate(data)} is not a folder, table, DataFrame or list of pairs; pass "
            f"one, with a column split for several splits"
        )
    names = given_names(part.arguments["classes"], Path.cwd())
    exclusive = part.arguments["exclusive"]
    annotations = parse({"data": frame}, part.shared(Rules), names, exclusive=exclusive)

    # The record has lists of names, so that no rule is necessary to read it. The hash in its name
    # keeps the table of an earlier run in the folder.
    text = to_csv(annotations.table, annotations.splits)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / f"data-{digest[:12]}.csv"
    with replacing(path) as file:
        file.write(text.encode())
    settings = {"root": str(annotations.folder), "file": str(path), "images": "", **asdict(Rules())}
    if annotations.by_column:
        settings["classes"] = list(annotations.table.classes)
    return replace(config, data=config.data | settings), annotations


def _columns(pairs: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the paths and labels of pairs as columns."""
    columns: dict[str, list[Any]] = {"path": [], "labels": []}
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str | bytes)
        if not is_pair or len(pair) != 2:
            raise DataError(f"data: row {number} is {abbreviate(pair)}; pass (path, labels)")
        path, labels = pair
        if not isinstance(path, str | os.PathLike):
            raise DataError(f"data: row {number} has the path {abbreviate(path)}; pass text")
        columns["path"].append(path)
        # A list of one name, because a separator in a name must not divide it.
        columns["labels"].append([labels] if isinstance(labels, str) else labels)
    return columns


class Run:
    """A training run, read from its folder: `mldec.Run("outputs/mine")`.

    Methods accept the options of the command of the same name, print its output, and raise
    `UserError`. With `verbose=False` they print only warnings. `evaluate`, `calibrate` and `report`
    also accept `data`, a data set in memory as for `fit`, which is required if the run was trained
    on one. They warn if its validation images differ from the validation images of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"Run: {folder!r} is not a path; pass the folder of a run")
        self.folder = Path(folder)
        find_checkpoint(self.folder)

    @property
    def best(self) -> Evaluation | None:
        """Evaluation with the best value of the first metric; None before the first evaluation."""
        return read_progress(self.folder / LOG_FILE).best

    @property
    def metric(self) -> str | None:
        """Name of the main metric, which selects the best checkpoint; None without evaluation."""
        return None if self.best is None else self.best.metric

    @property
    def value(self) -> float | None:
        """Best value of the main metric in percent; None before the first evaluation."""
        return None if self.best is None else self.best.value

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of `best` in percent, and its mean loss as "loss"."""
        return {} if self.best is None else self.best.metrics

    @property
    def ended(self) -> str | None:
        """Reason for the end of the training, or None if it can continue."""
        return getattr(read_facts(self.folder), "ended", None)

    @property
    def history(self) -> Any:
        """Numbers of metrics.jsonl, one row per step, as a DataFrame."""
        from pandas import DataFrame

        rows: dict[int, dict[str, Any]] = {}
        for line in read_log(self.folder / LOG_FILE):
            rows.setdefault(line["step"], {}).update(line)
        return DataFrame(list(rows.values()))

    def evaluate(
        self, split: str | None = None, *, overrides: Overrides = (), **options: Any
    ) -> dict[str, Any]:
        """Evaluate the model that `load` returns, and return the content of `evaluate --json`.

        Args:
            split: Name of another split, such as "test"; None for the validation split.
            overrides: Settings, such as ["data.root=/data/other"].
            options: Options of the command, such as threshold=0.5.
        """
        settings = _words(overrides)
        if split is not None:
            settings += [f'data.val="{split}"', "data.fold=null"]
        parser = evaluate_parser()
        return self._call(parser, evaluate, EvaluateOptions, options, settings=settings)

    def calibrate(self, *, overrides: Overrides = (), **options: Any) -> dict[str, Any]:
        """Calibrate scores, fit thresholds, and store calibrated.pt, which other methods use.

        Args:
            overrides: Settings, such as ["data.root=/data/other"].
            options: Options of the command, such as objective="f1".
        """
        parser = calibrate.parser()
        kind = calibrate.CalibrateOptions
        settings = _words(overrides)
        return self._call(parser, calibrate.calibrate, kind, options, settings=settings)

    def report(
        self, out: str | Path = "report.html", *, overrides: Overrides = (), **options: Any
    ) -> Path:
        """Write an HTML report, and return its path."""
        fixed = {"settings": _words(overrides), "out": str(out)}
        self._call(report.parser(), report.report, report.ReportOptions, options, **fixed)
        return Path(out)

    def export(self, out: str | Path = "model.onnx", **options: Any) -> Path:
        """Write an ONNX file, and return its path; see `mldec export`."""
        parser = export.parser()
        self._call(parser, export.export, export.ExportOptions, options, out=str(out))
        return Path(out)

    def load(self, **options: Any) -> "Model":
        """Load calibrated.pt, or else the best checkpoint; see `mldec.load`."""
        return load(self.folder, **options)

    def _call(
        self, parser: Any, work: Any, kind: Any, options: dict[str, Any], **fixed: Any
    ) -> Any:
        """Call the function of a command. `kind` is the class of its options."""
        data = options.pop("data", None)
        if data is not None:
            if "in_memory" not in kind.__dataclass_fields__:
                raise ConfigError("data: this method does not use it; remove it")
            if not is_dataset(data):
                message = "it is not a data set in memory; pass settings as overrides"
                raise ConfigError(f"data: {message}")
            fixed["in_memory"] = data
        names = {action.dest for action in parser._actions}
        with console_output(verbose=options.pop("verbose", True)), naming_keywords(kind):
            to_console()
            return work(kind.from_keywords(options, names, checkpoint=str(self.folder), **fixed))

    def __repr__(self) -> str:
        text = f"folder: {self.folder}"
        best = self.best
        if best is not None:
            score = f"{best.metric} {best.value:.2f}"
            text += f", best: {score} ({best.weights}, epoch {best.epoch})"
        return f"Run({text}, ended: {self.ended or 'no'})"


class Model:
    """A trained model that predicts the classes of photos. Created by `mldec.load`."""

    def __init__(self, engine: Engine, options: ScoringOptions) -> None:
        self._engine = engine
        self._options = options

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the K classes."""
        return self._engine.classes.names

    @property
    def thresholds(self) -> dict[str, float] | None:
        """Calibrated threshold of each class in [0, 1], or None."""
        values = self._engine.thresholds
        return None if values is None else dict(zip(self.classes, values, strict=True))

    @property
    def transform(self) -> Any:
        """The input transform: maps a PIL image to uint8 values [3, S, S]."""
        return self._engine.transform

    @property
    def module(self) -> nn.Module:
        """The network: maps images [B, 3, S, S], uint8 or in [0, 1], to logits [B, K].

        The first prediction on a CPU may copy the backbone to fold its batch norms. Later changes
        of the backbone are then ignored.
        """
        return self._checkpoint("module").loaded.model

    def __call__(self, photos: Any) -> Any:
        """Predict the classes of photos; see `predict`."""
        return self.predict(photos)

    def predict(
        self, photos: Any, *, threshold: float | None = None, top: int | None = None
    ) -> Any:
        """Predict the classes of one or more photos.

        A photo is a path, the bytes of an image file, a PIL image, or uint8 values: a numpy array
        [H, W, 3] or a torch tensor [3, H, W]. Gray images are accepted, and alpha is dropped.

        Args:
            photos: A photo, a folder, a tar file, a batch of arrays or any iterable of photos.
            threshold: Minimum score in [0, 1]. None for that of `load`, or else the calibrated
                thresholds of the checkpoint.
            top: Maximum number of classes. Default: as in `load`, else 10 without thresholds.

        Returns:
            A `Row` for one photo. Iterate over it for pairs of a class name and a score; its method
            `to_dict` returns a dictionary. Otherwise a list of rows, whose method `to_frame`
            returns a pandas DataFrame. An unreadable photo has a row with `error`.

        Raises:
            DataError: If a single photo cannot be read, or has an unsupported type.
        """
        options = self._options
        if threshold is not None:
            options = replace(options, threshold=threshold)
        if top is not None:
            options = replace(options, top=top)
        rows = self._rows(photos, options)
        return _one_error(rows[0]) if is_photo(photos) else rows

    def predict_proba(self, photos: Any) -> np.ndarray:
        """Return the scores of all classes for one or more photos, as scikit-learn does.

        They are float32 [N, K] in [0, 1], in the order of `classes`. The rows of unreadable photos
        are NaN; `predict` returns their errors.
        """
        return self._rows(photos, self._options).scores()

    def heat_maps(self, photo: Any, classes: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Return where the model looked in a photo, as in `mldec predict --pictures`.

        Args:
            photo: One photo, as for `predict`.
            classes: Names of classes. None for the classes that `predict` returns.

        Returns:
            Maps by class name, float32 [H, W] in [0, 1], at the resolution of the upright photo.
            A map is scaled to its own maximum. It is 0 outside the crop, and everywhere if there is
            no positive evidence.
        """
        engine = self._checkpoint("heat_maps")
        if not is_photo(photo):
            raise DataError(f"heat_maps: {type(photo).__name__} is not a photo; pass a single one")
        if classes is None:
            classes = [name for name, _ in self.predict(photo)]
        names = [classes] if isinstance(classes, str) else classes
        for name in names:
            if name not in self.classes:
                raise ConfigError(f"classes: unknown {name!r}{suggest(name, list(self.classes))}")

        image = read_item(next(items(photo)))
        transform = engine.loaded.transform
        indices = [self.classes.index(name) for name in names]
        [maps] = engine.heat_maps(transform(image)[None], [indices])
        part = transform.visible_part(image.size)
        results = [over_image(heat, image.size, part) for heat in maps.numpy()]
        return dict(zip(names, results, strict=True))

    def features(self, photos: Any) -> Tensor:
        """Return the mean token of the backbone for each photo, float32 [N, C].

        Raises:
            DataError: If a photo cannot be read.
        """
        self._checkpoint("features")
        features: list[Any] = []
        for row in self._rows(photos, self._options, features=True):
            features.append(_one_error(row).features)
        return stack(features)

    @naming_keywords(ScoringOptions)
    def _rows(self, photos: Any, options: ScoringOptions, *, features: bool = False) -> Rows:
        rule = chosen_rule(
            self._engine, content="top", top=options.top, threshold=options.threshold
        )
        predictor = Predictor(
            self._engine,
            rule,
            batch_size=options.batch_size,
            workers=options.workers,
            features=features,
        )
        return Rows(predictor.rows(items(photos), StopRequest()), self.classes)

    def _checkpoint(self, wanted: str) -> TorchEngine:
        if not isinstance(self._engine, TorchEngine):
            raise ConfigError(f"{wanted}: not supported for exported files; load the checkpoint")
        return self._engine

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:10])
        if len(self.classes) > 10:
            names += ", ..."
        thresholds = "none" if self.thresholds is None else "calibrated"
        engine = self._engine
        return (
            f"Model(classes: {len(self.classes)} ({names}), thresholds: {thresholds}, image size: "
            f"{engine.image_size} pixels, device: {engine.device}, {engine.precision})"
        )


@naming_keywords(ScoringOptions)
def load(
    path: str | Path, *, batch_size: int | None = None, workers: int = 0, **options: Any
) -> Model:
    """Load a model that predicts the classes of photos: `mldec.load("best.pt")("photo.jpg")`.

    Args:
        path: A checkpoint, the folder of a run, or another form that `mldec predict` accepts.
        batch_size: Images per forward pass; None for 16, or 64 on a GPU.
        workers: Processes that decode lists of more than 64 photos; 0 decodes in this process. A
            script that sets it needs `if __name__ == "__main__":`.
        options: Options of the command, such as top=3, threshold=0.5 or device="cpu".

    Raises:
        UserError: If an option is invalid, or the checkpoint cannot be used.
    """
    options |= {"batch_size": batch_size, "workers": workers}
    chosen = ScoringOptions.from_keywords(options, checkpoint=str(path))
    return Model(open_engine(chosen), chosen)


def _one_error(row: Row) -> Row:
    if row.error is not None:
        raise DataError(row.error)
    return row
