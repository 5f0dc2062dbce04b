"""DATASETS.md documents all data options and has the sections of messages."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from readers import names
from scipy.io import savemat
from support import made
from trees import structs

from mldec.config.compose import config_dir
from mldec.data import readers

TOP = Path(__file__).parents[2]
TEXT = (TOP / "DATASETS.md").read_text(encoding="utf-8")


def test_data_options_are_documented():
    options = {path.stem for path in Path(config_dir(), "data").glob("*.yaml")}
    assert set(re.findall(r"\bdata=(\w+)", TEXT)) == options


def test_sections_in_messages_exist():
    sections = {"Word vectors"}
    sections |= {section for _, section in readers._READERS.values() if section}
    assert len(sections) >= 10
    for section in sections:
        assert re.search(rf"^## {re.escape(section)}", TEXT, re.MULTILINE), section


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, BytesIO(content))


def test_script_unpacks_imagenet(tmp_path: Path) -> None:
    # The devkit is not ordered by wnid, and it has nodes above the classes.
    synsets = [(1, "n02119789"), (2, "n01440764"), (1001, "n00001740")]
    rows = [{"ILSVRC2012_ID": number, "WNID": wnid} for number, wnid in synsets]
    devkit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    savemat(devkit / "meta.mat", {"synsets": structs(rows)})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n")
    with tarfile.open(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(devkit.parent, devkit.parent.name)
    shutil.rmtree(devkit.parent)

    wnids = ["n01440764", "n02119789"]
    with tarfile.open(tmp_path / "ILSVRC2012_img_train.tar", "w") as archive:
        for wnid in wnids:
            inner = BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as class_archive:
                add(class_archive, f"{wnid}_7.JPEG", b"")
            add(archive, f"{wnid}.tar", inner.getvalue())
    with tarfile.open(tmp_path / "ILSVRC2012_img_val.tar", "w") as archive:
        for number in (1, 2, 3):
            add(archive, f"ILSVRC2012_val_{number:08}.JPEG", b"")

    assert "scripts/unpack_imagenet.sh" in TEXT
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = TOP / "scripts" / "unpack_imagenet.sh"
    subprocess.run(["bash", script], cwd=tmp_path, env={"PATH": path}, check=True)

    data = made(readers.imagenet, root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert names(data.train) == [f"{wnid}_7.JPEG" for wnid in wnids]
    assert data.val.dataset.labels.classes.tolist() == [0, 0, 278]
    assert names(data.val) == [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 3, 2)]
