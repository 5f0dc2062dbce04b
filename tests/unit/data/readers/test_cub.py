"""CUB-200-2011: attributes as classes."""

import pytest
from readers import targets
from trees import CUB, CUB_ATTRIBUTES, tree


@pytest.fixture
def build(tmp_path):
    return tree("cub", tmp_path)


def expected(is_train):
    """Return the paths and the attributes of a split, read from the written tree."""
    rows = [(file, bits) for file, (in_train, bits) in CUB.items() if in_train == is_train]
    return [file for file, _ in rows], [list(map(int, bits)) for _, bits in rows]


@pytest.mark.parametrize("in_folder", [False, True])
def test_attributes_are_classes_in_the_official_split(build, in_folder):
    if in_folder:
        inner = build.root / "CUB_200_2011" / "attributes" / "attributes.txt"
        (build.root / "attributes.txt").rename(inner)
    data = build()
    assert data.train.classes.names == data.val.classes.names == tuple(CUB_ATTRIBUTES)
    for split, is_train in ((data.train, 1), (data.val, 0)):
        files, rows = expected(is_train)
        images = [split.dataset.name(index) for index in range(len(split.dataset))]
        assert images == [str(build.root / "CUB_200_2011" / "images" / file) for file in files]
        assert targets(split) == rows
