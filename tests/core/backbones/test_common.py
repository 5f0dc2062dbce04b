"""What all backbones share, on a network of one convolution."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mldec.backbones.timm_backbone import (
    Backbone,
    check_drop_path,
    check_feature_norm,
    hub_file,
    weights_from_file,
)
from mldec.backbones.tokens import MisfitError
from mldec.errors import ConfigError

MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


class Shrunk(Backbone):
    """Give the normalised images, each 2 x 2 pixels as a token; refuse fewer than four tokens."""

    def __init__(self, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> None:
        super().__init__("shrunk", mean, std)
        self.norm = nn.Identity()
        self.weight = nn.Parameter(torch.ones(1))

    def _tokens(self, images: Tensor) -> Tensor:
        return (
            (self.weight * images)
            .unfold(2, 2, 2)
            .unfold(3, 2, 2)
            .flatten(2, 3)
            .flatten(3)
            .mean(3)
            .mT
        )

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.shape[1] < 4:
            raise MisfitError(f"{tokens.shape[1]} tokens")


def test_images_are_scaled_and_normalised_in_either_type() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (images.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(
        3, 1, 1
    )
    backbone = Shrunk()
    tokens = backbone(images)
    assert tokens.shape == (2, 4, 3)
    corner = expected[:, :, :2, :2].mean((2, 3))
    torch.testing.assert_close(tokens[:, 0], corner)
    torch.testing.assert_close(backbone(images.float() / 255), tokens)


def test_other_types_of_image_are_refused() -> None:
    with pytest.raises(ValueError, match=r"images are torch\.int64; give uint8"):
        Shrunk()(torch.zeros(1, 3, 4, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "values"), [("mean", (0.5, 0.5)), ("std", (0.5, 0.0, 0.5)), ("std", (1.0,) * 4)]
)
def test_a_wrong_normalisation_is_refused(name: str, values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"backbone\.{name}=.*give red, green and blue"):
        Shrunk(**{name: values})


def test_a_size_that_the_network_does_not_take_is_named_with_the_network() -> None:
    tokens, unused = Shrunk()._try_out(4, 4)
    assert (tokens.shape, unused) == ((1, 4, 3), set())
    with pytest.raises(ConfigError, match=r"backbone\.name=shrunk: 1 tokens; take another"):
        Shrunk()._try_out(2, 2)


def test_settings_out_of_range_are_refused() -> None:
    check_drop_path(0.0)
    check_feature_norm("auto")
    with pytest.raises(ConfigError, match=r"backbone\.drop_path=1\.0: give a rate"):
        check_drop_path(1.0)
    with pytest.raises(ConfigError, match=r"feature_norm=nwe: unknown; did you mean 'new'"):
        check_feature_norm("nwe")


def test_weights_are_read_from_a_file_of_plain_tensors(tmp_path: Path) -> None:
    weights = {"a": torch.arange(3.0)}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save(weights, tmp_path / "a.pth")
    for name in ("a.safetensors", "a.pth"):
        assert weights_from_file(str(tmp_path / name))["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [None, b"", b"text", {}])
def test_a_file_without_weights_is_one_line(tmp_path: Path, content: bytes | dict | None) -> None:
    path = tmp_path / "a.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        weights_from_file(str(path))
    message = str(caught.value)
    assert message.startswith(f"backbone.pretrained={path}: ")
    assert "backbone.pretrained=false" in message
    assert "\n" not in message


def test_the_first_file_that_a_repository_holds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import EntryNotFoundError

    asked = []

    def download(repository: str, filename: str, *, local_files_only: bool) -> str:
        asked.append((repository, filename, local_files_only))
        if filename != "b":
            raise EntryNotFoundError("absent")
        return "/cache/b"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert hub_file("owner/name", ["a", "b"]) == "/cache/b"
    assert asked == [("owner/name", "a", True), ("owner/name", "b", True)]
