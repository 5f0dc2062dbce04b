from pathlib import Path

import hostile
import pytest

from mldec.checkpoint import load_model, published
from mldec.checkpoint.state import Checkpoint


@pytest.fixture(scope="session")
def saved():
    return Checkpoint.from_state(hostile.good(), Path("x"))


@pytest.fixture(scope="session")
def loaded(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    published.write(folder, published.with_weights(saved, "raw", folder))
    return load_model(folder)
