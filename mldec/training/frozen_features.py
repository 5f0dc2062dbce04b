"""The tokens of a frozen backbone, computed once for all images and read from a file afterwards."""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mldec.config.schema import Config
from mldec.data.base import DataModule, LabelledImages, Split, StoredImages
from mldec.data.cache import cache_folder
from mldec.data.loader import eval_loader
from mldec.data.transforms import EvalTransform
from mldec.data.workers import unwrap
from mldec.errors import ConfigError, DataError, Stopped, writing
from mldec.evaluation import autocast
from mldec.runtime import distributed
from mldec.runtime.console import on_terminal
from mldec.runtime.signals import StopRequest

log = logging.getLogger("mldec")

FORMAT = 1  # of a file of tokens; raise it when what is stored under the same key changes


class StoredTokens(StoredImages):
    """Images whose tokens are stored; see `ImageDataset`.

    Args:
        images: N images with labels of K classes.
        transform: that the images had when their tokens were computed.
        file: float32 [N, T, C] in NumPy's format, the tokens of all images. Those of an image that
            could not be read are NaN.
    """

    def __init__(self, images: LabelledImages, transform: EvalTransform, file: Path) -> None:
        super().__init__(images, transform)
        self.file = file

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all images, which stay on the disk until they are used."""
        return np.load(self.file, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tokens out: a loader process opens the file by itself."""
        return {name: value for name, value in vars(self).items() if name != "tokens"}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens float32 [T, C] and the target int8 [K] of an image.

        Raises:
            IndexError: for an index that is not from 0 to N - 1.
            DataError: if the image cannot be read.
        """
        target = self.labels.row(index)

        tokens = torch.from_numpy(np.array(self.tokens[index]))
        if tokens[0, 0].isnan():
            # Reading the image once more tells what is wrong with it.
            return super().__getitem__(index)
        return tokens, target


def with_tokens(
    data: DataModule,
    backbone: nn.Module,
    config: Config,
    *,
    device: torch.device,
    stop: StopRequest,
) -> DataModule:
    """Return a data set with the tokens of a frozen backbone in place of the images.

    They are those of the backbone in evaluation mode, and all images are transformed as validation
    images are. They are computed once and kept in the cache folder, in a file per split. Its name
    is a hash of all that the tokens depend on: the files of the images, the transform, the
    backbone, its weights and the precision.

    Args:
        data: images that are stored as files.
        backbone: images uint8 [B, 3, S, S] -> tokens [B, T, C], on its device.
        config: of the run, with all arguments of its parts.
        device: of the backbone.
        stop: turns true when the work should end.

    Raises:
        ConfigError: if there are several processes, or the images are not stored as files.
        DataError: if the disk has no room, or an image cannot be read and `data.bad_images` says
            "stop".
        Stopped: after a request to stop.
    """
    if distributed.world_size() > 1:
        raise ConfigError(
            "train.cache_features is for one process: start the run without torchrun, "
            "or leave train.cache_features out"
        )

    cache_dir = config.data.get("cache_dir")
    weights = _weights_key(backbone, config, device)

    def tokens_of(split: Split, title: str) -> Split:
        if not isinstance(split.dataset, StoredImages):
            raise ConfigError(
                "train.cache_features is for images that are stored as files, and this data set "
                "generates them: leave train.cache_features out"
            )
        dataset = split.dataset
        images = LabelledImages(dataset.storage, dataset.labels, split.classes.names)
        plain = Split(StoredImages(images, data.transform), split.classes)

        key = _digest(weights, repr(data.transform), _images_key(plain.dataset, title))
        file = cache_folder(cache_dir) / f"tokens-{key[:32]}.npy"
        if _is_whole(file, len(dataset)):
            log.info("%s tokens: read from %s", title, file)
        else:
            loader_of = replace(data, load_val=lambda: plain)
            _compute(loader_of, backbone, config, file, title, device=device, stop=stop)
        return Split(StoredTokens(images, data.transform, file), split.classes)

    return replace(
        data,
        load_train=lambda: tokens_of(data.train, "training"),
        load_val=lambda: tokens_of(data.val, "validation"),
        loads_slowly=False,
    )


def _compute(
    data: DataModule,
    backbone: nn.Module,
    config: Config,
    file: Path,
    title: str,
    *,
    device: torch.device,
    stop: StopRequest,
) -> None:
    """Compute the tokens of all validation images of a data set, and write them to a file."""
    train = config.train
    loader = eval_loader(
        data, batch_size=train.eval_batch_size, workers=train.workers, pin=device.type == "cuda"
    )
    total = len(data.val.dataset)
    bar = tqdm(total=total, desc=f"{title} tokens", leave=False, disable=not on_terminal())

    array: np.ndarray | None = None
    was_training = backbone.training
    backbone.eval()
    with bar, _new_file(file) as temporary:
        for batch in unwrap(loader):
            if stop:
                raise Stopped(
                    f"stopped by {stop.name} after the tokens of {bar.n:,} of {total:,} {title} "
                    f"images; nothing was trained, start again",
                    stop.status,
                )
            bar.update(train.eval_batch_size)
            if not len(batch.images):
                continue

            with torch.no_grad(), autocast(device, train.precision):
                tokens = backbone(batch.images.to(device, non_blocking=True)).float().cpu().numpy()
            if array is None:
                array = _create(temporary, (total, *tokens.shape[1:]), file, title)
            array[batch.indices.numpy()] = tokens

        if array is None:
            raise DataError(f"no {title} image can be read; the first: {data.val.dataset.name(0)}")
        array.flush()  # type: ignore[attr-defined]
    backbone.train(was_training)

    size = file.stat().st_size / 2**20
    log.info("%s tokens: %s, %.1f MiB, which may be deleted after the run", title, file, size)


def _create(path: Path, shape: tuple[int, ...], file: Path, title: str) -> np.ndarray:
    """Create an array on the disk that is full of NaN.

    Raises:
        DataError: if the disk has no room for it.
    """
    needed, free = int(np.prod(shape)) * 4, shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"train.cache_features: the tokens of {shape[0]:,} {title} images need "
            f"{needed / 2**30:.1f} GiB, and {file.parent} has {free / 2**30:.1f} GiB left: "
            f"pass data.cache_dir=FOLDER on another disk, or leave train.cache_features out"
        )
    array = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    array[:] = np.nan
    return array


@contextmanager
def _new_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes the file at the end; after an error nothing is left."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as opened:
            temporary = Path(opened.name)

        try:
            yield temporary
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


def _is_whole(file: Path, images: int) -> bool:
    """Tell whether a file holds tokens of a number of images."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        # It is absent, or damaged: its header does not fit its size.
        return False
    return array.ndim == 3 and len(array) == images and array.dtype == np.float32


def _weights_key(backbone: nn.Module, config: Config, device: torch.device) -> str:
    """Return what the tokens of an image depend on, but for the image."""
    digest = hashlib.sha256()
    for name, value in backbone.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().tobytes())

    # The same tensors give other tokens with other settings, such as those of the norm behind the
    # pooling; where they were loaded from is of no importance.
    settings = sorted((key, str(value)) for key, value in config.backbone.items())
    settings = [(key, value) for key, value in settings if key != "pretrained"]
    precision = config.train.precision.on(device.type).value
    return f"{FORMAT} {torch.__version__} {device.type} {precision} {settings} {digest.hexdigest()}"


def _images_key(dataset: StoredImages, title: str) -> str:
    """Return a hash of the files of all images, which is much faster than decoding them."""
    digest = hashlib.sha256()
    for index in tqdm(
        range(len(dataset)), desc=f"{title} files", leave=False, disable=not on_terminal()
    ):
        try:
            content = dataset.storage.content(index)
        except DataError as error:
            content = str(error).encode(errors="surrogateescape")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
