"""The way from YAML, the command line or a checkpoint to a `Config`; OmegaConf ends here."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from mldec.errors import ConfigError, suggest
from mldec.settings import HARMLESS, PARTS, Config

PART_KEY = re.compile(rf"(?:{'|'.join(PARTS)})\.")
# What Hydra does not read as text.
NO_NAME = re.compile(r"[+-]?[\d_.]+(e[+-]?\d+)?|[+-]?(nan|inf)|true|false|null|\[.*", re.IGNORECASE)


ConfigStore.instance().store(name="schema", node=Config)


def config_dir() -> str:
    """Return the folder of the YAML files: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return str(installed if installed.is_dir() else package.parent / "configs")


def experiments() -> list[str]:
    """Return the names that `+experiment=` takes."""
    return sorted(path.stem for path in Path(config_dir(), "experiment").glob("*.yaml"))


def prepare(words: list[str]) -> list[str]:
    """Return the command line as Hydra takes it, after refusing what is misspelt.

    A part takes any argument of its class, listed in its YAML or not: `head.num_groups=20` becomes `++head...`, and
    `build.check` holds it to the signature. Flags come first, because Hydra's parser loses settings behind them.
    """
    flags, settings = [], []
    own_folder = any(word.startswith(("--config-dir", "-cd")) for word in words)
    for word in words:
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")
        if not equals or word.startswith("-"):
            flags.append(word)
            continue
        if bare == "experiment":
            _check_experiment(word, value, experiments(), own_folder)
        elif not bare.startswith("hydra") and not PART_KEY.match(bare):
            check_key(bare.partition("@")[0])
        settings.append(f"++{word}" if key == bare and PART_KEY.match(bare) else word)
    for word in settings:
        _check_choice(word)
    return flags + settings


def _check_experiment(word: str, value: str, known: list[str], own_folder: bool) -> None:
    if not word.startswith("+"):
        raise ConfigError(f"write +experiment={value}, with a plus: it adds to the config")
    if value not in known and not own_folder and re.fullmatch(r"[\w-]+", value):  # a sweep names several
        raise ConfigError(f"there is no experiment '{value}'{suggest(value, known)}")


def compose(words: list[str]) -> Config:
    """Return the config of a command line such as ["+experiment=digits", "train.epochs=1"]."""
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return parse(hydra.compose("config", prepare(words)))


def _check_choice(word: str) -> None:
    """Refuse a choice of a part or an experiment that Hydra reads as a number, true, null or a list.

    Raises:
        ConfigError: for such a choice, which Hydra ends in a ValueError or a TypeError.
    """
    key, _, value = word.partition("=")
    bare = key.lstrip("+~")
    if bare in (*PARTS, "experiment") and NO_NAME.fullmatch(value.strip()):
        raise ConfigError(f"{bare}={value}: an option is chosen by its name, such as {bare}=NAME")


def parse(values: Any) -> Config:
    """Turn Hydra's composition, or the dictionary in a checkpoint, into a `Config`; OmegaConf ends here.

    Raises:
        ConfigError: for an unknown key, a wrong type, a missing value or one out of range.
    """
    try:
        # Plain first: a key added with '+' is in the composed node, and only a merge into the schema refuses it.
        plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"nothing is chosen for {', '.join(missing)}: pass {missing[0]}=NAME, or an experiment")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain dictionaries, lists, numbers and strings, for YAML and checkpoints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def to_yaml(config: Config) -> str:
    """Return the config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def override(config: Config, words: list[str]) -> Config:
    """Return the config with words such as `data=coco data.root=/data/coco` merged in, as `train` takes them.

    Raises:
        ConfigError: for a word without '=', an unknown key or a wrong type.
    """
    base, changes = to_dict(config), []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            raise ConfigError(f"'{word}' is not understood: write key=value, such as data.root=/data/coco")
        check_key(key)
        if key in PARTS:
            base[key] = option(key, value)
        else:
            changes.append(word)
    try:
        return parse(OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist(changes)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def option(part: str, name: str) -> dict[str, Any]:
    """Return the node of an option file, such as data=coco, its interpolations as they are."""
    folder = Path(config_dir(), part)
    known = [path.stem for path in folder.glob("*.yaml")]
    if name not in known:
        raise ConfigError(f"{part}={name}: there is no such option{suggest(name, known)}")
    node = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def check_key(key: str) -> None:
    """Raise a `ConfigError` with the nearest name if no setting is called `key`; keys inside a part always pass."""
    kind: Any = Config
    names = key.split(".")
    for depth, name in enumerate(names):
        if not is_dataclass(kind):
            return
        known = [item.name for item in fields(kind)]
        if name not in known:
            here = ".".join(names[:depth])
            raise ConfigError(f"{key}: {here or 'the config'} has no setting '{name}'{suggest(name, known)}")
        kind = get_type_hints(kind)[name]


def diff(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs and matters to the numbers of a run."""
    before, after = _flatten(to_dict(old)), _flatten(to_dict(new))
    keys = [key for key in {**before, **after} if key not in HARMLESS and before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys]


def explain(error: BaseException) -> str:
    """Say in one line what OmegaConf or Hydra found wrong."""
    if isinstance(error, InterpolationToMissingValueError):  # ${name}, the folder of the run
        return f"no run is chosen: pass +experiment=NAME, one of {', '.join(experiments())}"
    text = str(error).partition("Config search path")[0]
    # The error below it, if any, has what was wrong with which key.
    reason, _, named = str(error.__cause__ or text).partition("full_key: ")
    if not named.strip():
        return " ".join(text.split())
    key = named.split()[0]
    try:
        check_key(key)
    except ConfigError as better:
        return str(better)
    return f"{key}: {reason.strip().splitlines()[-1]}"


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
