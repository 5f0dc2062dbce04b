"""Configs of transformers as plain data: what a checkpoint records, and what it is checked for."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from mldec.errors import ConfigError, brief, suggest

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# Any, here and below: what transformers has cannot be known to a type checker where it is missing.
def import_transformers() -> Any:
    """Import transformers.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "backbone: HFBackbone needs transformers, which is not installed: "
            "pip install 'mldec[hf]'"
        ) from error
    return transformers


def config_class_of(model_type: object) -> Any:
    """Return transformers' class for the configs of a model type.

    Raises:
        ConfigError: if transformers itself has no image classification network of this type, or
            one that is made of several networks, such as CLIP.
    """
    transformers = import_transformers()
    # `timm_wrapper` would build any network of timm, and read its files.
    types = {
        config_class.model_type: config_class
        for config_class in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if not config_class.sub_configs and config_class.model_type != "timm_wrapper"
    }
    if model_type not in types:
        raise ConfigError(
            f"backbone.config.model_type={model_type}: transformers {transformers.__version__} has "
            f"no image classification network of this type that can be a backbone; "
            f"take another, such as {', '.join(list(types)[:8])}"
        )
    return types[model_type]


def _own_settings(config_class: Any) -> list[str]:
    """Return the settings of an architecture.

    Those of every config of transformers are not among them: classes, the kind of tensors, and
    code to be loaded for attention or quantisation.
    """
    shared = inspect.signature(import_transformers().PreTrainedConfig.__init__).parameters
    own = inspect.signature(config_class.__init__).parameters
    return [
        key for key, setting in own.items() if key not in shared and setting.kind not in VARIADIC
    ]


def recorded_config(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint records of a config.json: the type and all settings of its own.

    Raises:
        ConfigError: if it is of no supported network, or its settings are refused by transformers.
    """
    config_class = config_class_of(content.get("model_type"))
    keys = _own_settings(config_class)

    # A config may have an older name for a setting, which transformers translates.
    readable = {*keys, *config_class.attribute_map}
    config = _checked(config_class, {key: content[key] for key in readable & content.keys()})
    settings = {
        "model_type": config_class.model_type,
        **{key: getattr(config, key) for key in keys},
    }

    try:
        # Lists instead of tuples: as a checkpoint gives it back.
        return dict(json.loads(json.dumps(settings)))
    except TypeError as error:
        raise ConfigError(f"backbone.name={name}: its config is no plain data ({error})") from error


def network_config_of(config: Mapping[str, Any], drop_path: float) -> Any:
    """Return transformers' config object of a recorded config.

    Raises:
        ConfigError: for an unknown setting, or a value that transformers refuses.
    """
    config_class = config_class_of(config.get("model_type"))
    settings = {key: value for key, value in config.items() if key != "model_type"}
    known = _own_settings(config_class)
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"backbone.config.{key}: {config_class.__name__} has no such setting"
                f"{suggest(key, known)}"
            )

    if drop_path and "drop_path_rate" not in known:
        raise ConfigError(
            f"backbone.drop_path={drop_path}: {config_class.model_type} takes no such setting; "
            f"leave it out"
        )

    network_config = _checked(config_class, settings)
    if getattr(network_config, "drop_path_rate", drop_path) == drop_path:
        return network_config

    # CvT has one rate per stage, and `_mend_cvt` adds ours.
    settings["drop_path_rate"] = drop_path
    if config_class.model_type == "cvt":
        settings["drop_path_rate"] = [0.0 for _ in network_config.depth]
    return _checked(config_class, settings)


def _checked(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """Build a config object.

    Raises:
        ConfigError: if transformers refuses the settings.
    """
    try:
        return config_class(**settings)
    except Exception as error:
        raise ConfigError(
            f"backbone.config: transformers refuses these settings ({brief(error)})"
        ) from error
