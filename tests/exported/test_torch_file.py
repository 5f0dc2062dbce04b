"""Files of torch.export."""

import zipfile
from pathlib import Path

import networks
import pytest
import torch
from networks import CALIBRATION, metadata, noise

from mldec.errors import CheckpointError
from mldec.export.program import Program, traced
from mldec.exported.metadata import read_metadata
from mldec.exported.torch_file import TorchFile, content


def test_it_answers_as_the_program(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    loaded = networks.loaded("gap", calibration=CALIBRATION)
    program = Program(loaded, [0.5])
    path.write_bytes(content(traced(program, loaded, "x.pt"), metadata()))

    opened = TorchFile(path)
    assert opened.metadata == read_metadata(path) == metadata()
    for images in (noise(1), noise(4)):
        with torch.no_grad():
            expected = program(images)
        for answer, wanted in zip(opened(images), expected, strict=True):
            assert torch.equal(answer, wanted)
    with pytest.raises(CheckpointError, match=r"x\.pt2 fails in torch: "):
        opened(noise(1).float())


def test_a_file_without_a_graph_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/extra/mldec.json", metadata().to_json())
    with pytest.raises(CheckpointError, match=r"torch does not load .*x\.pt2"):
        TorchFile(path)
