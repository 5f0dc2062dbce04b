"""The size of the cached features, and their removal."""

import pytest

from mldec.errors import DataError
from mldec.files.cache import describe_entry
from mldec.tools.cache import sizes_of


def test_files_are_counted_once(tmp_path):
    for name in ("a.npy", "b.npy", "c.npy", "d.npy"):
        (tmp_path / name).write_bytes(bytes(1000))
    describe_entry(tmp_path, "features", "/photos", ["a.npy", "b.npy", "missing.npy"])
    describe_entry(tmp_path, "features", "/photos", ["b.npy", "c.npy"])
    sizes = sizes_of(tmp_path)
    described = sum(path.stat().st_size for path in tmp_path.glob("*.json"))
    assert sizes.pop("features  /photos") == 3000 + described
    assert list(sizes.values()) == [1000]

    (tmp_path / "x.json").write_text('{"content": 1}')
    with pytest.raises(DataError, match=r"x\.json"):
        sizes_of(tmp_path)


def test_features_and_converted_networks_are_listed_and_removed(cli, tmp_path):
    option = f"--cache-dir={tmp_path / 'cache'}"
    assert "0.0 MB in" in cli.out("cache", option)
    kept = tmp_path / "cache" / "zoo"
    for name, megabytes in (("tokens", 3), ("openvino", 14)):
        folder = tmp_path / "cache" / f"{name}-0123456789abcdef"
        describe_entry(folder, f"{name} of resnet10t", f"/photos of {name}", ["a"])
        (folder / "a").write_bytes(bytes(megabytes * 10**6))
    kept.mkdir()
    (tmp_path / "cache" / "coco-0123456789abcdef.npz").write_text("a table")

    lines = [" ".join(line.split()) for line in cli.out("cache", option).splitlines()]
    assert lines == [
        "14.0 MB openvino of resnet10t /photos of openvino",
        "3.0 MB tokens of resnet10t /photos of tokens",
        f"17.0 MB in {tmp_path / 'cache'}",
    ]
    assert "2 folders" in cli.out("cache", option, "--clear")
    assert {path.name for path in kept.parent.iterdir()} == {"zoo", "coco-0123456789abcdef.npz"}
