"""A calibrated model whose photos have more than ten present classes, and their true names."""

import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

import hostile
import networks
import numpy as np
import torch
from pictures import picture

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes

CLASSES = 32
NAMES = [f"thing {number}" for number in range(CLASSES)]
SLOPE = 50.0  # an untrained network has nearly the same logits for all photos
SUBJECT = "{http://purl.org/dc/elements/1.1/}subject"
ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"


@dataclass(frozen=True)
class ManyClasses:
    """A checkpoint, three photos, and their scores float64 [3, K] by plain numpy."""

    checkpoint: Path
    photos: list[Path]
    scores: np.ndarray
    thresholds: np.ndarray  # float64 [K]

    def present(self, limits: np.ndarray | float) -> list[list[str]]:
        """Return the names of the classes at or above their limits, highest score first."""
        rows = []
        for scores in self.scores:
            order = np.argsort(-scores, kind="stable")
            rows.append([NAMES[k] for k in order if (scores >= limits)[k]])
        return rows


def write(folder: Path) -> ManyClasses:
    """Write a checkpoint and photos. No class of the last photo is present."""
    config = compose(hostile.WORDS)
    torch.manual_seed(0)
    parts = build.check(config, build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple(NAMES)), pretrained=False).eval()

    photos = []
    logits = []
    for seed in range(3):
        path = folder / f"{seed}.png"
        picture(64, 64, seed).save(path)
        photos.append(path)
        pixels = torch.from_numpy(np.asarray(picture(64, 64, seed)).copy()).permute(2, 0, 1)
        with torch.no_grad():
            logits.append(model(pixels[None])[0].double().numpy())
    offsets = -SLOPE * np.mean(logits, axis=0)
    scores = 1 / (1 + np.exp(-(SLOPE * np.array(logits) + offsets)))

    # Halfway between the scores of the last photo and the next higher score of the class.
    highest = np.where(scores > scores[2], scores, 1).min(0)
    thresholds = (scores[2] + highest) / 2
    calibration = {
        **asdict(networks.CALIBRATION),
        "thresholds": tuple(thresholds.tolist()),
        "slopes": (SLOPE,),
        "offsets": tuple(offsets.tolist()),
    }
    state = hostile.good()
    state["classes"]["names"] = NAMES
    state |= {"model": model.state_dict(), "ema": None, "calibration": calibration}
    torch.save(state, folder / "many.pt")
    return ManyClasses(folder / "many.pt", photos, scores, thresholds)


def keywords(photo: Path) -> list[str]:
    """Return dc:subject of the sidecar of a photo; empty without a sidecar."""
    sidecar = photo.with_name(f"{photo.name}.xmp")
    if not sidecar.exists():
        return []
    items = ElementTree.parse(sidecar).getroot().iterfind(f".//{SUBJECT}//{ITEM}")
    return [str(item.text) for item in items]
