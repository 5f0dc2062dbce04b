"""Cached tokens of a frozen backbone: computed once per image and stored in files."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mldec.backbones.folding import fold_batchnorms
from mldec.backbones.openvino_backbone import convert, recorded, uses_openvino
from mldec.checkpoint import Loaded
from mldec.config.schema import Config
from mldec.data.loader import end_workers, eval_loader
from mldec.data.sampling import SampleRandom
from mldec.data.types import DataModule, Split, StoredImages, same_images
from mldec.errors import ConfigError, DataError, Stopped, log, naming_errors
from mldec.evaluation.run import memory_advice
from mldec.files.atomic import replacing
from mldec.files.cache import cache_folder, describe_entry, network_hash
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.console import progress_bar
from mldec.runtime.devices import autocast, to_device
from mldec.runtime.environment import explain_out_of_memory
from mldec.runtime.signals import StopRequest

LARGEST = torch.finfo(torch.float16).max
FORMAT = 3  # of token files; increase it if their content changes


@dataclass(frozen=True, eq=False)
class StoredTokens(StoredImages):
    """Images whose tokens are stored, [T, C] in one file per readable image."""

    files: Sequence[Path] = ()

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the tokens float32 [T, C] and the target int8 [K] of an image."""
        file = self.files[index]
        if not file.exists():
            # The image was unreadable: raise its error again.
            super().load(index, rng)
        remedy = "delete it, and run the command again"
        with naming_errors(file, DataError, remedy=remedy), file.open("rb") as stream:
            tokens = torch.from_numpy(np.load(stream)).float()
            if str(np.load(stream)) != _key_of(file):
                raise ValueError("it has the tokens of another image or network")
        return tokens, self.labels.row(index)


def reuse_tokens(
    data: DataModule, loaded: Loaded, config: Config, *, device: torch.device
) -> DataModule:
    """Replace validation images with cached tokens if a checkpoint was trained on tokens.

    The images are kept if their transform differs from the training, if the model averages several
    views, if there are several processes, or with train.cache_features=false.
    """
    trained = loaded.config.train
    if not (trained.cache_features and config.train.cache_features):
        return data
    if loaded.model.views is not None or distributed.world_size() > 1:
        return data

    dataset = data.val.dataset
    if not isinstance(dataset, StoredImages) or dataset.transform != loaded.transform:
        return data
    data = replace(data, transform=loaded.transform)

    # Tokens of each precision have their own folder.
    used = config.train.precision.for_device(device)
    if used is not trained.precision.for_device(device):
        log.info(
            f"validation tokens are computed once in {used.value}, because the training used "
            f"{trained.precision.value}: the metrics can differ slightly from the training log"
        )
    loaded.model.backbone.to(device)

    @cache
    def val() -> Split:
        images = {"validation": data.val}
        stored = stored_tokens(images, data, loaded.model, config, device, StopRequest())
        return stored["validation"]

    return replace(data, load_val=val, loads_slowly=False)


def with_tokens(
    data: DataModule,
    model: Classifier,
    config: Config,
    *,
    device: torch.device,
    stop: StopRequest,
) -> DataModule:
    """Replace the images of a data set by the tokens of a frozen backbone.

    The tokens of both splits are computed when the first split is used, so that loader processes
    start only once. See `stored_tokens`.
    """
    if distributed.world_size() > 1:
        raise ConfigError(
            "train.cache_features: it supports one process; start the run without torchrun"
        )

    @cache
    def splits() -> dict[str, Split]:
        images = {"training": data.train}
        # The training images are also the validation images if none are held out.
        is_shared = model.needs_blocks and same_images(data.train, data.val)
        if not is_shared:
            images["validation"] = data.val
        stored = stored_tokens(images, data, model, config, device, stop)
        if is_shared:
            tokens, own = stored["training"].dataset, data.val.dataset
            assert isinstance(tokens, StoredTokens)
            assert isinstance(own, StoredImages)
            shared = replace(data.val, dataset=replace(tokens, labels=own.labels))
            stored["validation"] = shared
        return stored

    return replace(
        data,
        load_train=lambda: splits()["training"],
        load_val=lambda: splits()["validation"],
        loads_slowly=False,
    )


def stored_tokens(
    splits: Mapping[str, Split],
    data: DataModule,
    model: Classifier,
    config: Config,
    device: torch.device,
    stop: StopRequest,
) -> dict[str, Split]:
    """Replace the images of splits, given by their titles, by the tokens of a frozen backbone.

    Tokens that are not in the cache are computed with the transform of validation. The cache folder
    has one subfolder per network and one file per image, both named by a hash. Tokens are float32
    [T, C]. The mean, or the blocks of features, are float16 [1, D] if the head needs them.
    """
    backbone = model.backbone
    pooled = model.needs_blocks
    converted = pooled and uses_openvino(recorded(config.train.engine), device)
    options: dict[str, Any] = {"pooled": pooled, "converted": converted}
    network = _network_key(backbone, data, config, device, **options)
    folder = cache_folder(config.data.get("cache_dir")) / f"tokens-{network}"

    stored = {}
    missing = {}
    for title, split in splits.items():
        dataset = split.dataset
        if not isinstance(dataset, StoredImages):
            raise ConfigError("train.cache_features: this data has no image files; leave it out")
        files = _files(dataset, folder, title)
        # List the missing files once, because another run may write to the same folder.
        absent = [index for index, file in enumerate(files) if not file.exists()]
        log.info(
            f"tokens of {len(files) - len(absent):,} of {len(files):,} {title} images are cached "
            f"in {folder}"
        )
        images = replace(dataset, transform=data.transform)
        for index in absent:
            missing[files[index]] = (images, index)
        tokens = StoredTokens(
            images.storage, images.labels, images.classes, images.transform, files=files
        )
        stored[title] = replace(split, dataset=tokens)

    if missing:
        name = config.backbone.get("name") or config.backbone["_target_"]
        precision = config.train.precision.for_device(device).value
        content = f"{'features' if pooled else 'tokens'} of {name}"
        content += f", {data.transform.image_size} pixels"
        content += f", {precision}{', OpenVINO' if converted else ''}"
        root = config.data.get("root")
        source = str(Path(root).absolute()) if root else config.data["_target_"]
        describe_entry(folder, content, source, [file.name for file in missing])
        options.update(device=device, stop=stop)
        _compute(data, backbone, config, missing, **options)
    return stored


@dataclass(frozen=True, eq=False)
class _Missing:
    """Images without stored tokens, from one or more splits; see `ImageDataset`.

    They are loaded without labels, because splits can have different numbers of classes.
    """

    images: Sequence[tuple[StoredImages, int]]  # the dataset of each image and its index there

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        dataset, own_index = self.images[index]
        image, _ = dataset.load(own_index, rng)
        return image, torch.empty(0)

    def name(self, index: int) -> str:
        dataset, own_index = self.images[index]
        return dataset.name(own_index)


def _compute(
    data: DataModule,
    backbone: nn.Module,
    config: Config,
    missing: Mapping[Path, tuple[StoredImages, int]],
    *,
    pooled: bool,
    converted: bool,
    device: torch.device,
    stop: StopRequest,
) -> None:
    """Compute the tokens of images and write them to files."""
    train = config.train
    files = list(missing)
    loader = eval_loader(
        data,
        batch_size=train.eval_batch_size,
        workers=train.loader_workers(device.type),
        pin=device.type == "cuda",
        dataset=_Missing(list(missing.values())),
    )
    was_training = backbone.training
    network = backbone.eval()
    if converted:
        network = convert(backbone, data.transform.image_size, train.precision.half)
    # A conversion that fails returns the backbone itself.
    if device.type == "cpu" and network is backbone:
        network = fold_batchnorms(backbone, data.transform.image_size)
    network.to(memory_format=torch.channels_last)

    done = 0
    bar = progress_bar(total=len(files), desc="tokens", unit=" images")
    with bar, explain_out_of_memory(lambda: memory_advice(config, device)):
        for batch in loader:
            if stop:
                end_workers()
                raise Stopped(
                    f"stopped by {stop.name} after the tokens of {done:,} of {len(files):,} "
                    f"images; run the same command to continue",
                    stop.status,
                )
            if len(batch.images):
                images = to_device(batch.images, device, memory_format=torch.channels_last)
                with torch.no_grad(), autocast(device, train.precision):
                    tokens = network(images).float().cpu()
                if pooled:
                    tokens = tokens.mean(1, keepdim=True).clamp(-LARGEST, LARGEST).half()
                for index, array in zip(batch.indices.tolist(), tokens.numpy(), strict=True):
                    with replacing(files[index]) as file:
                        np.save(file, array)
                        np.save(file, _key_of(files[index]))
            count = len(batch.images) + len(batch.bad)
            done += count
            bar.update(count)
    backbone.train(was_training)


def _key_of(file: Path) -> str:
    """Return the second array of a token file: the hashes of the network and of the image."""
    return f"{file.parent.name}/{file.stem}"


def _files(dataset: StoredImages, folder: Path, title: str) -> list[Path]:
    """Return the token file of each image. Its name is a hash of the image file."""
    files = []
    for index in progress_bar(range(len(dataset)), desc=f"{title} files"):
        try:
            content = dataset.storage.content(index)
        except DataError as error:
            # The loader gets the same error, and stops or skips the image.
            content = str(error).encode(errors="surrogateescape")
        files.append(folder / f"{hashlib.sha256(content).hexdigest()[:32]}.npy")
    return files


def _network_key(
    backbone: nn.Module,
    data: DataModule,
    config: Config,
    device: torch.device,
    *,
    pooled: bool,
    converted: bool,
) -> str:
    """Return a hash of the network and of everything else that changes tokens of an image file."""
    # Weights are hashed below, so their source is ignored.
    settings = []
    for key, value in sorted(config.backbone.items()):
        if key != "pretrained":
            settings.append((key, str(value)))
    precision = config.train.precision.for_device(device).value
    decoders = [version(name) for name in sorted({"pillow", data.transform.decoder})]
    facts: tuple[Any, ...] = (FORMAT, torch.__version__, decoders, device.type, precision)
    facts += (settings, data.transform)
    if pooled:
        facts += ("pooled",)
    if converted:
        facts += ("openvino", version("openvino"))
    return network_hash(backbone, facts)
