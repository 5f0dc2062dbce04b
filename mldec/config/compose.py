"""Create a `Config` from YAML files, a command line or a checkpoint."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from mldec.config.schema import (
    HARMLESS,
    PARTS,
    RETIRED,
    SHORT_FORMS,
    Config,
    Init,
    check_retired,
)
from mldec.config.values import escaped, hydra_value, literal, parsed
from mldec.errors import ConfigError, suggest

# Keys outside the schema: arguments of the parts, which their signatures define. OPEN_KEY also has
# the keys of mappings, which `configs/config.yaml` need not contain.
ARGUMENT = re.compile(rf"(?:{'|'.join(PARTS)})\.")
OPEN_KEY = re.compile(rf"{ARGUMENT.pattern}|(?:init|optim\.options)\.|optim\.options$")

# Flags of Hydra. Any other word with two dashes is probably meant as a setting.
FLAG = (
    r"--(help|hydra-help|version|cfg|resolve|package|run|multirun|info|config-\w+"
    r"|experimental-rerun)"
)

ConfigStore.instance().store(name="schema", node=Config)


def config_dir() -> str:
    """Return the folder of the YAML files, in an installed wheel or a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return str(installed if installed.is_dir() else package.parent / "configs")


def options(part: str, folder: str | None = None) -> list[str]:
    """Return the sorted names of the option files of a part, such as "head", in a folder."""
    return sorted(path.stem for path in Path(folder or config_dir(), part).glob("*.yaml"))


def to_hydra(words: list[str]) -> list[str]:
    """Check keys and option names of a command line, and convert it to Hydra's syntax.

    `head.num_groups=20` becomes `++head.num_groups=20`, so that the YAML need not contain the key.
    Text is quoted, because Hydra would parse it. All arguments of parts are quoted, because their
    types are only known after the composition; `parse` converts them.

    Args:
        words: Words of the command line.

    Returns:
        Flags such as --multirun, and then the settings, because Hydra's parser drops settings that
        are followed by a flag.

    Raises:
        ConfigError: If a key or an option does not exist.
    """
    words = [SHORT_FORMS.get(word, word) for word in words]
    # `init=FILE` is short for `init.path=FILE`. Hydra cannot merge text with other keys of `init`.
    if any(word.startswith("init.") for word in words):
        words = [re.sub("^init=", "init.path=", word) for word in words]
    # Other folders may have further options, which are not known here.
    adds_folder = ("--config-dir", "-cd", "hydra.searchpath")
    has_own_folder = any(word.startswith(adds_folder) for word in words)
    is_sweep = not {"-m", "--multirun"}.isdisjoint(words)

    flags = []
    settings = []
    for previous, word in pairwise(["", *words]):
        key, equals, value = word.partition("=")
        # Shells do not expand `~/` after a key.
        if value.startswith("~/"):
            value = str(Path(value).expanduser())
            word = f"{key}={value}"

        # A word without "=" is the value of a flag (--config-dir FOLDER) or a typing error. Hydra
        # reports both with a long message about its grammar.
        is_flag_value = previous.startswith("-") and "=" not in previous
        if not equals and not word.startswith(("-", "~")) and not is_flag_value:
            example = f"+experiment={word}" if word in options("experiment") else "train.epochs=3"
            raise ConfigError(f"{word}: expected key=value, such as {example}")
        if word.startswith("--") and not re.fullmatch(FLAG, key):
            raise ConfigError(f"{word}: unknown option; settings have no dashes (train.epochs=3)")
        if not equals or word.startswith("-"):
            flags.append(word)
            continue

        # Check the key, and the option if it is a single name. A sweep has several names.
        bare = key.lstrip("+~")
        if bare in ("experiment", *PARTS):
            if not has_own_folder and re.fullmatch(r"[\w.-]+", value):
                check_option(bare, value)
        elif not bare.startswith("hydra"):
            if not OPEN_KEY.match(bare):
                check_key(bare.partition("@")[0])
            hint = None if ARGUMENT.match(bare) else _schema_hint(bare)
            word = f"{key}={hydra_value(bare, value, hint, is_sweep=is_sweep)}"

        # "++" adds or overrides a key. Without it, Hydra rejects keys that the YAML does not have.
        if key == bare and OPEN_KEY.match(bare):
            word = f"++{word}"
        settings.append(word)
    return flags + settings


def compose(words: list[str]) -> Config:
    """Return the config of a command line such as ["+experiment=digits", "train.epochs=1"]."""
    return compose_with_options(words)[0]


def compose_with_options(words: list[str]) -> tuple[Config, dict[str, str]]:
    """Return the config of a command line, and the name of the option file by part."""
    try:
        with initialize_config_dir(config_dir(), version_base="1.3"):
            node = hydra.compose("config", to_hydra(words), return_hydra_config=True)
        options = dict(node.hydra.runtime.choices)
        overrides = list(node.hydra.overrides.task)
        # The rest is the config. Hydra's own settings would be unknown keys.
        with open_dict(node):
            del node.hydra
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from error
    return parse(node, overrides), options


def parse(values: DictConfig | dict[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Validate Hydra's composition, whose interpolations are resolved, or a literal dictionary.

    Args:
        values: Composed node, or the dictionary in a checkpoint.
        overrides: Words of `to_hydra` that are part of `values`. Arguments of parts in them are
            still text. They are converted to the types in the signatures of the parts.

    Raises:
        ConfigError: If a setting is unknown, missing or invalid.
    """
    try:
        plain: Any = values
        if isinstance(values, DictConfig):
            keys = {word.partition("=")[0].lstrip("+") for word in overrides}
            overridden = set(filter(ARGUMENT.match, keys))
            _drop_old_arguments(values, overridden)
            _convert_arguments(values, overridden)
            plain = OmegaConf.to_container(values, resolve=True)

        # The interpolations are resolved. A remaining `${` is text, for example in a folder name.
        plain = escaped(plain)

        # Checkpoints of older versions have settings that no longer exist.
        for key in RETIRED:
            section, _, name = key.partition(".")
            if isinstance(plain.get(section), dict):
                plain[section].pop(name, None)

        # Merge into a new schema, which raises an error for unknown keys. The composed node allows
        # unknown keys that were added with '+'.
        schema = OmegaConf.structured(Config)
        if isinstance(plain.get("init"), dict):
            schema.init = OmegaConf.structured(Init)
        # This builds the dataclasses, whose `__post_init__` checks the ranges.
        config = OmegaConf.to_object(OmegaConf.merge(schema, plain))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error

    assert isinstance(config, Config)
    return config


def _drop_old_arguments(node: DictConfig, overridden: Collection[str]) -> None:
    """Remove the arguments of a part whose `_target_` is overridden, except overridden ones.

    The option file has arguments of the old target, which the new target may not accept.
    `overridden` are full keys of arguments, such as "head.num_groups".
    """
    for part in PARTS:
        if f"{part}._target_" not in overridden:
            continue
        # Import it here, because it imports torch. The settings of all readers, such as the image
        # size, belong to the recipe and not to the old reader.
        from mldec.config.signatures import shared_settings

        kept = shared_settings() if part == "data" else set()
        with open_dict(node[part]):
            for name in set(node[part]) - kept:
                if f"{part}.{name}" not in overridden:
                    del node[part][name]


def _convert_arguments(node: DictConfig, overridden: Collection[str]) -> None:
    """Convert overridden arguments of parts from text to their types, in place.

    This is done after the composition, because the type of an argument depends on the part that is
    selected, in the YAML or in any word.
    """
    for key in overridden:
        text = OmegaConf.select(node, key)
        # The values of a sweep over range(1,4) are numbers already.
        if isinstance(text, str):
            value = literal(text, _argument_hint(node, key))
            value = parsed(f"{key}={text}") if value is None else escaped(value)
            OmegaConf.update(node, key, value, force_add=True)


def _argument_hint(node: DictConfig, key: str) -> Any:
    """Return the annotation of an argument of a part.

    An unknown argument is text, which `build.check` rejects with the nearest name. Items of a
    mapping (backbone.model_args.act_layer) have any type.
    """
    # Import it here, because it imports torch, which --help does not need.
    from mldec.config.signatures import arguments_of, locate

    part, _, name = key.partition(".")
    try:
        target = locate(part, OmegaConf.select(node, f"{part}._target_"), node.get("plugins") or ())
    except ConfigError:
        # `build.check` raises this error again, together with the errors of the other parts.
        return Any
    if "." in name:
        return Any
    hint, _ = arguments_of(part, target).get(name, (str, None))
    return hint


def _schema_hint(key: str) -> Any:
    """Return the annotation of a setting of the schema; `Any` for the options of the optimizer."""
    # The schema has `Any` for `init`, because OmegaConf does not support unions with dataclasses.
    if key == "init":
        return str | dict | None
    section, _, name = key.rpartition(".")
    sections = get_type_hints(Config) | {"": Config, "init": Init}
    kind = sections.get(section)
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    return hints.get(name, Any)


def to_dict(config: Config) -> dict[str, Any]:
    """Convert the config to dictionaries, lists and scalars, for YAML and checkpoints."""
    node = OmegaConf.create(escaped(config))
    return cast(Any, OmegaConf.to_container(node, resolve=True, enum_to_str=True))


def to_yaml(config: Config) -> str:
    """Return the config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(to_dict(config))))


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with resolved interpolations, for example the node of `option`."""
    return cast(Any, OmegaConf.to_container(OmegaConf.create(values), resolve=True))


def override(config: Config, words: list[str]) -> Config:
    """Return a new config with overrides such as ["data=coco", "data.root=/data/coco"]."""
    for word in words:
        if "=" not in word or word.startswith(("-", "~")):
            raise ConfigError(f"'{word}': expected key=value, such as data.root=/data/coco")

    node = OmegaConf.create(escaped(to_dict(config)))
    # Select options before their arguments, as Hydra does, regardless of the order of the words.
    words = sorted(to_hydra(words), key=lambda word: word.partition("=")[0] not in PARTS)
    try:
        for word in words:
            key = word.partition("=")[0].lstrip("+")
            check_key(key)
            value = parsed(word)
            # Replace the whole part: the arguments of the old option do not fit the new one.
            if key in PARTS:
                value = option(key, str(value))
            OmegaConf.update(node, key, value, merge=key not in PARTS, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    return parse(node, words)


def option(part: str, name: str) -> dict[str, Any]:
    """Return the config node of an option file, such as data=coco, with its interpolations."""
    check_option(part, name)
    file = Path(config_dir(), part, f"{name}.yaml")
    return cast(Any, OmegaConf.to_container(OmegaConf.load(file)))


def check_option(part: str, name: str) -> None:
    """Raise ConfigError if a part has no option file of this name."""
    check_retired(f"{part}={name}")
    known = options(part)
    if name not in known:
        raise ConfigError(f"{part}={name}: there is no such option{suggest(name, known)}")


def check_key(key: str) -> None:
    """Raise ConfigError if a full key, such as "optim.lr", is unknown. Skips arguments of parts."""
    check_retired(key)
    names = key.split(".")
    sections = get_type_hints(Config)
    keys = []
    for section, kind in sections.items():
        if is_dataclass(kind):
            keys += [f"{section}.{item.name}" for item in fields(kind)]

    is_open = names[0] in sections and not is_dataclass(sections[names[0]])
    if is_open or key in sections or ".".join(names[:2]) in keys:
        return

    # The same name in another section is a better suggestion than a similar spelling.
    same_name = [f"'{other}'" for other in keys if other.endswith(f".{names[-1]}")]
    if same_name:
        hint = f"; did you mean {' or '.join(same_name)}?"
    else:
        in_section = [other for other in keys if other.startswith(f"{names[0]}.")]
        hint = suggest(key, in_section or list(sections))
    raise ConfigError(f"{key}: there is no such setting{hint}")


def diff(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each changed setting, except the settings in `HARMLESS`."""
    before = flat(to_dict(old))
    after = flat(to_dict(new))
    changes = []
    for key in {**before, **after}:
        is_harmless = not HARMLESS.isdisjoint((key, key.partition(".")[0]))
        if not is_harmless and before.get(key) != after.get(key):
            changes.append(f"{key}: {before.get(key)} -> {after.get(key)}")
    return changes


def explain(error: BaseException) -> str:
    """Convert an error of OmegaConf or Hydra to one line that begins with the key, if any."""
    # The output folder contains ${name}, which every experiment sets.
    if isinstance(error, InterpolationToMissingValueError):
        return "no experiment given; pass +experiment=NAME (see --help)"

    text = str(error).partition("Config search path")[0]
    one_line = " ".join(text.split())
    if isinstance(error, OverrideParseException):
        return f"{str(error.override).removeprefix('++')}: {one_line}"

    reason, _, after_key = str(error.__cause__ or text).partition("full_key: ")
    if not after_key.strip():
        return one_line

    # Our own message for an unknown key has a suggestion.
    key = after_key.split()[0]
    try:
        check_key(key.partition("[")[0])  # without the index of a list
    except ConfigError as better:
        return str(better)
    return f"{key}: {reason.strip().splitlines()[-1]}"


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to full keys, such as "optim.lr"."""
    settings: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings
