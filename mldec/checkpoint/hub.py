"""Checkpoints on the Hugging Face Hub: fetched as `hf:owner/name[@revision]`, and uploaded.

huggingface_hub does the work: it keeps downloads in its cache, and obeys HF_ENDPOINT, HF_HOME,
HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE. Two files of a repository are read, by their fixed names.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from mldec.checkpoint import portable
from mldec.errors import CheckpointError, ConfigError, UserError, brief
from mldec.runtime.console import on_terminal

log = logging.getLogger("mldec")

SCHEME = "hf:"
CARD = "README.md"
FILES = (CARD, portable.CONFIG, portable.WEIGHTS)
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
_TIMEOUT = 10  # seconds
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_REPOSITORY = re.compile(f"{_NAME}/{_NAME}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_COMMIT = re.compile("[0-9a-f]{40}")
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"


class Address(NamedTuple):
    """Of a checkpoint on the hub."""

    repository: str  # owner/name
    revision: str | None  # a branch, tag or commit; None for the main branch

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def parse(text: str) -> Address:
    """Read `owner/name[@revision]`.

    Raises:
        CheckpointError: if it is malformed.
    """
    repository, at, revision = text.partition("@")
    check_repository(repository, SCHEME + text)

    # The revision becomes a path in the cache.
    if at and not _REVISION.fullmatch(revision):
        raise CheckpointError(
            f"{SCHEME}{text}: {revision!r} is no revision; write a branch, a tag or a commit "
            f"behind the @"
        )
    return Address(repository, revision or None)


def check_repository(repository: str, shown: str) -> None:
    """Check that a name is one of a repository.

    Args:
        repository: owner/name.
        shown: what the user wrote, for the message.

    Raises:
        CheckpointError: if it is not.
    """
    owner, _, name = repository.partition("/")
    if not _REPOSITORY.fullmatch(repository) or max(len(owner), len(name)) > 96:
        raise CheckpointError(
            f"{shown}: {repository!r} is no repository; write owner/name, each of letters, digits "
            f"and single . - _"
        )


def fetch(text: str) -> Path:
    """Return the local path of the weights of a published checkpoint; its config.json is beside it.

    The hub is asked which commit a branch or tag is at; without a network the one of the last time
    counts. A commit that is in the cache needs no network.

    Args:
        text: `owner/name[@revision]`.

    Raises:
        CheckpointError: if it is malformed, or the files cannot be had, or are of another kind.
    """
    address = parse(text)
    cached = _cached(address)
    if cached is not None and _COMMIT.fullmatch(address.revision or ""):
        return cached

    with _explained(address):
        try:
            info = HfApi().model_info(
                address.repository, revision=address.revision, timeout=_TIMEOUT
            )
        except Exception as error:
            # Whoever may not see the repository any more must not get it from the cache.
            if cached is None or not _is_unreachable(error):
                raise
            log.warning(
                f"{address}: the hub cannot be asked ({brief(error)}); using commit "
                f"{cached.parent.name}, which is in the cache"
            )
            return cached

        if cached is not None and cached.parent.name == info.sha:
            path = cached
        else:
            _check_files([entry.rfilename for entry in info.siblings or []], address)
            path = _download(address)
    log.info(f"{address} is commit {path.parent.name}")
    return path


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the files of a folder, in one commit, to a repository that is created if need be.

    Args:
        folder: with `FILES`.
        repository: owner/name.
        private: create a private repository; an existing one must be private.

    Returns:
        The commit.

    Raises:
        CheckpointError: if the hub refuses it, or cannot be reached.
    """
    api = HfApi()
    with _explained(Address(repository, None), uploading=True):
        api.create_repo(repository, private=private or None, exist_ok=True)
        # What was uploaded to a public repository cannot be called back.
        if private and not api.model_info(repository, timeout=_TIMEOUT).private:
            raise ConfigError(
                f"--private: {repository} exists and is public; choose another name, or make it "
                f"private in its settings"
            )

        # The bars of uploads would fill a log; those of downloads do not.
        if not on_terminal():
            disable_progress_bars()
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in FILES
        ]
        commit = api.create_commit(
            repository, operations, commit_message="Publish a checkpoint with mldec"
        )
    return str(commit.oid)


def require_token() -> None:
    """Check that there is a token for uploads.

    Raises:
        ConfigError: if there is none.
    """
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            f"there is no token for the hub: {_LOG_IN} to a token with write access; or write the "
            f"files with --dry-run FOLDER"
        )


def _cached(address: Address) -> Path | None:
    """Return the path of the weights in the cache, if both files of a revision are there."""
    paths = [
        huggingface_hub.try_to_load_from_cache(
            address.repository,
            name,
            revision=address.revision,
            cache_dir=huggingface_hub.constants.HF_HUB_CACHE,
        )
        for name in (portable.CONFIG, portable.WEIGHTS)
    ]
    return Path(str(paths[-1])) if all(isinstance(path, str) for path in paths) else None


def _download(address: Address) -> Path:
    """Download both files of one commit, the small one first, unless they are in the cache."""
    api, cache = HfApi(), huggingface_hub.constants.HF_HUB_CACHE
    config = Path(
        api.hf_hub_download(
            address.repository, portable.CONFIG, revision=address.revision, cache_dir=cache
        )
    )
    portable.read_config(config)

    # The folder in the cache has the name of the commit. The branch may have moved meanwhile.
    return Path(
        api.hf_hub_download(
            address.repository, portable.WEIGHTS, revision=config.parent.name, cache_dir=cache
        )
    )


def _check_files(names: Sequence[str], address: Address) -> None:
    """Check that a repository holds the files of a published checkpoint, before they are fetched.

    Raises:
        CheckpointError: if it does not.
    """
    missing = [name for name in (portable.CONFIG, portable.WEIGHTS) if name not in names]
    if not missing:
        return

    fault = f"{address} holds no checkpoint of mldec.publish: it has no {' and no '.join(missing)}"
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{fault}, but {pickles[0][:100]}, which is refused: a pickle can run code when it is "
            f"read; if it is a checkpoint that you trust, download it and pass its path"
        )
    raise CheckpointError(f"{fault}; choose another repository")


def _is_unreachable(error: Exception) -> bool:
    """Tell whether the hub did not answer, or not to the question."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return not isinstance(error, UserError)


@contextmanager
def _explained(address: Address, *, uploading: bool = False) -> Iterator[None]:
    """Turn the errors of the client into one line.

    Args:
        address: of the checkpoint, for messages.
        uploading: rather than fetching.

    Raises:
        CheckpointError: instead of any error but a `UserError`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The client raises its own classes, those of its HTTP library, OSError and ValueError.
        raise CheckpointError(f"{address}: {_reason(error, address, uploading)}") from error


def _reason(error: Exception, address: Address, uploading: bool) -> str:
    """Return what is wrong, and what to do."""
    endpoint = huggingface_hub.constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"its owner grants access on request; ask for it at its page on {endpoint}"
    if isinstance(error, RevisionNotFoundError):
        return f"there is no revision {address.revision or 'main'}; choose a branch, tag or commit"
    if isinstance(error, OfflineModeIsEnabled):
        absent = "" if uploading else "it is not in the cache, and "
        return f"{absent}HF_HUB_OFFLINE is set; unset it"

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 403 or (uploading and isinstance(error, RepositoryNotFoundError)):
        return f"{endpoint} grants no permission; {_LOG_IN} to a token that may do this"
    if isinstance(error, RepositoryNotFoundError):
        return f"{endpoint} has no such model, or it is private; check the name, or {_LOG_IN}"
    if status == 401:
        return f"{endpoint} does not accept the token; {_LOG_IN} to a valid one"
    if isinstance(error, EntryNotFoundError):
        return f"a file is missing on {endpoint} ({brief(error)}); try again"
    if status is not None:
        return f"{endpoint} answers with status {status} ({brief(error)}); try again later"
    if isinstance(error, OSError) and error.errno is not None:
        cache = huggingface_hub.constants.HF_HUB_CACHE
        return f"cannot write to {cache} ({error.strerror}); free space, or set HF_HOME elsewhere"
    if isinstance(error, ValueError):
        return f"the files are refused ({brief(error)}); correct what it names"
    return f"{endpoint} cannot be used ({brief(error)}); check the network and try again"
