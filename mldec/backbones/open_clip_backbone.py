"""The image tower of a model of open_clip: the embedding of an image, for a training-free head."""

from collections.abc import Sequence
from typing import Any

import timm
from torch import Tensor, nn

from mldec.backbones.timm_backbone import Backbone
from mldec.errors import ConfigError, refusing

# What a tower is built with whatever its description says: only its embedding is wanted, and its
# weights come from a checkpoint.
_ALWAYS = {"output_tokens": False, "timm_model_pretrained": False}


class OpenClipBackbone(Backbone):
    """Turn images into one token each: the embedding that a tower of open_clip gives them.

    It is the tower as it was trained, with its own pooling and projection, and has no tokens of the
    parts of an image. Its weights come with a checkpoint, see `mldec.checkpoint.clip`. The
    attributes `network`, `mean` and `std` are public because their names are keys of a checkpoint;
    `num_features` is the width of the embedding.

    Args:
        name: of the model in open_clip, for messages.
        embed_dim: width of the embedding, as in a model's description in open_clip.
        vision: the description of the image tower, `vision_cfg` in open_clip.
        image_size: pixels per side, which the tower fixes when it is built.
        quick_gelu: whether the activations are OpenAI's approximation of GELU.
        mean: of the three channels, for images in [0, 1].
        std: likewise.
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

        # timm would also take the address of a repository or a folder, and read it.
        trunk = vision.get("timm_model_name")
        if trunk is not None and not timm.is_model(str(trunk).partition(".")[0]):
            raise ConfigError(f"backbone.vision.timm_model_name={trunk}: timm has no such network")

        description = {**vision, **_ALWAYS, "image_size": image_size}
        remedy = "if open_clip is missing, run pip install -e '.[text]'"
        with refusing(f"backbone.vision: {name}", ConfigError, remedy=remedy):
            from open_clip.model import _build_vision_tower

            self.network = _build_vision_tower(embed_dim, description, quick_gelu)
        self._try_out(image_size, image_size)

    def _tokens(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.network(images)
        return embedding[:, None]
