"""Word vectors and their origin."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

PREFIX = "clip:"  # of the sources that are text encoders
DIGITS_PREFIX = "digits:"  # of the word vectors of colored digits, which are made here
PROMPT = "a photo of a {}."  # the template that a text encoder is given by default


@dataclass(frozen=True)
class VectorOrigin:
    """The source of word vectors."""

    # A text encoder, such as "clip:ViT-B-32:openai", with absolute paths; "digits:words", see
    # `words.digits.named_vectors`; or the name of a file of vectors, without its folder.
    source: str

    sha256: str  # of the encoder's weights, the file, or the text "digits:words", in hexadecimal

    # Sentences with {} for the name, whose vectors were averaged; none for a file.
    templates: tuple[str, ...] = ()

    # The file of sentences about classes that these had instead, and its sha256, see `described`.
    descriptions: str | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether a text encoder made the vectors, so that it can make others."""
        return self.source.startswith(PREFIX)

    @property
    def makes_others(self) -> bool:
        """Whether the vectors of other names can be made without a file of vectors."""
        return self.is_encoder or self.source.startswith(DIGITS_PREFIX)

    def described(self) -> str:
        """Name the source and its hash, for messages."""
        return f"{self.source} (sha256 {self.sha256[:12]})"


class WordVectors(NamedTuple):
    """Word vectors of K names, which are those asked for, and then optional ones that have one."""

    names: tuple[str, ...]
    queries: Tensor  # float32 [K, D]; row i belongs to names[i]
    origin: VectorOrigin
