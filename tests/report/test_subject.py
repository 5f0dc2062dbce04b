import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mldec import report
from mldec.data.base import Classes
from mldec.errors import ConfigError, DataError
from mldec.report import subject as module
from mldec.report.subject import Subject, prepare, prepare_other


def arguments(run: Path, *words: str) -> argparse.Namespace:
    return report.parser().parse_intermixed_args(
        [str(run), "--plugin", "patches", "data.val_images=20", "--out", "r.html", *words]
    )


def test_the_thresholds_are_those_of_the_command_line(digits_run: Path) -> None:
    subject = prepare(arguments(digits_run, "--threshold", "0.75"))
    assert subject.thresholds == [0.75]
    assert subject.threshold_notes == ["The threshold is 0.75, as the command line says."]
    lowest = subject.evaluator().logit_threshold  # type: ignore[attr-defined]
    assert torch.sigmoid(lowest).tolist() == pytest.approx([0.75])

    subject = prepare(arguments(digits_run, "data.threshold=0.6"))
    assert subject.thresholds is None
    assert "data.threshold" in subject.threshold_notes[0]
    lowest = subject.evaluator().logit_threshold  # type: ignore[attr-defined]
    assert torch.sigmoid(torch.tensor(lowest)).item() == pytest.approx(0.6)


def test_an_evaluator_without_thresholds_takes_none(digits_run: Path) -> None:
    subject = prepare(arguments(digits_run, "--threshold", "0.75"))
    other = replace(subject, data=replace(subject.data, make_evaluator=lambda _: object()))
    with pytest.raises(ConfigError, match="takes no thresholds"):
        other.evaluator()


def test_images_that_cannot_be_read_do_not_end_a_report(digits_run: Path) -> None:
    assert prepare(arguments(digits_run)).data.bad_images == "skip"


def test_without_a_readable_image_there_is_no_report(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object, **__: object) -> object:
        return module.Scores(*torch.zeros(3, 0).numpy(), ["a.png is damaged"])

    monkeypatch.setattr(module, "all_scores", nothing)
    with pytest.raises(DataError, match=r"no validation image can be scored: a\.png is damaged"):
        prepare(arguments(digits_run)).scores()


def test_models_of_one_and_of_several_labels_are_not_compared(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(digits_run, "--compare", str(digits_run))
    subject = prepare(args)
    assert isinstance(prepare_other(args, subject), Subject)

    exclusive = Classes(subject.loaded.classes.names, exclusive=True)
    single = replace(subject, loaded=replace(subject.loaded, classes=exclusive))
    with pytest.raises(ConfigError, match="one of the models is for one label per image"):
        prepare_other(args, single)
