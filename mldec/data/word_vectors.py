"""Word vectors of the classes of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mldec.errors import ConfigError, documented
from mldec.words.types import PREFIX, PROMPT, WordVectors

WORDS_DOCS = "DATASETS.md, section Word vectors"


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """Word vector settings of a zero-shot `data` node."""

    # File relative to `root`, or a text encoder: clip:MODEL:WEIGHTS. None: no word vectors.
    vectors: str | None = "wordvec_array.pth"

    prompts: str = PROMPT  # prompt of a text encoder, or a text file of prompts

    # JSON file of sentences about the classes, see `with_descriptions`. They replace the prompts.
    descriptions: str | None = None

    cache_dir: str | None = None  # cache of text encoder vectors, see `cache_folder`

    def __post_init__(self) -> None:
        if self.descriptions is not None and not str(self.vectors).startswith(PREFIX):
            raise ValueError(
                f"descriptions is {self.descriptions} and data.vectors is {self.vectors}; "
                f"sentences need a text encoder: pass data.vectors=clip:MODEL:WEIGHTS"
            )

    @documented(WORDS_DOCS)
    def of_classes(self, folder: Path, names: Sequence[str], order: Sequence[str]) -> WordVectors:
        """Return the word vectors of the classes. `folder` is the folder of the dataset.

        `order` has the names of the columns of an array file without a text file of names. Raises
        ConfigError if `vectors` is None.
        """
        # Import them here, because most datasets have no word vectors.
        from mldec.words.encoder import read_templates
        from mldec.words.vectors import load_word_vectors, with_descriptions

        if self.vectors is None:
            raise ConfigError(f"data.vectors is null; set the word vectors; see {WORDS_DOCS}")
        if self.vectors.startswith(PREFIX):
            templates = read_templates(self.prompts, folder)
            vectors = load_word_vectors(
                self.vectors, names, templates=templates, cache_dir=self.cache_dir
            )
            if self.descriptions is None:
                return vectors
            path = folder / Path(self.descriptions).expanduser()
            return with_descriptions(vectors, self.vectors, path, cache_dir=self.cache_dir)

        path = folder / Path(self.vectors).expanduser()
        has_names_file = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
        return load_word_vectors(str(path), names, order=None if has_names_file else order)


DEFAULT_VECTORS = VectorSettings()
NO_VECTORS = VectorSettings(vectors=None)
