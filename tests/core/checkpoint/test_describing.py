"""What files say of their models; how the models are built of it is in test_loading.py."""

import pytest
from clip_towers import clip_folder

from mldec.checkpoint.loading import describe_tower
from mldec.errors import CheckpointError, ConfigError


def test_options_without_effect_are_refused_before_a_model_of_open_clip_is_opened() -> None:
    with pytest.raises(CheckpointError, match=r"^clip:none has one set of weights"):
        describe_tower("clip:none", "ema", None)
    with pytest.raises(ConfigError, match=r"^--class-names has no effect: clip:none has no class"):
        describe_tower("clip:none", None, ("cat", "dog"))


def test_a_model_of_open_clip_is_described_by_parts_of_ours(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = clip_folder(tmp_path_factory.mktemp("tower") / "clip")
    description = describe_tower(f"clip:{folder}", None, None)
    assert not description.of_run
    assert description.weights == "raw"
    assert description.path.parent == folder
    targets = {kind: part.target.__name__ for kind, part in description.parts.items()}
    assert targets == {"backbone": "OpenClipBackbone", "head": "Cosine"}
    assert {name.partition(".")[0] for name in description.tensors} == {"backbone", "head"}
