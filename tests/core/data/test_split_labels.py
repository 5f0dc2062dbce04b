"""The labels of a split, from its table or image by image."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from mldec.data.digits import Scenes, SceneSettings, digits
from mldec.data.loader import labels_of, training_labels
from mldec.data.randomness import SampleRandom
from mldec.data.table import from_dense
from mldec.data.types import Classes, LabelledImages, Split, StoredImages

NAMES = ("thing 0", "thing 1", "thing 2")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [1, 1, 0], [-1, 0, 0]], np.int8)


class Painted:
    """Images whose labels no table holds."""

    def __init__(self, dense: np.ndarray) -> None:
        self.dense = dense

    def __len__(self) -> int:
        return len(self.dense)

    def load(self, index: int, rng: SampleRandom) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, 4, 4, dtype=torch.uint8), torch.from_numpy(self.dense[index])


def test_labels_come_from_the_table_the_target_of_a_scene_or_the_images() -> None:
    labels = from_dense(DENSE)
    images = LabelledImages([None] * len(DENSE), labels, NAMES)  # type: ignore[arg-type]
    stored: Any = StoredImages(images, transform=lambda image: pytest.fail("it was read"))
    assert labels_of(Split(stored, Classes(NAMES))) is labels

    painted: Any = Painted(DENSE)
    assert np.array_equal(labels_of(Split(painted, Classes(NAMES))).dense(), DENSE)

    # Without a seed, the target of a scene is known before it is painted.
    scenes = Scenes(
        draw=lambda rng: pytest.fail("it was painted"),
        num_images=5,
        draw_target=lambda rng: torch.tensor([0, 1, 0], dtype=torch.int8),
    )
    assert labels_of(Split(scenes, Classes(NAMES))).dense().tolist() == [[0, 1, 0]] * 5


def test_labels_of_scenes_that_are_drawn_anew_depend_on_the_seed_of_the_run_only() -> None:
    data = digits(SceneSettings(train_images=40, val_images=2))
    random.seed(5)
    state = random.getstate()
    first = training_labels(data, 1).dense()

    # The generators of the run are left as they were.
    assert random.getstate() == state

    random.seed(6)
    assert np.array_equal(training_labels(data, 1).dense(), first)
    assert not np.array_equal(training_labels(data, 2).dense(), first)
