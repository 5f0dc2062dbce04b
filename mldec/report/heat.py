"""Heat maps of the images of a report: where the model looked for a class."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from mldec.checkpoint import Loaded
from mldec.data.base import DataModule, fixed_sample
from mldec.errors import ConfigError
from mldec.explain import Explainer

BATCH = 16  # images at a time


@dataclass(frozen=True)
class HeatMaps:
    """The heat maps of some pairs of an image and a class.

    Attributes:
        heats: uint8 [h, w] with 255 at the maximum; None if nothing spoke for the class.
        method: how they were made; None if they cannot be made.
        notes: why they cannot be made, if so, one sentence.
    """

    heats: list[np.ndarray | None]
    method: str | None
    notes: list[str]


def heat_maps(
    loaded: Loaded, data: DataModule, pairs: list[tuple[int, int]], *, device: torch.device
) -> HeatMaps:
    """Return the heat maps of some pairs of a validation image and a class of the data.

    Args:
        loaded: the checkpoint.
        data: the images, as the model sees them.
        pairs: indices of the image in the dataset and of the class.
        device: that computes.
    """
    heats: list[np.ndarray | None] = [None] * len(pairs)
    places: dict[int, list[int]] = defaultdict(list)
    for place, (image, _) in enumerate(pairs):
        places[image].append(place)

    # A zero-shot model is asked for the classes of the data, another one has its own order.
    classes = data.val.classes
    column_of = {name: column for column, name in enumerate(loaded.classes.names)}
    if classes.queries is not None:
        column_of = {name: column for column, name in enumerate(classes.names)}

    model, dataset = loaded.model.to(device), data.val.dataset
    try:
        explainer = Explainer(model, data.transform.image_size, classes.queries)
        images = list(places)
        for first in range(0, len(images), BATCH):
            batch = images[first : first + BATCH]
            wanted = [[column_of[classes.names[pairs[p][1]]] for p in places[i]] for i in batch]
            inputs = torch.stack([fixed_sample(dataset, index)[0] for index in batch]).to(device)
            for index, maps in zip(batch, explainer.maps(inputs, wanted), strict=True):
                for place, heat in zip(places[index], maps, strict=True):
                    heats[place] = _as_bytes(heat.numpy())
    except ConfigError as error:
        return HeatMaps([None] * len(pairs), None, [f"There are no heat maps: {error}."])
    finally:
        model.cpu()
    return HeatMaps(heats, explainer.method, [])


def _as_bytes(heat: np.ndarray) -> np.ndarray | None:
    """Return a heat map as uint8 with 255 at its maximum; None if it is zero."""
    if not heat.max() > 0:
        return None
    return np.round(255 * heat / heat.max()).astype(np.uint8)
