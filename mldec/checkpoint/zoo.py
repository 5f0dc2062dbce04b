"""Files released by the authors of ML-Decoder and ASL: names, addresses, a checked download."""

import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import disable_progress_bars

from mldec.data.cache import cache_folder
from mldec.errors import CheckpointError, brief, suggest
from mldec.files.torch_files import sha256_of, write_hashes
from mldec.runtime.cli import on_terminal

_ML_DECODER = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ML_Decoder/"
_ASL = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ASL/"
# Where users report that the authors' links answer 403 Forbidden.
_REPORT = "https://github.com/Alibaba-MIIL/ML_Decoder/issues/87"


@dataclass(frozen=True)
class File:
    """A released file of weights."""

    name: str
    file: str
    url: str
    image_size: int  # side of the square input in pixels
    sha256: str | None  # None: not pinned


def _file(name: str, file: str, image_size: int, base: str = _ML_DECODER) -> File:
    # No hash is pinned, because the authors published none, and they even replaced the 448 pixel
    # COCO file after its release. The hash of the first download is kept instead, see `fetch`.
    return File(name, file, base + file, image_size, sha256=None)


_RELEASED = (
    _file("tresnet_m_coco_224", "tresnet_m_COCO_224_84_2.pth", 224),
    _file("tresnet_l_coco_448", "tresnet_l_COCO__448_90_0.pth", 448),
    _file("tresnet_xl_coco_640", "tresnet_xl_COCO_640_91_4.pth", 640),
    _file("tresnet_m_openimages_224", "tresnet_m_open_images_200_groups_86_8.pth", 224),
    _file("tresnet_l_cars_384", "tresnet_l_stanford_card_96.41.pth", 384),
    # Weights to start training from. Their own input size is not published; the official train.py
    # uses them at 448.
    _file("tresnet_l_pretrain", "tresnet_l_pretrain_ml_decoder.pth", 448),
    # The files of the asymmetric loss, named as in MODEL_ZOO.md of Alibaba-MIIL/ASL.
    _file("asl_tresnet_m_coco_224", "MS_COCO_TRresNet_M_224_81.8.pth", 224, _ASL),
    _file("asl_tresnet_l_coco_448", "MS_COCO_TRresNet_L_448_86.6.pth", 448, _ASL),
    _file("asl_tresnet_xl_coco_640", "MS_COCO_TResNet_xl_640_88.4.pth", 640, _ASL),
    _file("asl_tresnet_xl_voc2007_448", "PASCAL_VOC_TResNet_xl_448_96.0.pth", 448, _ASL),
    _file("asl_tresnet_l_nuswide_448", "NUS_WIDE_TRresNet_L_448_65.2.pth", 448, _ASL),
    _file("asl_tresnet_l_openimages_448", "Open_ImagesV6_TRresNet_L_448.pth", 448, _ASL),
)
FILES: dict[str, File] = {file.name: file for file in _RELEASED}


def known(path: Path) -> File | None:
    """Return the released file that has the file name of `path`, if there is one."""
    return next((file for file in FILES.values() if file.file == path.name), None)


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Return the local path of a released file, after downloading it if it is not in the cache.

    Args:
        name: a key of `FILES`.
        cache_dir: folder for the files; None is zoo/ in $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        CheckpointError: if the name is unknown, or the download fails.
    """
    if name not in FILES:
        raise CheckpointError(f"no released file {name!r}{suggest(name, list(FILES))}")
    entry = FILES[name]
    path = (cache_dir or cache_folder(None) / "zoo") / entry.file
    if path.is_file():
        return path

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            # Another process may have downloaded it while this one waited.
            if not path.is_file():
                _download(entry, path)
    except Exception as error:
        # The client raises its own classes, those of its HTTP library, and OSError.
        raise CheckpointError(
            f"cannot download {entry.url} ({brief(error)}); since 2026-05-14 the authors' links "
            f"are reported to answer 403 ({_REPORT}): pass a copy that you have, as "
            f"/path/to/{path.name}, in place of the zoo: name, or put it at {path}"
        ) from error
    return path


def _download(entry: File, path: Path) -> None:
    """Download a file, and write its hash beside it; every reader compares the two."""
    # The bar would fill a log.
    if not on_terminal():
        disable_progress_bars()

    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            http_get(entry.url, file, displayed_filename=path.name)
            file.flush()
            os.fsync(file.fileno())

        with part.open("rb") as file:
            if file.read(1) in (b"", b"<"):
                raise ValueError("the answer is empty or an HTML page, not a file")
        actual = sha256_of(part)
        if entry.sha256 not in (None, actual):
            raise ValueError(f"its sha256 is {actual}, not the expected {entry.sha256}")

        # The hash goes first: a file without one would pass for a file that was put there by hand.
        write_hashes(path, [actual])
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
