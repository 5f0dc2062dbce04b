"""The text tower of a model of open_clip: texts in, vectors of length 1 out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mldec.clip.model import ClipSource, open_model

BATCH_SIZE = 256  # texts


class TextEncoder:
    """A text tower, with its tokenizer and without the image tower.

    Attributes:
        source: what it was opened from.
        width: D, of its vectors.
        sha256: of the file of its weights.

    Args:
        source: likewise.
        model: has `encode_text`, tokens [N, L] -> [N, D].
        tokenizer: texts -> int64 [N, L].
        width: likewise.
        sha256: likewise.
    """

    def __init__(
        self,
        source: ClipSource,
        model: nn.Module,
        tokenizer: Callable[[Sequence[str]], Tensor],
        *,
        width: int,
        sha256: str,
    ) -> None:
        self.source = source
        self.width = width
        self.sha256 = sha256
        self._model: Any = model
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, source: str) -> "TextEncoder":
        """Open the text tower that a source names; see `mldec.clip.model.open_model`.

        Raises:
            ConfigError: if it cannot be had.
        """
        opened = open_model(source)
        # Half of the memory or more: vectors of texts need neither images nor captions.
        for tower in ("visual", "text_decoder"):
            if hasattr(opened.model, tower):
                delattr(opened.model, tower)

        return cls(
            opened.source,
            opened.model,
            opened.tokenizer,
            width=opened.width,
            sha256=opened.sha256,
        )

    @torch.no_grad()
    def encode(
        self,
        texts: Sequence[str],
        progress: Callable[[Sequence[int]], Iterator[int]] = iter,
    ) -> Tensor:
        """Return the vectors of N texts, float32 [N, D], each of length 1.

        Args:
            texts: one longer than the context of the model is cut.
            progress: wraps the numbers of the first texts of all batches, as a progress bar does.
        """
        vectors = torch.empty(len(texts), self.width)
        for start in progress(range(0, len(texts), BATCH_SIZE)):
            tokens = self._tokenizer(list(texts[start : start + BATCH_SIZE]))
            encoded = self._model.encode_text(tokens, normalize=True)
            vectors[start : start + BATCH_SIZE] = encoded.float()
        return vectors
