"""Configs of transformers as plain data."""

import json
import sys

import pytest

from mldec.backbones.hf_backbone import (
    config_class_of,
    import_transformers,
    network_config_of,
    recorded_config,
)
from mldec.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


def small() -> transformers.ViTConfig:
    return transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


def test_the_record_of_a_config_gives_it_back() -> None:
    record = recorded_config("vit", small().to_dict())
    assert json.loads(json.dumps(record)) == record
    assert (record["model_type"], record["hidden_size"]) == ("vit", 16)
    again = network_config_of(record, drop_path=0.0)
    assert isinstance(again, transformers.ViTConfig)
    assert recorded_config("vit", again.to_dict()) == record


def test_what_names_code_is_not_recorded() -> None:
    content = {**small().to_dict(), "auto_map": {"AutoModel": "x.Y"}, "attn_implementation": "z"}
    assert recorded_config("vit", content) == recorded_config("vit", small().to_dict())


@pytest.mark.parametrize("setting", ["auto_map", "hidden_sise"])
def test_an_unknown_setting_is_refused(setting: str) -> None:
    record = {**recorded_config("vit", small().to_dict()), setting: 3}
    with pytest.raises(ConfigError, match=rf"backbone\.config\.{setting}: ViTConfig has no such"):
        network_config_of(record, drop_path=0.0)


@pytest.mark.parametrize("model_type", ["clip", "bert", "timm_wrapper", None, 3])
def test_a_type_without_one_image_network_is_refused(model_type: object) -> None:
    with pytest.raises(ConfigError, match=r"backbone\.config\.model_type=.*; take another"):
        config_class_of(model_type)


def test_stochastic_depth_is_a_setting_of_some_networks() -> None:
    with pytest.raises(ConfigError, match=r"backbone\.drop_path=0\.1: vit takes no such setting"):
        network_config_of(recorded_config("vit", small().to_dict()), drop_path=0.1)
    swin = recorded_config("swin", transformers.SwinConfig().to_dict())
    assert network_config_of(swin, drop_path=0.25).drop_path_rate == 0.25


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'mldec\[hf\]'"):
        import_transformers()
