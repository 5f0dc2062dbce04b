"""Word vectors and their origin."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

PREFIX = "clip:"  # prefix of text encoders
DIGITS_PREFIX = "digits:"  # prefix of the word vectors of colored digits, see `words.digits`
PROMPT = "a photo of a {}."  # default template of text encoders


@dataclass(frozen=True)
class VectorOrigin:
    """The source of word vectors."""

    # A text encoder with absolute paths, such as "clip:ViT-B-32:openai", or "digits:words", see
    # `words.digits.named_vectors`, or the name of a vector file, without its folder.
    source: str
    sha256: str  # of the encoder's weights, the vector file or the text "digits:words"
    templates: tuple[str, ...] = ()  # sentences with {} for the name, whose vectors are averaged
    descriptions: str | None = None  # name and hash of the file, see `vectors.with_descriptions`

    @property
    def is_encoder(self) -> bool:
        """Whether the vectors come from a text encoder."""
        return self.source.startswith(PREFIX)

    @property
    def can_encode(self) -> bool:
        """Whether vectors of other names can be computed without a vector file."""
        return self.is_encoder or self.source.startswith(DIGITS_PREFIX)

    def described(self) -> str:
        """Return the source and its hash, for messages."""
        return f"{self.source} (sha256 {self.sha256[:12]})"


class WordVectors(NamedTuple):
    """Word vectors of K names: the requested names, then the optional names with a vector."""

    names: tuple[str, ...]
    word_vectors: Tensor  # float32 [K, D]; row i belongs to names[i]
    origin: VectorOrigin
