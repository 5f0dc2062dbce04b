"""Files released by the authors of ML-Decoder and ASL: names, addresses, a checked download."""

import fcntl
import os
import re
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from tqdm import tqdm

from mldec.errors import CheckpointError, suggest
from mldec.files.torch_files import hash_record, known_hashes, sha256_of, write_hashes

_ML_DECODER = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ML_Decoder/"
_ASL = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/ASL/"
# Where users report that the authors' links answer 403 Forbidden.
_REPORT = "https://github.com/Alibaba-MIIL/ML_Decoder/issues/87"
_GIB = 2**30
_TIMEOUT = 30  # seconds without a byte from the server
_CHUNK = 2**20  # bytes per read


@dataclass(frozen=True)
class File:
    """A released file of weights."""

    name: str
    file: str
    url: str
    image_size: int  # side of the square input in pixels
    max_bytes: int  # a larger download is refused
    sha256: str | None  # None: not pinned


def _file(name: str, file: str, image_size: int, base: str = _ML_DECODER) -> File:
    # No hash is pinned, because the authors published none, and they even replaced the 448 pixel
    # COCO file after its release. The hash of the first download is kept instead, see `fetch`.
    return File(name, file, base + file, image_size, max_bytes=_GIB, sha256=None)


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


class _Refused(Exception):
    """The server answered, but not with the file that was asked for."""


def known(path: Path) -> File | None:
    """Return the released file that has the file name of `path`, if there is one."""
    return next((file for file in FILES.values() if file.file == path.name), None)


def fetch(name: str, cache_dir: Path | None = None) -> Path:
    """Return the local path of a released file, after downloading it if it is not in the cache.

    A cached file is compared with the hash that its download left beside it, and with the pinned
    hash if there is one. A file that was put there by hand has no hash beside it and is used
    unchecked.

    Args:
        name: a key of `FILES`.
        cache_dir: folder for the files; None is zoo/ in $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        CheckpointError: if the name is unknown, the cached file is damaged, or the download fails.
    """
    if name not in FILES:
        raise CheckpointError(f"no released file {name!r}{suggest(name, list(FILES))}")
    entry = FILES[name]
    path = (cache_dir or _default_cache()) / entry.file

    if not path.is_file():
        with _alone(path):
            # Another process may have downloaded it while this one waited for the lock.
            if not path.is_file():
                download(entry.url, path, max_bytes=entry.max_bytes, sha256=entry.sha256)
                return path

    _verify(path, entry.sha256)
    return path


def download(
    url: str,
    destination: Path,
    *,
    max_bytes: int,
    sha256: str | None = None,
    context: ssl.SSLContext | None = None,
) -> None:
    """Download the file at an https address to `destination`, and its hash to `destination`.sha256.

    The bytes go to `destination`.part. If the connection is cut, they are kept there and the next
    call asks for the rest. `destination` itself is complete or absent.

    Args:
        url: https address; any address that it redirects to must be https too.
        destination: path of the file; its folder is created.
        max_bytes: a larger file is refused.
        sha256: hash that the file must have; None accepts any.
        context: certificates to trust; None for those of the system.

    Raises:
        CheckpointError: if the file cannot be downloaded completely, or is not the expected one.
    """
    part = _beside(destination, ".part")
    opener = build_opener(
        HTTPSHandler(context=context or ssl.create_default_context()), _HttpsOnly()
    )

    try:
        if not _is_https(url):
            raise _Refused("not an https address")
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _open(opener, url, part) as response:
            _receive(response, part, max_bytes)

        actual = sha256_of(part)
        if sha256 is not None and actual != sha256:
            _discard(part)
            raise _Refused(f"its sha256 is {actual}, not the expected {sha256}")

        # The hash goes first: a file without one would pass for a file that was put there by hand.
        write_hashes(destination, [actual])
        part.replace(destination)
        _discard(part)
    except (OSError, HTTPException, ValueError, _Refused) as error:
        # A ValueError is a malformed address; an HTTPError holds the connection open.
        if isinstance(error, HTTPError):
            error.close()

        raise CheckpointError(
            f"cannot download {url} ({_reason(error)}); since 2026-05-14 the authors' links are "
            f"reported to answer 403 ({_REPORT}): pass a copy that you have, as "
            f"/path/to/{destination.name}, in place of the zoo: name, or put it at {destination}"
        ) from error


class _HttpsOnly(HTTPRedirectHandler):
    """Follow redirects to https addresses only."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if not _is_https(newurl):
            fp.close()
            raise _Refused(f"it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(opener: OpenerDirector, url: str, part: Path) -> HTTPResponse:
    """Request the bytes that `part` lacks, or the whole file if the server has no matching rest."""
    identity = _beside(part, ".of")

    if part.is_file() and identity.is_file() and (have := part.stat().st_size):
        try:
            response = opener.open(
                Request(url, headers={"Range": f"bytes={have}-"}), timeout=_TIMEOUT
            )
        except HTTPError as error:
            # 416, range not satisfiable: the file has become shorter, so it is another file now.
            error.close()
            if error.code != 416:
                raise
        else:
            # Append only to a part of the very same file; a status of 200 is the whole file.
            same = _span(response)[0] == have and _identity(response) == identity.read_text(
                errors="replace"
            )
            if response.status == 200 or same:
                return response
            response.close()

    response = opener.open(Request(url), timeout=_TIMEOUT)
    if response.status != 200:
        response.close()
        raise _Refused(f"the server answers {response.status}")
    return response


def _receive(response: HTTPResponse, part: Path, max_bytes: int) -> None:
    """Write the body of a response to `part`, or append the rest to it.

    Raises:
        _Refused: if the body is an HTML page, larger than `max_bytes`, or not of the announced
            size.
    """
    if response.headers.get_content_type() == "text/html":
        raise _Refused("the answer is an HTML page, not a file")
    start, total = _span(response)
    if not total:
        raise _Refused("the server announces no size, or an empty file")
    if total > max_bytes:
        raise _Refused(f"its {total:,} bytes are more than the {max_bytes:,} allowed")

    if start == 0:
        _discard(part)
        _beside(part, ".of").write_text(_identity(response))

    # http.client stops reading at the announced size, which would hide a longer body. The size is
    # checked below instead.
    response.length = None
    quiet = not sys.stderr.isatty()
    bar = tqdm(
        desc=part.stem,
        initial=start,
        total=total,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=quiet,
    )

    with part.open("ab") as file, bar:
        count = start
        while data := _read(response, complete=count == total):
            count += len(data)
            if count > total:
                _discard(part)
                raise _Refused(f"it sends more than the {total:,} bytes it announced")
            file.write(data)
            bar.update(len(data))
        file.flush()
        os.fsync(file.fileno())

    if count < total:
        raise _Refused(
            f"the connection ended after {count:,} of {total:,} bytes; "
            f"they are kept, try again for the rest"
        )


def _read(response: HTTPResponse, *, complete: bool) -> bytes:
    """Read the next bytes of a body, none at its end, even if the server ends it improperly."""
    try:
        return response.read1(_CHUNK)
    except OSError:
        # All bytes have arrived, and the server keeps the connection open or resets it.
        if complete:
            return b""
        raise


def _span(response: HTTPResponse) -> tuple[int, int]:
    """Return the offset of the body in the file, and the size of the file, in bytes.

    (0, 0) if the response does not say, or contradicts itself.
    """
    if response.status == 200:
        return 0, response.length or 0

    content_range = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", content_range)
    start, total = map(int, match.groups()) if match else (0, 0)
    return (start, total) if response.status == 206 and response.length == total - start else (0, 0)


def _identity(response: HTTPResponse) -> str:
    """Return a line that changes when the file on the server is replaced.

    The bytes of one file must not be appended to those of another.
    """
    headers = response.headers
    return f"{_span(response)[1]} {headers.get('ETag')} {headers.get('Last-Modified')}\n"


def _verify(path: Path, pinned: str | None) -> None:
    """Compare a file with the hash beside it and with the pinned one, as far as they exist.

    Raises:
        CheckpointError: if a hash differs, or the file cannot be read.
    """
    record = hash_record(path)
    try:
        expected = [(recorded, f"of {record.name}") for recorded in known_hashes(path)]
        expected += [(pinned, "pinned")] if pinned else []
        actual = sha256_of(path) if expected else None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({_reason(error)}); check its permissions"
        ) from error

    for wanted, source in expected:
        if actual != wanted:
            difference = f"its sha256 is {actual}, not {wanted} ({source})"
            raise CheckpointError(
                f"{path} is damaged: {difference}; delete it and {record.name} to fetch it anew"
            )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time download a file: two that write to one .part would corrupt it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _beside(path, ".lock").open("w")
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} cannot be written ({_reason(error)}); name another folder"
        ) from error

    with lock:
        # Some network file systems have no locks: go on without one.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _default_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec", "zoo").expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            "there is no home folder to keep released files in; set XDG_CACHE_HOME"
        ) from error


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _beside(part, ".of").unlink(missing_ok=True)


def _is_https(url: str) -> bool:
    return urlsplit(url).scheme == "https"


def _reason(error: BaseException) -> str:
    """Return the cause of an error in one line."""
    cause = (
        error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    )
    text = getattr(cause, "strerror", None) or str(cause)
    return " ".join(str(text).split()) or type(cause).__name__
