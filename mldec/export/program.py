"""The module that is exported: from the pixels of images to probabilities and decisions."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from mldec.checkpoint import Loaded
from mldec.errors import CheckpointError, brief
from mldec.export.resizing import Resize
from mldec.inference.scoring import decided, probabilities

CLASSES = "classes"  # name of the axis of the word vectors
EXAMPLE = 2  # images that a program is traced with; 0 and 1 would be taken for fixed numbers


class Program(nn.Module):
    """A checkpoint that answers by itself.

    Args:
        loaded: the checkpoint.
        thresholds: see `decided`.
        any_size: resize the images inside.
        half: compute in half precision up to the logits.
        asks: take the word vectors of the classes as a second input.
    """

    thresholds: Tensor | None

    def __init__(
        self,
        loaded: Loaded,
        thresholds: Sequence[float] | None,
        *,
        any_size: bool = False,
        half: bool = False,
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.model: nn.Module = deepcopy(loaded.model).half() if half else loaded.model
        self.resize = Resize(loaded.transform) if any_size else nn.Identity()
        self.asks = asks

        # A graph for several groups of classes does not fit one group.
        self.fewest_classes = getattr(loaded.model.head, "group_size", 0) + 1

        # The model is registered above, once.
        self._loaded = loaded
        self.register_buffer(
            "thresholds", None if thresholds is None else torch.tensor(thresholds).float()
        )
        self.register_buffer("queries", None if asks else loaded.classes.queries)

    def forward(self, images: Tensor, queries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map images uint8 [B, 3, H, W] to probabilities float32 [B, K] and decisions bool [B, K].

        Args:
            images: RGB; H and W are the size of the checkpoint's images, or any with `any_size`.
            queries: word vectors float32 [K, D], if the program asks for them.
        """
        logits = self.model(self.resize(images), queries if self.asks else self.queries)
        scores = probabilities(self._loaded, logits)
        return scores, decided(scores, self.thresholds)


def examples(program: Program, loaded: Loaded) -> tuple[Tensor, ...]:
    """Return inputs of the right form: images, and word vectors if the program asks for them."""
    # Height and width differ from each other and from S, so that none is taken for another.
    size = loaded.transform.image_size
    height, width = (size + 3, size + 5) if isinstance(program.resize, Resize) else (size, size)
    images = torch.zeros(EXAMPLE, 3, height, width, dtype=torch.uint8)
    if not program.asks:
        return (images,)

    assert loaded.classes.queries is not None
    return images, torch.ones(program.fewest_classes + 5, loaded.classes.queries.shape[1])


def open_axes(program: Program) -> tuple[dict[int, str], ...]:
    """Return the names of the axes of each input whose length is open."""
    image_axes = {0: "batch"}
    if isinstance(program.resize, Resize):
        image_axes |= {2: "height", 3: "width"}
    return (image_axes, {0: CLASSES}) if program.asks else (image_axes,)


class _ContiguousAttention(TorchFunctionMode):
    """Make the result of attention contiguous in memory.

    A fused kernel orders it in another way than the operations that ONNX has instead, and a network
    that takes another view of it would then fail: transformers' Swin does.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return result.contiguous()
        return result


def traced(program: Program, loaded: Loaded, path: str) -> ExportedProgram:
    """Turn a program into a graph for any number of images, and of classes if it asks for them.

    Args:
        program: of the checkpoint.
        loaded: the checkpoint.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if its network cannot be exported.
    """
    # Torch refuses a `Dim` where it cannot prove that each length will do. It cannot prove it for
    # classes in groups, where the number of groups is rounded.
    shapes = tuple(
        {axis: Dim.DYNAMIC if name == CLASSES else Dim(name) for axis, name in axes.items()}
        for axes in open_axes(program)
    )
    try:
        with torch.no_grad(), _ContiguousAttention():
            return torch.export.export(
                program.eval(), examples(program, loaded), dynamic_shapes=shapes
            )
    except Exception as error:
        # A network of any library may do what torch.export does not follow.
        raise CheckpointError(
            f"{path} cannot be exported: torch.export does not follow its network ({brief(error)})"
        ) from error


def of_other_classes(loaded: Loaded, count: int) -> Loaded:
    """Return a zero-shot model that scores made-up classes.

    Args:
        loaded: a zero-shot model.
        count: of the classes.
    """
    assert loaded.classes.queries is not None
    width = loaded.classes.queries.shape[1]
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    names = tuple(f"class {number}" for number in range(count))
    return replace(loaded, classes=replace(loaded.classes, names=names, queries=vectors))
