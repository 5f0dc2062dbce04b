"""Names of parts and arguments in earlier versions, whose configs and checkpoints still work.

A checkpoint of version 0.1 (format 1) records only the arguments that its YAML gave. The defaults
of the others were those in `defaults_0_1.json`. They remain the defaults for these files, whatever
the signatures say today.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# Old target -> new target.
MOVED = {
    "mldec.heads.word_gap.WordGAP": "mldec.heads.WordGAP",
    "mldec.heads.word_groups.WordGroupDecoder": "mldec.heads.WordGroupDecoder",
    "mldec.losses.bce.BinaryCrossEntropy": "mldec.losses.BinaryCrossEntropy",
    "mldec.data.digits.digits": "mldec.data.digits.grey.digits",
    "mldec.data.digits.digit": "mldec.data.digits.grey.digit",
    "mldec.data.coloured_digits.coloured_digits": "mldec.data.digits.coloured.coloured_digits",
    "mldec.data.coloured_digits.digits_zsl": "mldec.data.digits.coloured.digits_zsl",
    "mldec.data.cars.cars": "mldec.data.readers.cars.cars",
    "mldec.data.cifar100.cifar100": "mldec.data.readers.cifar100.cifar100",
    "mldec.data.coco.coco": "mldec.data.readers.coco.coco",
    "mldec.data.coco_zsl.coco_zsl": "mldec.data.readers.coco_zsl.coco_zsl",
    "mldec.data.csv_table.csv_table": "mldec.data.readers.csv_table.csv_table",
    "mldec.data.folders.folders": "mldec.data.readers.folders.folders",
    "mldec.data.imagenet.imagenet": "mldec.data.readers.imagenet.imagenet",
    "mldec.data.nuswide.nuswide_zsl": "mldec.data.readers.nuswide.nuswide_zsl",
    "mldec.data.nuswide.nuswide81": "mldec.data.readers.nuswide.nuswide81",
    "mldec.data.nuswide_official.nuswide_official": (
        "mldec.data.readers.nuswide_official.nuswide_official"
    ),
    "mldec.data.openimages.openimages": "mldec.data.readers.openimages.openimages",
    "mldec.data.openimages_miil.openimages_miil": (
        "mldec.data.readers.openimages_miil.openimages_miil"
    ),
    "mldec.data.shards.shards": "mldec.data.readers.shards.shards",
    "mldec.data.vg500.vg500": "mldec.data.readers.vg500.vg500",
    "mldec.data.voc.voc": "mldec.data.readers.voc.voc",
}

# New target -> {old argument: new argument}.
RENAMED: dict[str, dict[str, str]] = {}


def renamed(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config node of a part with today's target and argument names."""
    # A node in a stranger's file may hold a target of any type; a list, say, cannot be looked up.
    old_target = node.get("_target_")
    target = MOVED.get(old_target, old_target) if isinstance(old_target, str) else old_target
    names = RENAMED.get(target, {}) if isinstance(target, str) else {}

    return {**{names.get(key, key): value for key, value in node.items()}, "_target_": target}


def completed(node: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of version 0.1 to the config node of a part in a format 1 checkpoint.

    The names stay the old ones; `renamed` translates them.
    """
    target = node.get("_target_")
    defaults = _defaults().get(target, {}) if isinstance(target, str) else {}

    return {**defaults, **node}


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Return the arguments and their defaults in version 0.1, by the old target of the part."""
    defaults = json.loads(Path(__file__).with_name("defaults_0_1.json").read_text(encoding="utf-8"))
    assert isinstance(defaults, dict)
    return defaults
