"""Models of open_clip as checkpoints, compared with open_clip."""

import json
import shutil

import open_clip
import pytest
import torch
from clip_models import CLIP, clip_folder, siglip_folder, write_folder
from PIL import Image

from mldec.checkpoint import load_model
from mldec.checkpoint.loading import check_start
from mldec.config.schema import Config
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError

# Like RN50 of open_clip, with a custom text tower.
RESNET = {
    **CLIP,
    "custom_text": True,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model of each kind, with random weights."""
    folder = tmp_path_factory.mktemp("towers")
    return {
        "clip": clip_folder(folder / "clip"),
        "resnet": write_folder(folder / "resnet", RESNET, {"interpolation": "bilinear"}),
        "siglip": siglip_folder(folder / "siglip"),
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", ["clip", "resnet", "siglip"])
def test_pixels_and_logits_equal_open_clip(kind, folders, sample_data):
    model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folders[kind]}")
    model.eval()
    photo = sorted((sample_data / "coco2014_mini").rglob("*.jpg"))[0]
    image = Image.open(photo).convert("RGB")
    assert image.width != image.height
    tokens = torch.randint(1, 60, (5, model.context_length))
    expected, _ = model.get_logits(prepare(image)[None], tokens)
    assert expected.std() > 0.01

    state = torch.get_rng_state()
    loaded = load_model(f"clip:{folders[kind]}")
    assert torch.equal(torch.get_rng_state(), state)
    backbone = loaded.model.backbone
    pixels = (loaded.transform(image) / 255 - backbone.mean) / backbone.std
    torch.testing.assert_close(pixels, prepare(image), rtol=0, atol=1e-5)
    words = model.encode_text(tokens, normalize=True)
    # The length of a vector does not matter.
    for vectors in (words, 3 * words):
        logits = loaded.model(loaded.transform(image)[None], vectors)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_metadata_of_open_clip_models(folders):
    loaded = load_model(f"clip:{folders['siglip']}")
    assert loaded.transform == EvalTransform(image_size=32, interpolation="bicubic")
    assert not loaded.classes.exclusive
    assert loaded.classes.names == ()
    assert loaded.classes.word_vectors.shape == (0, 16)
    assert loaded.path == folders["siglip"] / "open_clip_model.safetensors"
    assert (loaded.of_run, loaded.weights) == (False, "raw")
    assert loaded.model.backbone.num_features == 16

    # Without a bias the scores are relative.
    other = load_model(f"clip:{folders['clip']}")
    assert other.classes.exclusive
    assert other.transform == EvalTransform(image_size=32, crop=1.0, interpolation="bicubic")


def with_images(folder, target, **settings):
    """Copy a model with other preprocessing; return its source."""
    shutil.copytree(folder, target)
    path = target / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["preprocess_cfg"] |= settings
    path.write_text(json.dumps(config))
    return f"clip:{target}"


def test_other_preprocessing(folders, tmp_path):
    # One number is used for three channels.
    source = with_images(folders["clip"], tmp_path / "gray", mean=0.5, std=0.25)
    backbone = load_model(source).config.backbone
    assert (backbone["mean"], backbone["std"]) == ([0.5] * 3, [0.25] * 3)

    source = with_images(folders["clip"], tmp_path / "long", resize_mode="longest")
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    clip = f"clip:{folders['clip']}"
    for path, options, name in (
        (source, {}, "longest"),
        (clip, {"weights": "ema"}, "--weights raw"),
        (clip, {"class_names": names}, "--class-names"),
        (clip, {"image_size": 64}, "--image-size 64"),
    ):
        with pytest.raises(CheckpointError, match=name):
            load_model(path, **options)


def test_init_timm_is_removed_from_the_config():
    backbone = {"name": "tresnet_v2_l.miil_in21k", "pretrained": True}
    config = Config(name="x", data={}, backbone=backbone, head={}, loss={}, init="timm")
    assert check_start(config).init is None
