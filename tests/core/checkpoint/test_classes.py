"""Names and order of a checkpoint's classes beside those of the data."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import one_line
from torch import Tensor, nn

from mldec.checkpoint import check_classes, check_queries, load_model, scoring
from mldec.checkpoint.classes import read_class_names
from mldec.data.types import Classes, VectorOrigin
from mldec.errors import CheckpointError, DataError
from mldec.files.torch_files import read_torch, save

Cli = Callable[..., Any]
ORDER = [3, 1, 4, 9, 5, 2, 6, 8, 7, 0]  # of the ten classes in the reordered checkpoint
ABC, CAB = Classes(("a", "b", "c")), Classes(("c", "a", "b"))
QUICK = ["--plugin", "patches", "data.val_images=20", "device=cpu"]


class Fixed(nn.Module):
    """A model that gives class i of three the logit i."""

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        return torch.arange(3.0).expand(len(images), -1)


@pytest.fixture
def best(digits_run: Path) -> Path:
    return digits_run / "checkpoints" / "best.pt"


def changed(best: Path, path: Path, names: list[str] | None) -> Path:
    """Copy a checkpoint with its classes in `ORDER`, or with other names in the old order."""
    state = read_torch(best)
    if names is not None:
        state["classes"]["names"] = names
    else:
        state["classes"]["names"] = [state["classes"]["names"][index] for index in ORDER]
        for weights in (state["model"], state["ema"]):
            for name in ("head.queries", "head.pool_weight", "head.pool_bias"):
                weights[name] = weights[name][ORDER]
    save(path, state)
    return path


def evaluated(cli: Cli, path: Path, report: Path, *words: str | Path) -> tuple[str, dict[str, Any]]:
    status, out, err = cli("evaluate", path, *QUICK, "--json", report, *words)
    assert status == 0, err
    return out, json.loads(report.read_text())


def test_logits_come_in_the_order_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    images = torch.zeros(2, 3, 4, 4)
    with caplog.at_level(logging.INFO, "mldec"):
        model = scoring(Fixed(), ABC, CAB, "best.pt")
    assert model(images).tolist() == [[2, 0, 1]] * 2
    assert caplog.messages == [
        "best.pt has the classes of the data in another order: its logits are reordered"
    ]


def test_nothing_changes_in_the_same_order_or_by_word_vectors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Fixed()
    with caplog.at_level(logging.INFO, "mldec"):
        assert scoring(model, ABC, ABC, "best.pt") is model
        words = [replace(classes, queries=torch.ones(3, 7)) for classes in (ABC, CAB)]
        assert scoring(model, *words, "best.pt") is model
    assert caplog.messages == []


def test_a_resumed_run_must_have_the_same_order() -> None:
    check_queries(ABC, CAB, "last.pt")
    with pytest.raises(CheckpointError, match="number 0 is 'a' there and 'c' here"):
        check_classes(ABC, CAB, "last.pt")


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("a", "b"), r"knows 3 classes, the data has 2: choose data with its classes"),
        (
            ("a", "x", "y"),
            r"the data has no 'b' \(2 of 3\), the checkpoint no 'x'; .*--class-names",
        ),
    ],
)
def test_other_classes_are_refused(names: tuple[str, ...], part: str) -> None:
    with pytest.raises(CheckpointError, match=part):
        scoring(Fixed(), ABC, Classes(names), "best.pt")


def test_a_checkpoint_in_another_order_gives_the_same_numbers(
    cli: Cli, best: Path, tmp_path: Path
) -> None:
    out, expected = evaluated(cli, best, tmp_path / "r.json")
    assert "reordered" not in out
    path = changed(best, tmp_path / "reordered.pt", None)
    out, report = evaluated(cli, path, tmp_path / "r.json")
    assert f"{path} has the classes of the data in another order" in out
    assert report["metrics"] == pytest.approx(expected["metrics"])
    assert list(report["per_class"]) == list(expected["per_class"])
    for name, values in expected["per_class"].items():
        assert report["per_class"][name] == pytest.approx(values)


def test_names_are_written_and_given(cli: Cli, best: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    status, out, err = cli("evaluate", best, "--plugin", "patches", "--write-classes", names)
    assert status == 0, err
    assert out == f"{names}: the names of the 10 classes of {best}\n"
    assert names.read_text().splitlines()[:2] == ["zero", "one"]

    # The file gives the names back to a checkpoint that lost them.
    path = changed(best, tmp_path / "numbered.pt", [f"class {index}" for index in range(10)])
    status, _, err = cli("evaluate", path, *QUICK)
    assert status == 1
    one_line(err, "the data has no 'class 0' (10 of 10)", "--class-names FILE")
    _, expected = evaluated(cli, best, tmp_path / "r.json")
    _, report = evaluated(cli, path, tmp_path / "r.json", "--class-names", names)
    assert report["per_class"] == expected["per_class"]
    assert load_model(path, class_names=names, plugins=["patches"]).classes.names[0] == "zero"


@pytest.mark.parametrize("words", [["--json", "r.json"], ["--csv", "r.csv"], ["data.root=x"]])
def test_write_classes_evaluates_nothing(cli: Cli, words: list[str]) -> None:
    status, _, err = cli("evaluate", "no.pt", "--write-classes", "names.txt", *words)
    assert status == 1
    one_line(err, "--write-classes evaluates nothing: leave out the settings, --json, --csv and")


def test_names_are_read_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffa b\r\n c\u00e9 \r\nd".encode())
    assert read_class_names(path) == ("a b", " c\u00e9 ", "d")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the name '' of class 0 is empty"),
        ("a\n\nb\n", "the name '' of class 1 is empty"),
        ("a\nb\n\n", "the name '' of class 2 is empty"),
        ("a\nb\na\n", "the classes 0 and 2 are both called 'a'"),
        ("a\tb\n", "has the control character U+0009"),
    ],
)
def test_a_bad_file_of_names_is_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_class_names(path)
    message = str(caught.value)
    assert message.startswith(f"--class-names {path}: ")
    assert part in message
    assert message.endswith("; write one class name per line, in the checkpoint's order")


def test_bad_names_end_in_one_line(cli: Cli, best: Path, tmp_path: Path) -> None:
    # The file is read first: there is no checkpoint yet.
    status, _, err = cli("evaluate", "no.pt", "--class-names", tmp_path / "none.txt")
    assert status == 1
    one_line(err, "none.txt cannot be read (No such file or directory)")

    (tmp_path / "names.txt").write_text("a\nb\n")
    words = ["--plugin", "patches", "--class-names", tmp_path / "names.txt"]
    for command, more in (("evaluate", []), ("predict", [tmp_path])):
        (tmp_path / "x.png").touch()
        status, _, err = cli(command, best, *words, *more)
        assert status == 1
        one_line(err, "best.pt has 10 classes, the file names 2; write one class name per line")


PATH = Path("x.pt")
NAMES = ("a", "b", "c")


def words(names: tuple[str, ...] = NAMES, width: int = 5, seed: int = 0) -> Classes:
    """Return classes with word vectors."""
    generator = torch.Generator().manual_seed(seed)
    return Classes(names, queries=torch.randn(len(names), width, generator=generator))


@pytest.mark.parametrize(
    ("current", "fault"),
    [
        (Classes(NAMES), None),
        (Classes(NAMES, exclusive=True), None),
        (Classes(("a", "b")), "x.pt knows 3 classes, the data has 2: choose data with its classes"),
        (
            Classes(("a", "c", "b")),
            "x.pt has other classes than the data: number 1 is 'b' there and 'c' here",
        ),
    ],
)
def test_a_closed_set_has_the_same_classes_in_the_same_order(
    current: Classes, fault: str | None
) -> None:
    if fault is None:
        check_classes(Classes(NAMES), current, PATH)
        return
    with pytest.raises(CheckpointError) as caught:
        check_classes(Classes(NAMES), current, PATH)
    assert str(caught.value) == fault


def test_a_zero_shot_model_scores_any_classes_that_have_vectors_of_its_width() -> None:
    for current in (words(), words(("x", "y")), words(("x", "y"), seed=1)):
        check_queries(words(), current, PATH)


def test_vectors_of_another_source_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    origin = VectorOrigin("glove.txt", "0123456789ab" + "0" * 52)
    for trained, then in (
        (words(), r"choose the vectors of its training$"),
        (replace(words(), origin=origin), r"training, glove\.txt \(sha256 0123456789ab\)$"),
    ):
        message = r"^x\.pt was trained with other word vectors: those of 3 classes .* such as 'a', "
        with pytest.raises(CheckpointError, match=f"{message}have a mean cosine of 0.*{then}"):
            check_queries(trained, words(NAMES, seed=1), PATH)

    # One common name suffices, wherever it stands.
    assert words().queries is not None
    common = Classes(("z", "c"), queries=words().queries[[0, 2]])
    check_queries(words(), common, PATH)
    with pytest.raises(CheckpointError, match="those of 1 classes that both know, such as 'c'"):
        check_queries(words(), replace(common, names=("c", "z")), PATH)
    assert not caplog.messages


def test_other_prompts_are_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    queries = words().queries
    assert queries is not None
    near = replace(words(), queries=queries + 0.3 * torch.ones_like(queries))
    check_queries(words(), near, PATH)
    assert "differ a little from those of its training, with a mean cosine of 0.9" in caplog.text
    caplog.clear()

    # Rounding is no difference, and neither is length.
    check_queries(words(), replace(words(), queries=3 * queries.half()), PATH)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("current", "given"),
    [(Classes(NAMES), "none"), (words(width=4), "vectors of 4 numbers")],
)
def test_other_vectors_are_refused_with_both_widths(current: Classes, given: str) -> None:
    message = f"x.pt asks by word vectors of 5 numbers, the data has {given}: choose the vectors"
    with pytest.raises(CheckpointError, match=message):
        check_queries(words(), current, PATH)


def test_a_run_goes_on_with_the_same_vectors_only() -> None:
    check_classes(words(), words(), PATH)
    queries = words().queries
    assert queries is not None
    check_classes(words(), replace(words(), queries=queries + 1e-6), PATH)
    with pytest.raises(CheckpointError, match="of other word vectors"):
        check_classes(words(), replace(words(), queries=queries[:, :4]), PATH)
    with pytest.raises(CheckpointError, match=r"x\.pt is of other word vectors .*data\.vectors"):
        check_classes(words(), words(seed=1), PATH)
