"""How word vectors were made, so that vectors of other classes can be made alike."""

import re
from dataclasses import dataclass

from mldec.clip import PREFIX
from mldec.clip.prompts import templates_fault

_HASH = re.compile("[0-9a-f]{64}")
MAX_SOURCE = 4_096  # characters; a path has no more


@dataclass(frozen=True)
class VectorOrigin:
    """The source of word vectors.

    Attributes:
        source: a text encoder, such as "clip:ViT-B-32:openai", with absolute paths; or the name of
            a file of vectors, without its folder.
        sha256: of the encoder's weights, or of the file.
        templates: sentences with {} for the name, whose vectors were averaged; none for a file.
    """

    source: str
    sha256: str
    templates: tuple[str, ...] = ()

    @property
    def is_encoder(self) -> bool:
        """Whether a text encoder made the vectors, so that it can make others."""
        return self.source.startswith(PREFIX)

    def described(self) -> str:
        """Name the source and its hash, for messages."""
        return f"{self.source} (sha256 {self.sha256[:12]})"

    def fault(self) -> str | None:
        """Return what is wrong with these values, which may be from a stranger's file, or None."""
        if not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE:
            return "its source is no text"
        if not isinstance(self.sha256, str) or _HASH.fullmatch(self.sha256) is None:
            return "its sha256 is none"
        if not isinstance(self.templates, tuple) or self.is_encoder is not bool(self.templates):
            return "it has templates without a text encoder, or an encoder without templates"
        return templates_fault(self.templates)
