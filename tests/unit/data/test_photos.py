"""Names of files that are no photos of the user, and photos by their names."""

import pytest
from readers import names, write_picture
from trees import tree

from mldec.data.photos import PhotoFinder, is_junk
from mldec.errors import DataError


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.jpg", False),
        ("./a/../b.jpg", False),
        ("./._b.jpg", True),
        ("a/.b/c.jpg", True),
        ("a/$recycle.bin/c.jpg", True),
        ("recycle/c.jpg", False),
        ("@home/c.jpg", False),
        ("My.photoslibrary/originals/0/c.jpg", False),
        ("My.photoslibrary/resources/c.jpg", True),
        ("Old.photolibrary/Masters/c.jpg", False),
        ("My.cocatalog/Cache/Thumbnails/c.jpg", True),
        ("My.cocatalog/Originals/c.jpg", False),
    ],
)
def test_path_is_judged_by_all_its_parts(path, expected):
    assert is_junk(path) == expected


def test_photo_is_found_by_its_name_or_by_its_only_stem(tmp_path):
    for name in ("a/1.JPG", "a/2.jpg", "a/2.png", "a/3.jpg", "a/3", "a/4.jpg.png", "a/._5.jpg"):
        write_picture(tmp_path / "x.jpg")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x.jpg").rename(tmp_path / name)
    (tmp_path / "a" / "6.jpg").mkdir()
    (tmp_path / "a" / "7.jpg").symlink_to("7.jpg")
    finder = PhotoFinder(tmp_path)
    found = {
        name: finder.find(f"a/{name}", "x") for name in ("1", "2.png", "3", "3.jpg", "._5.jpg")
    }
    assert found == {
        "1": "a/1.JPG",
        "2.png": "a/2.png",
        "3": "a/3",
        "3.jpg": "a/3.jpg",
        "._5.jpg": "a/._5.jpg",
    }
    for name in ("4", "4.jpg", "5", "._5", "6", "7", "8/9", "\ud800", "x" * 300):
        assert finder.find(f"a/{name}", "x") is None
    with pytest.raises(DataError, match=r"^data\.csv, row 3: 'a/2' may be 2\.jpg or 2\.png"):
        finder.find("a/2", "data.csv, row 3")


def test_photos_below_a_folder_are_found_ignoring_case(tmp_path):
    for name in ("a/IMG_1.JPG", "b/x.png", "c/X.png"):
        (tmp_path / name).parent.mkdir()
        write_picture(tmp_path / name)
    finder = PhotoFinder(tmp_path)
    assert finder.find_below("img_1.jpg", "x") == "a/IMG_1.JPG"
    assert finder.find_below("A/img_1", "x") == "a/IMG_1.JPG"
    assert finder.find_below("x.png", "x") == "b/x.png"
    with pytest.raises(DataError, match=r"'x\.PNG' may be "):
        finder.find_below("x.PNG", "x")


def test_list_of_yolo_may_leave_out_the_suffix(tmp_path):
    build = tree("yolo", tmp_path)
    text = (build.root / "data.yaml").read_text().replace("../train/images", "train.txt")
    (build.root / "data.yaml").write_text(text)
    (build.root / "train.txt").write_text("train/images/b\n./train/images/c/d.rf.0f\n")
    assert names(build().train) == ["b.PNG", "d.rf.0f.jpg"]
