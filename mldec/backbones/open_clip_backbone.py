"""The image tower of an open_clip model, for a training-free head."""

from collections.abc import Sequence
from typing import Any

import timm
from torch import Tensor, nn

from mldec.backbones.timm_backbone import Backbone
from mldec.errors import ConfigError, naming_errors


class OpenClipBackbone(Backbone):
    """Map each image to a single token, its embedding by the image tower of open_clip.

    The pooling and the projection are part of the tower, so there are no patch tokens. The weights
    are loaded from a checkpoint, see `mldec.checkpoint.clip`. The names of the attributes
    `network`, `mean` and `std` are keys of checkpoints. `num_features` is the embedding width.

    Args:
        name: Name of the model in open_clip, for messages.
        embed_dim: Width of the embedding, `embed_dim` in open_clip.
        vision: Config of the image tower, `vision_cfg` in open_clip.
        image_size: Pixels per side, which are fixed when the tower is built.
        quick_gelu: Whether to use OpenAI's approximation of GELU.
        mean: Channel means for images in [0, 1].
        std: Channel standard deviations for images in [0, 1].
    """

    def __init__(
        self,
        name: str,
        *,
        embed_dim: int,
        vision: dict[str, Any],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        quick_gelu: bool = False,
    ) -> None:
        super().__init__(name, mean, std)
        self.num_features = embed_dim
        self.norm = nn.Identity()

        # timm would also accept a repository or a folder, and read it.
        trunk = vision.get("timm_model_name")
        if trunk is not None and not timm.is_model(str(trunk).partition(".")[0]):
            raise ConfigError(f"backbone.vision.timm_model_name={trunk}: unknown in timm")

        # The tower returns only the embedding, and its weights come from a checkpoint.
        vision = vision | {"output_tokens": False, "timm_model_pretrained": False}
        vision["image_size"] = image_size
        remedy = "if open_clip is missing, run pip install -e '.[text]'"
        with naming_errors(f"backbone.vision: {name}", ConfigError, remedy=remedy):
            from open_clip.model import _build_vision_tower

            self.network = _build_vision_tower(embed_dim, vision, quick_gelu)
        self._try_out(image_size, image_size)

    def _tokens(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.network(images)
        return embedding[:, None]
