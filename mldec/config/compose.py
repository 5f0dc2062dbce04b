"""Turn YAML, the command line or the config in a checkpoint into a `Config`.

The rest of the program sees the `Config` only, not OmegaConf's nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from mldec.config.schema import HARMLESS, PARTS, Config
from mldec.errors import ConfigError, suggest

PART_KEY = re.compile(rf"(?:{'|'.join(PARTS)})\.")
# Values that Hydra does not read as text.
NO_NAME = re.compile(r"[+-]?[\d_.]+(e[+-]?\d+)?|[+-]?(nan|inf)|true|false|null|\[.*", re.IGNORECASE)
COMPLETION = ("-sc", "--shell-completion")
HYDRA_FLAGS = {
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--run",
    "--multirun",
}
HYDRA_FLAGS |= {"--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info"}
LONGEST_NUMBER = 100  # digits; Python refuses to parse 4,300

# Patterns of OmegaConf's messages about a value, and ours: {0} is the first group of the pattern,
# {key} the setting, and {options} the names that the part takes.
_PLAIN_WORDS = [
    (
        r"Value '(.*)' of type '.*' could not be converted to Integer",
        "is '{0}': it must be a whole number",
    ),
    (r"Value '(.*)' of type '.*' could not be converted to Float", "is '{0}': it must be a number"),
    (r"Value '(.*)' is not a valid bool", "is '{0}': it must be true or false"),
    (r"Invalid value '(.*)', expected one of \[(.*)\]", "is '{0}': it must be one of {1}"),
    (r"field '.*' is not Optional|Incompatible value 'None'", "is null: it must have a value"),
    (
        r"Invalid type assigned: .* is not a subclass of .* value: (.*)",
        "is {0}: it holds settings, write {key}.NAME=VALUE",
    ),
    (r"Invalid value assigned: .* is not a ListConfig", "is no list: write {key}=[VALUE]"),
    (
        r"Missing mandatory value: backbone$",
        "has arguments, but none is chosen: pass backbone=timm first, for any model of timm, "
        "or one of {options}",
    ),
    (
        rf"Missing mandatory value: ({'|'.join(PARTS)})$",
        "has arguments, but none is chosen: pass {0}=NAME first, one of {options}",
    ),
]


ConfigStore.instance().store(name="schema", node=Config)


def config_dir() -> str:
    """Return the folder of the YAML files, in an installed wheel or beside the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return str(installed if installed.is_dir() else package.parent / "configs")


def experiments() -> list[str]:
    """Return the sorted names that `+experiment=` takes."""
    return sorted(path.stem for path in Path(config_dir(), "experiment").glob("*.yaml"))


def prepare(words: list[str]) -> list[str]:
    """Check the words of a command line for misspellings and return them as Hydra takes them.

    A part takes any argument of its class, whether its YAML lists it or not: `head.num_groups=20`
    becomes `++head.num_groups=20`, and `build.check` compares it with the signature. Flags come
    first, because Hydra's parser loses settings behind them.

    Args:
        words: flags such as --cfg, and settings such as train.epochs=3.

    Raises:
        ConfigError: for a word that is neither, an unknown setting, or an unknown option.
    """
    # These belong to tab completion, where `install=bash` is no setting.
    if any(word.startswith(COMPLETION) for word in words):
        return words

    flags, settings = [], []
    own_folder = any(word.startswith(("--config-dir", "-cd", "hydra.searchpath")) for word in words)
    for before, word in zip(["", *words], words, strict=False):
        check_word(word)
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")

        # A word without '=' is a flag, the value of the flag before it, or a deletion such as
        # ~data.
        if word.startswith("--"):
            _check_flag(key)
        elif not equals and not word.startswith(("-", "~")) and not before.startswith("-"):
            raise ConfigError(
                f"'{word}' is not understood: write key=value, such as train.epochs=3"
            )
        if not equals or word.startswith("-"):
            flags.append(word)
            continue

        # Only a single name can be looked up: a sweep names several, and a folder of the user's own
        # may hold more.
        single_name = not own_folder and re.fullmatch(r"[\w.-]+", value) is not None
        if bare == "experiment":
            if key == bare:
                raise ConfigError(f"write +experiment={value}, with a plus: it adds to the config")
            if single_name and value not in experiments():
                raise ConfigError(
                    f"there is no experiment '{value}'{suggest(value, experiments())}"
                )
        elif bare in PARTS:
            if single_name and value != "null":
                check_option(bare, value)
        elif not bare.startswith("hydra") and not PART_KEY.match(bare):
            check_key(bare.partition("@")[0])

        settings.append(f"++{word}" if key == bare and PART_KEY.match(bare) else word)

    for word in settings:
        _check_choice(word)
    return flags + settings


def check_word(word: str) -> None:
    """Refuse a word that the parsers below would fail on.

    Raises:
        ConfigError: for text that is not UTF-8, or a number of `LONGEST_NUMBER` digits or more.
    """
    key = word.partition("=")[0][:80]

    # Python decodes bytes of the command line that are not UTF-8 to surrogates.
    if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ConfigError(f"{key}: the value is not UTF-8 text")
    if number := re.search(rf"\d{{{LONGEST_NUMBER},}}", word):
        raise ConfigError(f"{key}: a number of {len(number[0]):,} digits is too long")


def _check_flag(flag: str) -> None:
    """Refuse a setting that is written as a flag, such as --epochs instead of train.epochs=3.

    Raises:
        ConfigError: for the name of a setting; other unknown flags are left to Hydra.
    """
    if flag in HYDRA_FLAGS:
        return

    name = flag.removeprefix("--").replace("-", "_")
    keys = [name] if name in _settings() else elsewhere(name)
    if keys:
        raise ConfigError(
            f"{flag} is no option: settings are written {keys[0]}=VALUE, without dashes"
        )


def compose(words: list[str]) -> Config:
    """Return the config of a command line such as ["+experiment=digits", "train.epochs=1"]."""
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return parse(hydra.compose("config", prepare(words)))


def _check_choice(word: str) -> None:
    """Refuse a part or an experiment whose name Hydra reads as a number, true, null or a list.

    Raises:
        ConfigError: for such a choice, on which Hydra would raise a ValueError or a TypeError.
    """
    key, _, value = word.partition("=")
    bare = key.lstrip("+~")

    if bare in (*PARTS, "experiment") and NO_NAME.fullmatch(value.strip()):
        raise ConfigError(f"{bare}={value}: an option is chosen by its name, such as {bare}=NAME")


def parse(values: Any) -> Config:
    """Turn Hydra's composition, or the dictionary in a checkpoint, into a `Config`.

    Args:
        values: an OmegaConf node, or nested dictionaries and lists.

    Raises:
        ConfigError: for an unknown key, a wrong type, a missing value or one out of range.
    """
    try:
        # The composed node accepts a key that was added with '+'. As plain values, it is merged
        # into a fresh schema, which refuses unknown keys.
        plain = (
            OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        )
        merged = OmegaConf.merge(OmegaConf.structured(Config), plain)

        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(
                f"nothing is chosen for {', '.join(missing)}: "
                f"pass {missing[0]}=NAME, or an experiment"
            )

        # This builds the dataclasses, whose `__post_init__` checks the ranges.
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error

    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain dictionaries, lists and scalars, for YAML and checkpoints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def to_yaml(config: Config) -> str:
    """Return the config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def override(config: Config, words: list[str]) -> Config:
    """Change settings of a config.

    Args:
        config: it stays as it is.
        words: as on the command line of `train`, such as data=coco and data.root=/data/coco.

    Returns:
        The changed config.

    Raises:
        ConfigError: for a word without '=', an unknown key or a wrong type.
    """
    base: dict[str, Any] = to_dict(config)
    changes = []

    for word in words:
        check_word(word)
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            raise ConfigError(
                f"'{word}' is not understood: write key=value, such as data.root=/data/coco"
            )
        check_key(key)

        # A part is replaced as a whole: the arguments of the old choice would not fit the new one.
        if key in PARTS:
            base[key] = option(key, value)
            continue

        try:
            changes.append(OmegaConf.from_dotlist([word]))
        except (YAMLError, RecursionError) as error:
            raise ConfigError(_not_understood(word)) from error

    try:
        return parse(OmegaConf.merge(OmegaConf.create(base), *changes))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _not_understood(word: str) -> str:
    return (
        f"'{word[:200]}' is not understood: write key=value, "
        f"and quotes around a value that holds any of [{{,:'"
    )


def option(part: str, name: str) -> dict[str, Any]:
    """Return the config node in an option file, such as data=coco; interpolations are not resolved.

    Raises:
        ConfigError: if the part has no such option.
    """
    check_option(part, name)

    node = OmegaConf.to_container(OmegaConf.load(Path(config_dir(), part, f"{name}.yaml")))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def options(part: str) -> list[str]:
    """Return the sorted names of the option files of a part, such as those that `head=` takes."""
    return sorted(path.stem for path in Path(config_dir(), part).glob("*.yaml"))


def check_option(part: str, name: str) -> None:
    """Check that a part has an option file of this name.

    Raises:
        ConfigError: if it has none; the message suggests the nearest option.
    """
    known = options(part)
    if name in known:
        return

    # A likely mistake: any model of timm is chosen by backbone.name.
    if part == "backbone" and _in_timm(name):
        raise ConfigError(
            f"backbone={name} is a model of timm: write backbone=timm backbone.name={name}"
        )
    raise ConfigError(f"{part}={name}: there is no such option{suggest(name, known)}")


def _in_timm(name: str) -> bool:
    # Imported here, because it is slow and needed for a message only.
    import timm

    return timm.is_model(name)


def check_key(key: str) -> None:
    """Check that there is a setting of this full key, such as "optim.lr"; keys inside a part pass.

    Raises:
        ConfigError: if there is none; the message suggests the nearest name.
    """
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
            candidates = " or ".join(f"'{path}'" for path in elsewhere(names[-1]))
            hint = f"; did you mean {candidates}?" if candidates else suggest(name, known)
            raise ConfigError(f"{key}: {section} has no setting '{name}'{hint}")

        kind = get_type_hints(kind)[name]


def elsewhere(name: str) -> list[str]:
    """Return the full keys of the settings that end in `name`, such as optim.lr for "lr"."""
    return [key for key in _settings() if key.rpartition(".")[2] == name]


def _settings() -> list[str]:
    """Return the full keys of the fixed settings, and of the arguments in all option files."""
    keys = []
    for item in fields(Config):
        # A section, a part, or a single setting.
        kind = get_type_hints(Config)[item.name]
        if is_dataclass(kind):
            keys += [f"{item.name}.{inner.name}" for inner in fields(kind)]
        elif item.name in PARTS:
            arguments: set[str] = set()
            for name in options(item.name):
                arguments |= option(item.name, name).keys()
            keys += [f"{item.name}.{argument}" for argument in sorted(arguments - {"_target_"})]
        else:
            keys.append(item.name)
    return keys


def diff(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs, except those in `HARMLESS`."""
    before, after = flat(old), flat(new)
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
        return f"no run is chosen: pass +experiment=NAME, one of {', '.join(experiments())}"
    if isinstance(error, OverrideParseException):
        return _not_understood(str(error.override).removeprefix("++"))

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
    return _plain_words(key, reason.strip().splitlines()[-1])


def _plain_words(key: str, reason: str) -> str:
    """Say what is wrong with a value in the terms of the command line instead of Python's."""
    for pattern, template in _PLAIN_WORDS:
        if match := re.match(pattern, reason):
            known = ", ".join(options(key)) if key in PARTS else ""
            return f"{key} {template.format(*match.groups(), key=key, options=known)}"

    # Better an unknown message as it is than none.
    return f"{key}: {reason}"


def flat(config: Config) -> dict[str, Any]:
    """Return the settings by their full keys, such as optim.lr."""
    return _flatten(to_dict(config))


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by full keys such as optim.lr."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
