"""The text tower of a model of open_clip: texts in, vectors of length 1 out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm import tqdm

from mldec.clip.model import ClipSource, open_model
from mldec.clip.prompts import PLACE
from mldec.runtime import distributed
from mldec.runtime.console import on_terminal

BATCH_SIZE = 256  # texts


class TextEncoder:
    """A text tower, with its tokenizer and without the image tower; on the GPU if there is one.

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
        self._device = distributed.pick_device("auto")
        self._model: Any = model.to(self._device)
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
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of N texts, float32 [N, D] on the CPU, each of length 1.

        Args:
            texts: one longer than the context of the model is cut.
        """
        vectors = torch.empty(len(texts), self.width)
        for start in range(0, len(texts), BATCH_SIZE):
            tokens = self._tokenizer(list(texts[start : start + BATCH_SIZE]))
            encoded = self._model.encode_text(tokens.to(self._device), normalize=True)
            vectors[start : start + BATCH_SIZE] = encoded.float().cpu()
        return vectors

    def encode_names(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the vectors of K names, float32 [K, D] on the CPU, each of length 1.

        That of a name is the mean over the templates, made of length 1 again, as in CLIP.

        Args:
            names: of the classes.
            templates: sentences with {} for the name.
        """
        per_batch = max(1, BATCH_SIZE // len(templates))
        batches = [names[start : start + per_batch] for start in range(0, len(names), per_batch)]

        rows = [torch.empty(0, self.width)]
        for batch in tqdm(batches, desc="word vectors", leave=False, disable=not on_terminal()):
            texts = [template.replace(PLACE, name) for name in batch for template in templates]
            encoded = self.encode(texts).unflatten(0, (len(batch), len(templates)))
            rows.append(normalize(encoded.mean(1), dim=1))
        return torch.cat(rows)
