import pickle

import numpy as np
import pytest
import torch

from mldec.data.word_vectors import nearest, read_vectors, twins
from mldec.errors import DataError

NAMES = ["sky", "dog", "sea"]
ARRAY = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def fault(*arguments, **named):
    with pytest.raises(DataError) as caught:
        read_vectors(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert "see DATASETS.md, section Word vectors" in message
    return message


# Arrays


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wordvec_array.pth", torch.from_numpy(ARRAY.T.copy())),
        ("wordvec_array.pth", torch.from_numpy(ARRAY.T.copy())[None].half()),
        ("wordvec_array.pth", {"wordvec_array": torch.from_numpy(ARRAY.T.copy())}),
        ("v.npy", ARRAY),
        ("v.npy", ARRAY.T),
        ("v.npy", ARRAY.astype(np.float64)),
    ],
    ids=["pth", "leading 1", "dict", "rows", "columns", "float64"],
)
def test_rows_follow_the_names_wherever_they_lie_in_the_file(save, name, content):
    path = save(name, content)
    found = read_vectors(path, ["sea", "sky"], order=NAMES)
    assert found.dtype == torch.float32
    assert found.tolist() == ARRAY[[2, 0]].tolist()


def test_names_may_lie_beside_the_array(save):
    path = save("v.npy", ARRAY)
    save("v.txt", "dog\nsea\nsky\n")
    assert read_vectors(path, ["sky"]).tolist() == ARRAY[[2]].tolist()
    path.with_suffix(".txt").unlink()
    assert "has no names: write them, one a line, to" in fault(path, ["sky"])


def test_counts_that_differ(save):
    assert "shape [3, 4], which does not fit 2 names" in fault(
        save("v.npy", ARRAY), ["dog"], order=["dog", "sea"]
    )
    assert "does not fit 3 names" in fault(save("x.npy", ARRAY[0]), ["dog"], order=NAMES)


def test_a_square_array_is_ambiguous(save):
    assert "rows or columns may be the names'" in fault(
        save("v.npy", np.eye(3)), ["dog"], order=NAMES
    )


@pytest.mark.parametrize(
    ("value", "text"), [(np.nan, "NaN or infinite"), (np.inf, "NaN or infinite"), (0, "all zeros")]
)
def test_vectors_that_say_nothing(save, value, text):
    array = ARRAY.copy()
    array[1] = value
    path = save("v.npy", array)
    message = fault(path, NAMES, order=NAMES)
    assert "the vector of 'dog' (1 of 3)" in message
    assert text in message
    assert read_vectors(path, ["sky", "sea"], order=NAMES).shape == (
        2,
        4,
    )  # what is not used does not matter


def test_duplicate_names(save):
    path = save("v.npy", ARRAY)
    assert "are both called 'dog'" in fault(path, ["dog", "dog"], order=NAMES)
    assert "v.npy have 'sky' twice" in fault(path, ["sky"], order=["sky", "dog", "sky"])


def test_missing_names_are_listed_up_to_ten(save):
    wanted = [f"name{number}" for number in range(12)]
    expected = "12 of 13 names have no vector: " + ", ".join(wanted[:10]) + " and 2 more"
    assert expected in fault(save("v.npy", ARRAY), [*wanted, "dog"], order=NAMES)
    assert expected in fault(save("v.vec", "dog 1 2\n"), [*wanted, "dog"])


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("suffix", [".pth", ".pickle"])
@pytest.mark.parametrize(
    "content", [Bomb(), ARRAY, {"wordvec_array": ARRAY}], ids=["code", "numpy", "dict"]
)
def test_trap_19_a_pickle_that_is_not_plain_tensors_is_refused_unread(
    tmp_path, suffix, content, capsys
):
    path = tmp_path / f"v{suffix}"
    path.write_bytes(pickle.dumps(content, protocol=2))
    assert "holds more than tensors and plain values" in fault(path, NAMES, order=NAMES)
    torch.save(content, path)
    assert "holds more than tensors and plain values" in fault(path, NAMES, order=NAMES)
    assert capsys.readouterr().out == ""


def test_a_torch_file_of_something_else(save):
    assert "holds a list where one tensor is wanted" in fault(
        save("v.pth", [1, 2]), NAMES, order=NAMES
    )
    whole = save("v.pth", torch.ones(4, 3)).read_bytes()
    assert "cannot be used (BadZipFile" in fault(save("v.pth", whole[:-90]), NAMES, order=NAMES)


def test_trap_12_text_under_the_name_of_the_vectors(save):
    message = fault(save("wordvec_array.pth", "filepath,label,split_name\n"), NAMES, order=NAMES)
    assert "the official README swaps the links of data.csv and wordvec_array.pth" in message


def test_npy_of_objects_or_damaged(save):
    assert "not a .npy file of numbers" in fault(
        save("v.npy", np.array([{}], object)), NAMES, order=NAMES
    )
    assert "not a .npy file of numbers" in fault(save("v.npy", b"hello"), NAMES, order=NAMES)
    assert "No such file" in fault(save("v.npy", b"").with_name("w.npy"), NAMES, order=NAMES)


# Tables


def test_nearest_seen_classes_by_cosine():
    vectors = torch.tensor([[2.0, 0], [0, 3], [1, 1], [5, 0.1]])
    table = nearest(["a", "b", "c", "d"], vectors, seen=[0, 1, 2], k=2)
    assert [name for name, _ in table["d"]] == ["a", "c"]
    assert table["d"][0][1] == pytest.approx(5 / np.hypot(5, 0.1))
    assert list(table) == ["d"]
    assert len(nearest(["a", "b", "c", "d"], vectors, seen=[3], k=9)["a"]) == 1


def test_twins():
    seen = ["dogs", "bus", "city", "tree", "glass"]
    unseen = ["dog", "buses", "cities", "trees", "glasses", "sea"]
    expected = [
        ("buses", "bus"),
        ("cities", "city"),
        ("dog", "dogs"),
        ("glasses", "glass"),
        ("trees", "tree"),
    ]
    assert twins(seen, unseen) == expected
    assert twins(["sky"], ["sea"]) == []


# Real files


def test_twins_of_the_official_split(sample_data):
    folder = sample_data / "nus_wide_zsl"
    seen, unseen = (
        (folder / f"{name}_sorted.txt").read_text().split() for name in ("seen_925", "unseen_81")
    )
    pairs = twins(seen, unseen)
    assert len({name for name, _ in pairs}) == 30
    assert {("dog", "dogs"), ("cars", "car"), ("clouds", "cloud")} <= set(pairs)


def test_vectors_of_the_samples(sample_data):
    folder = sample_data / "nus_wide_zsl"
    names = (folder / "classes_1006.txt").read_text().split()
    raw = np.load(folder / "wordvec_array_fasttext_300x1006.npy")
    found = read_vectors(folder / "wordvec_array_fasttext_300x1006.npy", names[::-1], order=names)
    assert found.shape == (1006, 300)
    assert torch.equal(found, torch.from_numpy(raw.T[::-1].copy()))
    assert torch.allclose(found.norm(dim=1), torch.ones(1006), atol=1e-5)
    tags = (folder / "TagList1k.txt").read_text().split()
    assert read_vectors(
        folder / "biam_glove_taglist1k_1000x300.npy", ["sky"], order=tags
    ).shape == (1, 300)


def test_the_two_orders_of_the_coco_vectors_are_joined_by_name(sample_data):
    folder = sample_data / "label_embeddings"
    alphabetical, by_id = (
        [line for line in (folder / f"coco80_{name}.txt").read_text().split("\n") if line]
        for name in ("alphabetical", "category_id_order")
    )
    assert alphabetical != by_id
    glove = read_vectors(folder / "coco80_glove_80x300.npy", by_id, order=alphabetical)
    near = nearest(by_id, glove, seen=[i for i, name in enumerate(by_id) if name != "cat"], k=1)
    assert near["cat"][0][0] == "dog"


def test_npy_files_of_odd_kinds(save):
    structure = np.zeros(3, [("a", "<f4"), ("b", "<f4")])
    assert "it holds [('a', '<f4'), ('b', '<f4')] where numbers are wanted" in fault(
        save("v.npy", structure), NAMES
    )
    assert "it holds complex64" in fault(
        save("v.npy", ARRAY.astype(np.complex64)), NAMES, order=NAMES
    )
    brackets = b"\x93NUMPY\x01\x00" + (60).to_bytes(2, "little") + b"(" * 60
    assert "is not a .npy file of numbers" in fault(save("v.npy", brackets), NAMES, order=NAMES)


def test_names_of_classes_to_look_up(save):
    assert "has the control character U+0009" in fault(save("v.txt", "sky 1 2\n"), ["sky", "d\tg"])
