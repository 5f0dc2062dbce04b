"""Turn YAML, the command line or the config in a checkpoint into a `Config`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from mldec.config.schema import HARMLESS, PARTS, Config, Init
from mldec.errors import ConfigError, suggest

# Settings that the schema does not list: arguments of the parts and of the optimizer.
OPEN_KEY = re.compile(rf"(?:{'|'.join(PARTS)}|init|optim\.options)\.|optim\.options$")

# Hydra's. What else begins with two dashes is a setting that should have none.
FLAG = "help|hydra-help|version|cfg|resolve|package|run|multirun|info"
FLAG = rf"--({FLAG}|config-\w+|experimental-rerun)"

ConfigStore.instance().store(name="schema", node=Config)


def config_dir() -> str:
    """Return the folder of the YAML files, in an installed wheel or beside the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return str(installed if installed.is_dir() else package.parent / "configs")


def options(part: str) -> list[str]:
    """Return the sorted names of the option files of a part, such as those that `head=` takes."""
    return sorted(path.stem for path in Path(config_dir(), part).glob("*.yaml"))


def prepare(words: list[str]) -> list[str]:
    """Check the words of a command line for misspellings and return them as Hydra takes them.

    `head.num_groups=20` becomes `++head.num_groups=20`, whether the YAML lists it or not. Flags
    come first, because Hydra's parser loses settings behind them.
    """
    flags, settings = [], []
    words = [_at_home(word) for word in words]
    if any(word.startswith("init.") for word in words):
        words = [re.sub("^init=", "init.path=", word) for word in words]
    own_folder = any(word.startswith(("--config-dir", "-cd", "hydra.searchpath")) for word in words)
    for before, word in zip(["", *words], words, strict=False):
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")

        if word.startswith("--") and not re.fullmatch(FLAG, key):
            name = key[2:].replace("experiment", "+experiment")
            check_key("name" if name == "+experiment" else name)
            raise ConfigError(f"{word}: write {name}=VALUE, without dashes")

        # A word without '=' is a flag, the value of the flag before it, or a deletion such as
        # ~data.
        if not equals and not word.startswith(("-", "~")) and not before.startswith("-"):
            raise _not_understood(word)
        if not equals or word.startswith("-"):
            flags.append(word)
            continue

        # Only a single name can be looked up: a sweep names several, and a folder of the user's own
        # may hold more.
        single_name = not own_folder and re.fullmatch(r"[\w.-]+", value) is not None
        if key == "experiment":
            raise ConfigError(f"write +experiment={value}, with a plus: it adds to the config")
        if bare in ("experiment", *PARTS):
            if single_name:
                check_option(bare, value)
        elif not bare.startswith("hydra") and not OPEN_KEY.match(bare):
            check_key(bare.partition("@")[0])

        # The batch of the experiment stays: auto is about its parts.
        if bare == "train.batch_size" and value == "auto":
            word = "train.fit_memory=true"

        settings.append(f"++{word}" if key == bare and OPEN_KEY.match(bare) else word)
    return flags + settings


def _at_home(word: str) -> str:
    """Expand `~/` at the start of a value, which shells leave alone and Hydra does not parse."""
    key, _, value = word.partition("=")
    return f"{key}={Path(value).expanduser()}" if value.startswith("~/") else word


def compose(words: list[str]) -> Config:
    """Return the config of a command line such as ["+experiment=digits", "train.epochs=1"]."""
    return compose_with_options(words)[0]


def compose_with_options(words: list[str]) -> tuple[Config, dict[str, str]]:
    """Return the config of a command line, and the name of the chosen option of each part."""
    try:
        with initialize_config_dir(config_dir(), version_base="1.3"):
            node = hydra.compose("config", prepare(words), return_hydra_config=True)
        options = dict(node.hydra.runtime.choices)
        with open_dict(node):
            del node.hydra
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from error
    return parse(node), options


def parse(values: Any, changes: Sequence[Any] = ()) -> Config:
    """Turn Hydra's composition, or the dictionary in a checkpoint, into a `Config`.

    The changes are nodes of OmegaConf, which replace settings.
    """
    try:
        # The composed node accepts a key that was added with '+'. As plain values, it is merged
        # into a fresh schema, which refuses unknown keys.
        changed = OmegaConf.merge(values, *changes)
        plain = OmegaConf.to_container(changed, resolve=True)
        schema = OmegaConf.structured(Config)
        if isinstance(plain, dict) and isinstance(plain.get("init"), dict):
            schema.init = OmegaConf.structured(Init)
        merged = OmegaConf.merge(schema, plain)

        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            names = ", ".join(missing)
            raise ConfigError(f"nothing is chosen for {names}: pass {missing[0]}=NAME")

        # This builds the dataclasses, whose `__post_init__` checks the ranges.
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error

    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain dictionaries, lists and scalars, for YAML and checkpoints."""
    return cast(Any, OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def to_yaml(config: Config) -> str:
    """Return the config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def override(config: Config, words: list[str]) -> Config:
    """Return a config with changed settings, such as data=coco and data.root=/data/coco."""
    base: dict[str, Any] = to_dict(config)
    changes = []

    for word in map(_at_home, words):
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            raise _not_understood(word)
        check_key(key)

        # A part is replaced as a whole: the arguments of the old choice would not fit the new one.
        if key in PARTS:
            base[key] = option(key, value)
            continue

        try:
            changes.append(OmegaConf.from_dotlist([word]))
        except (YAMLError, RecursionError) as error:
            raise _not_understood(word) from error
    return parse(base, changes)


def _not_understood(word: str) -> ConfigError:
    return ConfigError(
        f"'{word[:200]}' is not understood: write key=value, such as data.root=/data/coco, "
        f"and quotes around a value that holds any of [{{,:'"
    )


def option(part: str, name: str) -> dict[str, Any]:
    """Return the config node in an option file, such as data=coco; interpolations are kept."""
    check_option(part, name)
    file = Path(config_dir(), part, f"{name}.yaml")
    return cast(Any, OmegaConf.to_container(OmegaConf.load(file)))


def check_option(part: str, name: str) -> None:
    """Check that a part has an option file of this name."""
    known = options(part)
    if name in known:
        return

    fault = f"{part}={name}: there is no such option{suggest(name, known)}"
    if part == "backbone":
        import timm  # slow, and needed for a message only

        # A likely mistake: any model of timm is chosen by backbone.name.
        if timm.is_model(name):
            fault = f"backbone={name} is a model of timm: write backbone=timm backbone.name={name}"
    raise ConfigError(fault)


def check_key(key: str) -> None:
    """Check that there is a setting of this full key, such as "optim.lr"; keys of parts pass."""
    kind: Any = Config
    names = key.split(".")

    for depth, name in enumerate(names):
        if not is_dataclass(kind):
            return

        known = [item.name for item in fields(kind)]
        if name not in known:
            # A setting of the same name in another section is a better guess than a similar
            # spelling.
            section = ".".join(names[:depth]) or "the config"
            elsewhere = [
                f"'{group}.{names[-1]}'"
                for group, inner in get_type_hints(Config).items()
                if is_dataclass(inner) and names[-1] in get_type_hints(inner)
            ]
            hint = suggest(name, known)
            if elsewhere:
                hint = f"; did you mean {' or '.join(elsewhere)}?"
            raise ConfigError(f"{key}: {section} has no setting '{name}'{hint}")

        kind = get_type_hints(kind)[name]


def diff(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs, except those in `HARMLESS`."""
    before, after = flat(to_dict(old)), flat(to_dict(new))
    keys = [
        key
        for key in {**before, **after}
        if key not in HARMLESS and before.get(key) != after.get(key)
    ]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys]


def explain(error: BaseException) -> str:
    """Return an error of OmegaConf or Hydra as one line in the terms of the command line."""
    # The folder of the run refers to ${name}, which every experiment sets.
    if isinstance(error, InterpolationToMissingValueError):
        return (
            "no run is chosen: begin with +experiment=digits, or for photos of your own with "
            "+experiment=finetune_frozen data.root=FOLDER; --help lists all experiments"
        )
    if isinstance(error, OverrideParseException):
        return str(_not_understood(str(error.override).removeprefix("++")))

    # The cause of the error, if there is one, says what is wrong with which key.
    text = str(error).partition("Config search path")[0]
    reason, _, after_key = str(error.__cause__ or text).partition("full_key: ")
    if not after_key.strip():
        return " ".join(text.split())

    # For an unknown key, our own message has a suggestion.
    key = after_key.split()[0]
    try:
        check_key(key)
    except ConfigError as better:
        return str(better)

    if key in PARTS and "Missing mandatory value" in reason:
        chosen = f"pass {key}=NAME first, one of {', '.join(options(key))}"
        return f"{key} has arguments, but none is chosen: {chosen}"
    if "is not a ListConfig" in reason:
        return f"{key} is no list: write {key}=[VALUE]"
    return f"{key}: {reason.strip().splitlines()[-1]}"


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their full keys, such as optim.lr."""
    settings: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings
