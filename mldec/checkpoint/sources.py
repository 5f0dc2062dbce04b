"""Where files of weights come from: folders, the released files of the authors, and the Hub.

`local` turns what a user names into the path of a file. huggingface_hub does the work for the Hub:
it keeps downloads in its cache, and obeys HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN and
HF_HUB_OFFLINE. Two files of a repository are read, by their fixed names.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
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
    brief,
    printable,
    refusing,
    suggest,
    writing,
)
from mldec.files.cache import cache_folder
from mldec.files.run_folder import find_checkpoint
from mldec.files.torch_files import sha256_of, write_hashes
from mldec.runtime.console import on_terminal
from mldec.words.types import PREFIX

log = logging.getLogger("mldec")

ZOO, HUB = "zoo:", "hf:"
CARD = "README.md"
_UPLOADED = (CARD, published.CONFIG, published.WEIGHTS)
_TIMEOUT = 10  # seconds

_ML_DECODER = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ML_Decoder/"
_ASL = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ASL/"
_RAM_LISTS = (
    "https://raw.githubusercontent.com/xinyu1205/recognize-anything/"
    "7cb804a8609e9f4b1a50b7f31436d2df40bb9481/ram/data/"
)
# Where users report that the authors' links answer 403 Forbidden.
_REPORT = "https://github.com/Alibaba-MIIL/ML_Decoder/issues/87"


class ReleasedFile(NamedTuple):
    """A file of weights of the authors of ML-Decoder, ASL or RAM."""

    file: str
    image_size: int  # side of the square input in pixels
    folder: str = _ML_DECODER
    repository: str | None = None  # on the Hub, instead of the folder
    sha256: str | None = None  # that the Hub states

    @property
    def url(self) -> str:
        """The address."""
        if self.repository is not None:
            return hf_hub_url(self.repository, self.file)
        return self.folder + self.file


RELEASED = {
    "tresnet_m_coco_224": ReleasedFile("tresnet_m_COCO_224_84_2.pth", 224),
    "tresnet_l_coco_448": ReleasedFile("tresnet_l_COCO__448_90_0.pth", 448),
    "tresnet_xl_coco_640": ReleasedFile("tresnet_xl_COCO_640_91_4.pth", 640),
    "tresnet_m_openimages_224": ReleasedFile("tresnet_m_open_images_200_groups_86_8.pth", 224),
    "tresnet_l_cars_384": ReleasedFile("tresnet_l_stanford_card_96.41.pth", 384),
    # Weights to start training from. Their own input size is not published; the official train.py
    # uses them at 448.
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
# The names and thresholds of the tags of RAM and RAM++, and their sha256.
TAG_LIST, TAG_THRESHOLDS = "ram_tag_list.txt", "ram_tag_list_threshold.txt"
TAG_LISTS = {
    TAG_LIST: "5d96d2f7225527480ad773aaac76b6e5c08a18adf6eae9ca7d2ab923d5e7bd8b",
    TAG_THRESHOLDS: "b6f81d0de1bc7f9c251af512c413eae976c77dbfbadf700d4e3d90510f4c6447",
}


def local(path: str | Path) -> Path:
    """Resolve what a user names to the path of a local file of weights.

    It is a file; the folder of a run, which stands for its best checkpoint, else the last one; a
    folder that `mldec publish` wrote; "zoo:NAME", a released file; or "hf:OWNER/NAME[@REVISION]", a
    published checkpoint. The last two are downloaded once.
    """
    text = str(path)
    if text.startswith(PREFIX):
        raise CheckpointError(f"{text}: this needs a checkpoint, not a model of open_clip")
    if text.startswith(ZOO):
        return released_file(text.removeprefix(ZOO))
    if text.startswith(HUB):
        return published_file(text.removeprefix(HUB))

    run = Path("outputs", path)
    if not Path(path).exists() and (run / "checkpoints").is_dir():
        raise CheckpointError(f"no file at {path}; did you mean {run}?")
    if not Path(path).is_dir():
        return Path(path)
    weights = Path(path) / published.WEIGHTS
    return weights if weights.is_file() else find_checkpoint(Path(path))


def is_exported(path: str | Path) -> bool:
    """Tell whether a user names an ONNX file; names of the hub and of open_clip may end as one."""
    return Path(path).suffix == ".onnx" and not str(path).startswith((HUB, PREFIX))


def released_file(name: str) -> Path:
    """Return the local path of a released file, after downloading it if it is not in the cache."""
    if name not in RELEASED:
        raise CheckpointError(f"no released file {name!r}{suggest(name, list(RELEASED))}")
    released = RELEASED[name]
    path = cache_folder(None) / "zoo" / released.file
    advice = f"pass a copy that you have, as /path/to/{path.name}, in place of the zoo: name, "
    if released.repository is None:
        since = "since 2026-05-14 the authors' links are reported to answer 403"
        return _fetched(released.url, path, advice=f"{since} ({_REPORT}): {advice}")

    # The classes and thresholds of RAM are not in its file. Other ones can be given.
    for name, sha256 in TAG_LISTS.items():
        try:
            _fetched(_RAM_LISTS + name, path.with_name(name), sha256=sha256)
        except CheckpointError as error:
            log.warning(f"{error}; or pass --class-names FILE and --thresholds FILE")
    return _fetched(released.url, path, sha256=released.sha256, advice=advice)


def _fetched(url: str, path: Path, *, sha256: str | None = None, advice: str = "") -> Path:
    """Return the path of a file, after downloading it if it is not there."""
    if path.is_file():
        return path

    # A mirror is asked first: whoever names one knows why.
    urls = [url]
    if mirror := os.environ.get("MLDEC_ZOO_URL"):
        urls.insert(0, f"{mirror.rstrip('/')}/{path.name}")

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            # Another process may have downloaded it while this one waited.
            if not path.is_file():
                _download(urls, path, sha256, advice)
    return path


def _download(urls: Sequence[str], path: Path, sha256: str | None, advice: str) -> None:
    """Download a file from the first of the addresses that has it, and write its hash beside it.

    A file of a known hash that was interrupted goes on where it ended.
    """
    part, faults = path.with_name(path.name + ".part"), []
    for url in urls:
        try:
            if not part.is_file() or sha256_of(part) != sha256:
                with part.open("ab" if sha256 else "wb") as file:
                    http_get(url, file, resume_size=file.tell(), displayed_filename=path.name)

            actual = sha256_of(part)
            if sha256 not in (None, actual):
                raise CheckpointError(f"its sha256 is {actual}, not the published one")
            with part.open("rb") as start:
                is_file = start.read(1) not in (b"", b"<")
            if not is_file:
                raise CheckpointError("the answer is empty or an HTML page, not a file")
            # The hash goes first: without one it would pass for a file put there by hand.
            write_hashes(path, [actual])
            part.replace(path)
            return
        except CheckpointError as error:
            part.unlink()
            faults.append(f"{url} ({error})")
        except Exception as error:
            # The client raises its own classes, those of its HTTP library, and OSError.
            if sha256 is None:
                part.unlink(missing_ok=True)
            faults.append(f"{url} ({brief(error)})")
    raise CheckpointError(
        f"cannot download {' or '.join(faults)}; {advice}put it at {path}, or name a mirror by "
        f"MLDEC_ZOO_URL"
    )


def published_file(address: str) -> Path:
    """Return the local path of the weights at `owner/name[@revision]`; config.json is beside it.

    Without a network the Hub's client takes what is in its cache.
    """
    repository, _, revision = address.partition("@")
    check_repository(repository)

    with _asking(address):
        api = HfApi()
        config = Path(api.hf_hub_download(repository, published.CONFIG, revision=revision or None))
        published.read_config(config)

        # The folder in the cache has the name of the commit. The branch may have moved meanwhile.
        commit = config.parent.name
        path = Path(api.hf_hub_download(repository, published.WEIGHTS, revision=commit))
    log.info(f"{HUB}{address} is commit {commit}")
    return path


def check_repository(repository: str) -> None:
    """Raise a `CheckpointError` unless a name is one of a repository, owner/name."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise CheckpointError(f"{repository}: {repository!r} is no repository; write owner/name")


def require_token() -> None:
    """Raise a `ConfigError` if there is no token for uploads."""
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "there is no token for the hub: run hf auth login, set HF_TOKEN, or pass --dry-run"
        )


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the card and the files of a checkpoint in one commit, and return the commit.

    A repository that does not exist is created; with `private`, an existing one must be private.
    """
    api = HfApi()
    with _asking(repository):
        api.create_repo(repository, private=private or None, exist_ok=True)
        # What was uploaded to a public repository cannot be called back.
        if private and not api.model_info(repository, timeout=_TIMEOUT).private:
            raise CheckpointError(
                f"--private: {repository} exists and is public; choose another name"
            )

        # The bars of uploads would fill a log; those of downloads do not.
        if not on_terminal():
            disable_progress_bars()
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(_UPLOADED),
            commit_message="Publish a checkpoint with mldec",
        )
    return str(commit.oid)


@contextmanager
def _asking(address: str) -> Iterator[None]:
    """Turn the errors of the Hub's client into one line that names a checkpoint."""
    with refusing(f"{HUB}{address}", remedy="check the network and the disk"):
        try:
            yield
        except UserError:
            raise
        except (HfHubHTTPError, ValueError) as error:
            # What the Hub says is not in the first line: which name it lacks, and how to log in.
            raise CheckpointError(f"{HUB}{address}: {printable(str(error))[:600]}") from error
