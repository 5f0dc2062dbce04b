from pathlib import Path

import numpy as np
import pytest

from mldec.data.fingerprint import Fingerprint, check_same, fingerprint
from mldec.data.table import Labels, encode_paths, from_entries
from mldec.data.types import Classes, ImageFiles, LabelledImages, Split, StoredImages
from mldec.errors import CheckpointError

NAMES = ("cat", "dog", "cow")
FILES = ["a.png", "b/a.png", "b/c.png"]
POSITIVES = [[0, 2], [], [1]]


def table(
    files: list[str] = FILES,
    positives: list[list[int]] = POSITIVES,
    names: tuple[str, ...] = NAMES,
    *,
    folder: str = "/data",
    default: int = 0,
) -> Fingerprint:
    labels = from_entries(
        [dict.fromkeys(classes, 1) for classes in positives],
        num_classes=len(names),
        default=default,
    )
    images = LabelledImages(
        ImageFiles(Path(folder), encode_paths(files), see="README.md"), labels, names
    )
    return fingerprint(split(images))


def split(images: LabelledImages) -> Split:
    return Split(StoredImages(images, transform=lambda image: image), Classes(images.classes))  # type: ignore[arg-type, return-value]


def test_it_depends_on_the_table_only() -> None:
    files = ImageFiles(
        Path("/elsewhere"), encode_paths([*FILES, "a/longer/path.png"]), see="README.md"
    )
    wide = LabelledImages(
        files,
        from_entries([dict.fromkeys(classes, 1) for classes in [*POSITIVES, [0]]], num_classes=3),
        NAMES,
    ).select(np.arange(3))
    assert table() == table(folder="/other/root") == fingerprint(split(wide))
    assert table(positives=[[2, 0], [], [1]]) == table()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (table(FILES[:2], POSITIVES[:2]), "3 training images, now 2"),
        (
            table(["a.png", "b/a.png", "b/d.png"]),
            "other training images, or the same in another order",
        ),
        (table(FILES[::-1]), "other training images, or the same in another order"),
        (table(positives=[[0, 1], [], [1]]), "other labels of the same training images"),
        (table(positives=[[0], [], [1]]), "other labels"),
        (table(positives=[[0, 2], [1], []]), "other labels"),
        (table(default=-1), "other labels"),
        (table(names=("cat", "cow", "dog")), "training classes have other names"),
    ],
)
def test_every_change_is_refused_or_accepted_with_a_warning(
    changed: Fingerprint, said: str
) -> None:
    path, saved = Path("last.pt"), table()
    with pytest.raises(
        CheckpointError, match=rf"last.pt was trained on other data \(.*{said}.*data.changed=allow"
    ):
        check_same(saved, changed, path, allow=False)
    assert said in (check_same(saved, changed, path, allow=True) or "")
    assert check_same(changed, changed, path, allow=False) is None
    assert "no fingerprint" in (check_same(None, changed, path, allow=False) or "")


def test_a_large_table_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1000
    rng = np.random.default_rng(0)
    files = [f"{number}.png" for number in range(count)]
    positives = [rng.permutation(3)[: rng.integers(4)].tolist() for _ in range(count)]
    whole = table(files, positives)
    monkeypatch.setattr("mldec.data.fingerprint.ROWS", 64)
    pieces = table(files, positives)
    assert (whole.images, whole.files) == (pieces.images, pieces.files)
    positives[900] = [] if positives[900] else [1]
    assert table(files, positives).labels != pieces.labels


def test_what_equals_the_rest_may_be_stated() -> None:
    def of(labels: Labels) -> Fingerprint:
        files = ImageFiles(Path("/data"), encode_paths(FILES[:2]), see="README.md")
        return fingerprint(split(LabelledImages(files, labels, NAMES[:2])))

    stated = from_entries([{0: 1, 1: 0}, {1: 1}], num_classes=2)
    silent = from_entries([{0: 1}, {1: 1}], num_classes=2)
    assert of(stated) == of(silent)


def test_a_dataset_of_a_users_own_counts_its_images() -> None:
    class Own:
        def __len__(self) -> int:
            return 7

    own = fingerprint(Split(Own(), Classes(NAMES)))  # type: ignore[arg-type]
    assert (own.images, own.files, own.labels, len(own.classes)) == (7, "", "", 64)
