"""Word vectors of class names, from a file or a text encoder, and how they were made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mldec.clip import PREFIX, ClipSource
from mldec.clip.names import encode_names
from mldec.clip.prompts import DEFAULT, read_templates
from mldec.data.names import names_fault
from mldec.data.vector_origin import VectorOrigin
from mldec.data.zero_shot.vectors import look_up
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.files.text import reading
from mldec.files.torch_files import sha256_of

_SEE = "see DATASETS.md, section Word vectors"


class WordVectors(NamedTuple):
    """Word vectors of K names.

    Attributes:
        names: those asked for, and then the optional ones that have a vector.
        queries: float32 [K, D]; row i belongs to names[i].
        origin: how they were made.
    """

    names: tuple[str, ...]
    queries: Tensor
    origin: VectorOrigin


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """The settings of a zero-shot `data` node that say where its word vectors come from.

    Attributes:
        vectors: a file in `root` (or elsewhere, by an absolute path), see `vectors.read_vectors`;
            or a text encoder of open_clip: "clip:MODEL:WEIGHTS", or "clip:FOLDER" without network,
            see `mldec.clip.ClipSource.parse`. None: the classes have no word vectors.
        prompts: of a text encoder: a sentence with {} for the name; "clip80" or "simple7", lists of
            CLIP; or a file in `root` with one sentence per line. Several are averaged.
        cache_dir: folder for the vectors of names by a text encoder; see `FileSettings`.

    Raises:
        ConfigError: if prompts are given without a text encoder.
    """

    vectors: str | None = "wordvec_array.pth"
    prompts: str = DEFAULT
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.prompts != DEFAULT and not (self.vectors or "").startswith(PREFIX):
            raise ConfigError(
                f"data.prompts {self.prompts!r} has no effect on the vectors of a file "
                f"(data.vectors {self.vectors!r}); leave it out, or choose a text encoder"
            )

    def of_classes(self, folder: Path, names: Sequence[str], order: Sequence[str]) -> WordVectors:
        """Return the word vectors of the classes of a data set.

        Args:
            folder: of the data set; a relative path is relative to it.
            names: of the K classes.
            order: the names of an array file without a text file of names beside it.

        Raises:
            DataError: see `word_vectors`.
            ConfigError: see `word_vectors`; or if there are to be none.
        """
        if self.vectors is None:
            raise ConfigError(f"data.vectors is null: name the word vectors of the classes; {_SEE}")
        if self.vectors.startswith(PREFIX):
            templates = read_templates(self.prompts, folder)
            return word_vectors(self.vectors, names, templates=templates, cache_dir=self.cache_dir)

        path = folder / Path(self.vectors).expanduser()
        has_names_beside = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
        return word_vectors(str(path), names, order=None if has_names_beside else order)


DEFAULT_VECTORS = VectorSettings()
NO_VECTORS = VectorSettings(vectors=None)


def word_vectors(
    source: str,
    names: Sequence[str],
    *,
    optional: Sequence[str] = (),
    order: Sequence[str] | None = None,
    templates: Sequence[str] = (DEFAULT,),
    cache_dir: str | None = None,
    keep: bool = True,
) -> WordVectors:
    """Return the word vectors of names from a file or a text encoder.

    Args:
        source: see `VectorSettings.vectors`; a relative path is relative to the working directory.
        names: the wanted names, each once.
        optional: further names, which need not have a vector in a file.
        order: see `vectors.read_vectors`.
        templates: sentences with {} for the name, for a text encoder.
        cache_dir: see `VectorSettings`.
        keep: write the vectors of new names by a text encoder to the cache.

    Raises:
        DataError: if a name is listed twice or not allowed, or a file is at fault, see
            `vectors.read_vectors`.
        ConfigError: if the text encoder cannot be had, see `mldec.clip.open_model`.
    """
    all_names = (*names, *optional)
    if fault := names_fault(all_names):
        raise DataError(f"the class names: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        queries, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).anywhere, sha256, tuple(templates))
        return WordVectors(all_names, queries, origin)

    path = Path(source)
    vectors = look_up(path, names, order=order, optional=optional)
    with reading(path, _SEE):
        sha256 = sha256_of(path)
    queries = torch.stack([torch.from_numpy(vector) for vector in vectors.values()])
    return WordVectors(tuple(vectors), queries, VectorOrigin(path.name, sha256))


def made_alike(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Make the word vectors of other names as those of a checkpoint were made.

    Args:
        names: of the classes.
        origin: of the word vectors of the checkpoint: a text encoder.
        where: begins the messages.
        remedy: ends them: how to give the weights of the encoder.
        keep: see `word_vectors`.

    Raises:
        ConfigError: if the text encoder cannot be had.
        CheckpointError: if it has other weights now.
    """
    try:
        made = word_vectors(origin.source, names, templates=origin.templates, keep=keep)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: the checkpoint makes word vectors by {origin.described()}, which cannot be "
            f"had here: {error}; or {remedy}"
        ) from error

    if made.origin.sha256 != origin.sha256:
        raise CheckpointError(
            f"{where}: the checkpoint makes word vectors by {origin.described()}, and the weights "
            f"there now have the sha256 {made.origin.sha256[:12]}; {remedy}"
        )
    return made
