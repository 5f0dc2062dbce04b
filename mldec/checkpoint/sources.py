"""Sources of weights: local files, released files of the authors, and the Hugging Face Hub.

`local` resolves a source to a local path. Downloads from the Hub use huggingface_hub, its cache and
its variables HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE. Only the two files of
`published` are read from a repository.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from filelock import FileLock
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import disable_progress_bars

from mldec.checkpoint import published
from mldec.errors import (
    CheckpointError,
    ConfigError,
    UserError,
    log,
    naming_errors,
    printable,
    suggest,
    writing,
)
from mldec.files.cache import cache_folder
from mldec.files.run_folder import check_source, find_checkpoint
from mldec.files.torch_files import sha256_of, write_hashes
from mldec.runtime.console import on_terminal
from mldec.words.types import PREFIX

ZOO = "zoo:"
HUB = "hf:"
CARD = "README.md"
_TIMEOUT = 10  # seconds

_ML_DECODER = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ML_Decoder/"
_ASL = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ASL/"
_RAM_LISTS = (
    "https://raw.githubusercontent.com/xinyu1205/recognize-anything/"
    "7cb804a8609e9f4b1a50b7f31436d2df40bb9481/ram/data/"
)
_REPORT = (
    "the authors' links return 403 since 2026-05-14, see "
    "https://github.com/Alibaba-MIIL/ML_Decoder/issues/87"
)


class ReleasedFile(NamedTuple):
    """A file of weights from the authors of ML-Decoder, ASL or RAM."""

    file: str
    image_size: int  # pixels per side of the square input
    folder: str = _ML_DECODER  # URL prefix, ignored with a repository
    repository: str | None = None  # repository on the Hub
    sha256: str | None = None  # hash published on the Hub

    @property
    def url(self) -> str:
        """URL of the file."""
        if self.repository is not None:
            return hf_hub_url(self.repository, self.file)
        return self.folder + self.file


RELEASED = {
    "tresnet_m_coco_224": ReleasedFile("tresnet_m_COCO_224_84_2.pth", 224),
    "tresnet_l_coco_448": ReleasedFile("tresnet_l_COCO__448_90_0.pth", 448),
    "tresnet_xl_coco_640": ReleasedFile("tresnet_xl_COCO_640_91_4.pth", 640),
    "tresnet_m_openimages_224": ReleasedFile("tresnet_m_open_images_200_groups_86_8.pth", 224),
    "tresnet_l_cars_384": ReleasedFile("tresnet_l_stanford_card_96.41.pth", 384),
    # Weights for initialization. Their input size is not published. The official train.py uses 448.
    "tresnet_l_pretrain": ReleasedFile("tresnet_l_pretrain_ml_decoder.pth", 448),
    # The files of the asymmetric loss, named as in MODEL_ZOO.md of Alibaba-MIIL/ASL.
    "asl_tresnet_m_coco_224": ReleasedFile("MS_COCO_TRresNet_M_224_81.8.pth", 224, _ASL),
    "asl_tresnet_l_coco_448": ReleasedFile("MS_COCO_TRresNet_L_448_86.6.pth", 448, _ASL),
    "asl_tresnet_xl_coco_640": ReleasedFile("MS_COCO_TResNet_xl_640_88.4.pth", 640, _ASL),
    "asl_tresnet_xl_voc2007_448": ReleasedFile("PASCAL_VOC_TResNet_xl_448_96.0.pth", 448, _ASL),
    "asl_tresnet_l_nuswide_448": ReleasedFile("NUS_WIDE_TRresNet_L_448_65.2.pth", 448, _ASL),
    "asl_tresnet_l_openimages_448": ReleasedFile("Open_ImagesV6_TRresNet_L_448.pth", 448, _ASL),
    "ram_plus_swin_l_384": ReleasedFile(
        "ram_plus_swin_large_14m.pth",
        384,
        repository="xinyu1205/recognize-anything-plus-model",
        sha256="497c178836ba66698ca226c7895317e6e800034be986452dbd2593298d50e87d",
    ),
    "ram_swin_l_384": ReleasedFile(
        "ram_swin_large_14m.pth",
        384,
        repository="xinyu1205/recognize_anything_model",
        sha256="15c729c793af28b9d107c69f85836a1356d76ea830d4714699fb62e55fcc08ed",
    ),
}
# Files with the tag names and thresholds of RAM and RAM++, and their SHA-256 hashes.
TAG_LIST = "ram_tag_list.txt"
TAG_THRESHOLDS = "ram_tag_list_threshold.txt"
TAG_LISTS = {
    TAG_LIST: "5d96d2f7225527480ad773aaac76b6e5c08a18adf6eae9ca7d2ab923d5e7bd8b",
    TAG_THRESHOLDS: "b6f81d0de1bc7f9c251af512c413eae976c77dbfbadf700d4e3d90510f4c6447",
}


def local(path: str | Path) -> Path:
    """Resolve a source of weights to a local path. Downloads are cached.

    Args:
        path: A file, the folder of a run (its best checkpoint, or else the last one), a folder of
            `mldec publish`, "zoo:NAME" for a released file, or "hf:OWNER/NAME[@REVISION]" for a
            published checkpoint.

    Raises:
        CheckpointError: If the source does not exist or cannot be downloaded.
    """
    text = str(path)
    if text.startswith(PREFIX):
        raise CheckpointError(f"{text}: open_clip models are not supported here; use a checkpoint")
    if text.startswith(ZOO):
        return _released_file(text.removeprefix(ZOO))
    if text.startswith(HUB):
        return _published_file(text.removeprefix(HUB))

    # A path that does not exist may be the name of a run, whose folder the message suggests.
    check_source(path)
    if not Path(path).is_dir():
        return Path(path)
    weights = Path(path) / published.WEIGHTS
    return weights if weights.is_file() else find_checkpoint(Path(path))


def is_exported(path: str | Path) -> bool:
    """Return True for the path of an ONNX file. Names on the Hub may have the same suffix."""
    return Path(path).suffix == ".onnx" and not str(path).startswith((HUB, PREFIX))


def _released_file(name: str) -> Path:
    if name not in RELEASED:
        raise CheckpointError(f"zoo:{name}: unknown released file{suggest(name, list(RELEASED))}")
    released = RELEASED[name]
    path = cache_folder(None) / "zoo" / released.file
    # The classes and thresholds of RAM are not in its file. The user can pass other files.
    if released.repository is not None:
        for list_name, sha256 in TAG_LISTS.items():
            try:
                _download(_RAM_LISTS + list_name, path.with_name(list_name), sha256)
            except CheckpointError as error:
                log.warning(f"{error}; or pass --class-names FILE and --thresholds FILE")
    _download(released.url, path, released.sha256)
    return path


def _download(url: str, path: Path, sha256: str | None) -> None:
    """Download a file and store its hash. Interrupted downloads of a known hash are resumed."""
    if path.is_file():
        return
    # A cluster without access to the address may have a copy of the files on another server.
    mirror = os.environ.get("MLDEC_ZOO_URL")  # replaces the URL
    if mirror:
        url = f"{mirror.rstrip('/')}/{path.name}"
    remedy = f"pass a copy of the file in place of the zoo: name, or put it at {path}"
    if sha256 is None:
        remedy += f" ({_REPORT})"

    part = path.with_name(path.name + ".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            # Another process may have downloaded it while this one waited.
            if path.is_file():
                return
            with naming_errors(url, remedy=remedy):
                actual = _download_part(url, part, path.name, sha256)
                # Write the hash first. A file without a hash is treated as copied by the user.
                write_hashes(path, [actual])
                part.replace(path)


def _download_part(url: str, part: Path, name: str, sha256: str | None) -> str:
    """Download or complete the temporary file `part`, and return its hash."""
    # A complete part is left over if the process was killed before the rename. Without a published
    # hash, the rest of another version could be appended, so the download starts again.
    if not part.is_file() or sha256_of(part) != sha256:
        with part.open("ab" if sha256 else "wb") as file:
            http_get(url, file, resume_size=file.tell(), displayed_filename=name)

    # Some servers return an error page instead of the file.
    with part.open("rb") as file:
        is_page = file.read(1) in (b"", b"<")
    actual = sha256_of(part)
    if is_page or sha256 not in (None, actual):
        part.unlink()
        raise ValueError("it is not the published file")
    return actual


def _published_file(address: str) -> Path:
    """Return the downloaded weights of "owner/name[@revision]". config.json is next to them."""
    repository, _, revision = address.partition("@")
    check_repository(repository)

    with _naming_hub_errors(address):
        api = HfApi()
        config = Path(api.hf_hub_download(repository, published.CONFIG, revision=revision or None))
        # The weights are large, so reject a repository of another library before their download.
        published.read_config(config)

        # Use the commit of config.json, because the branch may have changed since.
        commit = config.parent.name
        path = Path(api.hf_hub_download(repository, published.WEIGHTS, revision=commit))
    log.info(f"{HUB}{address} is commit {commit}")
    return path


def check_repository(repository: str) -> None:
    """Raise CheckpointError unless a repository has the form "owner/name"."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise CheckpointError(f"{HUB}{repository}: invalid repository; write owner/name")


def require_token() -> None:
    """Raise ConfigError if there is no token for uploads."""
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "HF_TOKEN: no token for the Hugging Face Hub; run hf auth login, set HF_TOKEN, or pass "
            "--dry-run"
        )


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the model card and the files of a checkpoint in one commit. Returns its hash.

    The repository "owner/name" is created if it does not exist. With `private`, a new repository is
    private, and an existing one must be private.
    """
    api = HfApi()
    with _naming_hub_errors(repository):
        # `private=None` leaves an existing repository as it is.
        api.create_repo(repository, private=private or None, exist_ok=True)
        # Uploads to a public repository cannot be undone.
        if private and not api.model_info(repository, timeout=_TIMEOUT).private:
            raise CheckpointError(f"--private: {repository} is public; choose another name")

        # Progress bars of uploads would fill a log file.
        if not on_terminal():
            disable_progress_bars()
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[CARD, published.CONFIG, published.WEIGHTS],
            commit_message="Publish a checkpoint with mldec",
        )
    return str(commit.oid)


@contextmanager
def _naming_hub_errors(address: str) -> Iterator[None]:
    with naming_errors(f"{HUB}{address}", remedy="check the network and the disk"):
        try:
            yield
        except UserError:
            raise
        except (HfHubHTTPError, ValueError) as error:
            # The missing name and the login hint are not in the first line of the message.
            raise CheckpointError(f"{HUB}{address}: {printable(str(error))[:600]}") from error
