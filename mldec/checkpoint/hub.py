"""Checkpoints on the Hugging Face Hub: fetched as `hf:owner/name[@revision]`, and uploaded.

huggingface_hub does the work: it keeps downloads in its cache, and obeys HF_ENDPOINT, HF_HOME,
HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE. Two files of a repository are read, by their fixed names.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from mldec.checkpoint import portable
from mldec.errors import CheckpointError, ConfigError, UserError, brief
from mldec.runtime.cli import on_terminal

log = logging.getLogger("mldec")

SCHEME = "hf:"
CARD = "README.md"
FILES = (CARD, portable.CONFIG, portable.WEIGHTS)
_TIMEOUT = 10  # seconds
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
    if at and (not revision or revision.startswith("/") or ".." in revision):
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
    try:
        validate_repo_id(repository)
        is_one = "/" in repository
    except HFValidationError:
        is_one = False
    if not is_one:
        raise CheckpointError(f"{shown}: {repository!r} is no repository; write owner/name")


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

        path = cached
        if path is None or path.parent.name != info.sha:
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
    with _explained(Address(repository, None)):
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


def _is_unreachable(error: Exception) -> bool:
    """Tell whether the hub did not answer, or not to the question."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return not isinstance(error, UserError)


@contextmanager
def _explained(address: Address) -> Iterator[None]:
    """Turn the errors of the client into one line that names a checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The client raises its own classes, those of its HTTP library, OSError and ValueError.
        endpoint = huggingface_hub.constants.ENDPOINT
        raise CheckpointError(
            f"{address}: {endpoint} cannot give or take it ({_reason(error)}); check the name, the "
            f"network and the disk; for what is private or gated, {_LOG_IN}"
        ) from error


def _reason(error: Exception) -> str:
    """Describe an error with all its lines: what the hub says is not in the first one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())[:250]
