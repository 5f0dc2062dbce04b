from pathlib import Path

import hostile
import pytest

from mldec.checkpoint import Checkpoint, Loaded, load_model, published


@pytest.fixture(scope="session")
def saved() -> Checkpoint:
    return Checkpoint.from_state(hostile.good(), Path("x"))


@pytest.fixture(scope="session")
def loaded(saved: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("published")
    published.write(folder, published.with_weights(saved, "raw", folder))
    return load_model(folder)
