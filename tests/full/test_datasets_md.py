"""DATASETS.md speaks of options and arguments that exist, and messages of sections that it has."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from inspect import signature
from io import BytesIO
from pathlib import Path

import pytest
from readers import names
from scipy.io import savemat
from support import made, read_option
from trees import structs

from mldec.build import SHARED
from mldec.config.compose import config_dir
from mldec.data.readers import imagenet
from mldec.data.settings import VectorSettings

TEXT = (Path(__file__).parents[2] / "DATASETS.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
PACKAGE = Path(__file__).parents[2] / "mldec"


@pytest.mark.parametrize("group", ["data", "loss"])
def test_options_and_arguments_exist(group):
    options = {path.stem: read_option(path) for path in Path(config_dir(), group).glob("*.yaml")}
    named = set(re.findall(rf"\b{group}=(\w+)", TEXT))
    assert named <= set(options)
    if group == "data":
        assert named == set(options), "an option without a section"
    known = {name for part, _ in options.values() for name in signature(part).parameters}
    if group == "data":
        groups = (*SHARED, VectorSettings)
        known |= {name for kind in groups for name in signature(kind).parameters}
        known.add("changed")
    arguments = set(re.findall(rf"(?<!/)\b{group}\.(\w+)", TEXT))
    assert arguments - {"csv", "jpg", "yaml"} <= known


def test_messages_name_sections_that_are_there():
    sections = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"DATASETS.md, section (.+?)\"", path.read_text())
    }
    assert len(sections) >= 10
    assert {
        name for name in sections if not any(heading.startswith(name) for heading in HEADINGS)
    } == set()


def test_the_contents_lead_to_every_section():
    anchors = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert anchors == [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADINGS
    ]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, BytesIO(content))


def test_the_lines_that_unpack_and_sort_imagenet(tmp_path: Path) -> None:
    # The devkit's order is not that of the wnids, and it has nodes above the classes.
    synsets = [(1, "n02119789"), (2, "n01440764"), (1001, "n00001740")]
    rows = [{"ILSVRC2012_ID": number, "WNID": wnid} for number, wnid in synsets]
    devkit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    savemat(devkit / "meta.mat", {"synsets": structs(rows)})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n")
    with tarfile.open(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(devkit.parent, devkit.parent.name)
    shutil.rmtree(devkit.parent)

    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w") as archive:
        for _, wnid in synsets[:2]:
            inner = BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as of_class:
                add(of_class, f"{wnid}_7.JPEG", b"")
            add(archive, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(tmp_path / "ILSVRC2012_img_val.tar", "w") as archive:
        for number in (1, 2, 3):
            add(archive, f"ILSVRC2012_val_{number:08}.JPEG", b"")

    lines = re.search(r"```\n(mkdir train val\n.*?)```", TEXT, re.DOTALL)
    assert lines is not None
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", lines[1]], cwd=tmp_path, env={"PATH": path}, check=True)

    data = made(imagenet, root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    wnids = sorted(wnid for _, wnid in synsets[:2])
    assert names(data.train) == [f"{wnid}_7.JPEG" for wnid in wnids]
    assert data.val.dataset.labels.classes.tolist() == [0, 0, 278]
    assert names(data.val) == [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 3, 2)]
