"""From uploaded bytes to scores and heat maps."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from clip_towers import CLIP, write_folder
from pictures import picture

from mldec.clip import TextEncoder
from mldec.data.base import Classes
from mldec.data.images import read_image
from mldec.data.zero_shot.word_vectors import word_vectors
from mldec.demo import answering
from mldec.demo.answering import Answerer, Photo, ranked, stored_or
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.explain import Explainer
from mldec.inference.engine import ExportedEngine, TorchEngine
from mldec.inference.scoring import scores

Make = Callable[..., Photo]


def test_scores_are_those_of_the_model_whatever_is_between_the_photos(
    engine: TorchEngine, photo: Make
) -> None:
    photos = [photo(seed) for seed in range(6)]
    photos.insert(2, Photo("notes.jpg", b"text"))
    answers = Answerer(engine).answer(photos)
    assert [answer.name for answer in answers.photos] == [photo.name for photo in photos]
    for sent, answer in zip(photos, answers.photos, strict=True):
        if sent.name == "notes.jpg":
            assert answer.fault is not None
            continue
        image = engine.transform(read_image(sent.name, sent.content))
        torch.testing.assert_close(answer.scores, scores(engine.loaded, image[None])[0])
        assert answer.fault is None
        assert answer.seen == (0, 0, 40, 30)
        assert answer.picture is not None
        assert answer.picture.size == (40, 30)
    assert answers.size > sum(answer.picture is not None for answer in answers.photos) * 40 * 30 * 3


def test_each_bad_file_gets_an_answer_in_one_line(
    engine: TorchEngine, bad_files: dict[str, bytes]
) -> None:
    for reason, content in bad_files.items():
        [answer] = Answerer(engine).answer([Photo("photo.jpg", content)]).photos
        assert answer.fault is not None
        assert reason in answer.fault
        assert "\n" not in answer.fault


def test_a_narrow_photo_is_refused(engine: TorchEngine, photo: Make) -> None:
    loaded = networks.loaded("gap", crop=0.9)
    [answer] = Answerer(TorchEngine(loaded)).answer([photo(0, 200_000, 1)]).photos
    assert answer.fault is not None
    assert "pixels" in answer.fault


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\photos\\cat.jpg", "cat.jpg"),
        ("", "photo"),
        ("a\nb\x1b[2J.jpg", "a?b?[2J.jpg"),
        ("/", "photo"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_name_is_a_text_and_no_path(
    engine: TorchEngine, name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of this name tells nothing to a stranger.
    monkeypatch.chdir(tmp_path)
    (tmp_path / shown).mkdir()
    [answer] = Answerer(engine).answer([Photo(name, b"text")]).photos
    assert answer.name == shown
    assert answer.fault is not None
    assert answer.fault.startswith("not an image, or none of JPEG")


def test_the_number_of_photos_has_bounds(engine: TorchEngine, photo: Make) -> None:
    with pytest.raises(DataError, match="no photo: pass at least one"):
        Answerer(engine).answer([])
    with pytest.raises(DataError, match="17 photos: pass at most 16 at a time"):
        Answerer(engine).answer([photo()] * 17)


def test_scores_that_are_not_finite_are_a_fault(photo: Make) -> None:
    loaded = networks.loaded("gap")
    with torch.no_grad():
        next(loaded.model.head.parameters()).fill_(torch.nan)
    [answer] = Answerer(TorchEngine(loaded)).answer([photo()]).photos
    assert answer.fault == "its scores are not finite"


def test_heat_maps_are_those_of_the_explainer_over_what_the_model_saw(photo: Make) -> None:
    loaded = networks.loaded("full", crop=0.8)
    answerer = Answerer(TorchEngine(loaded))
    answers = answerer.answer([photo(3, 60, 30)])
    [answer] = answers.photos
    assert answer.seen == pytest.approx(loaded.transform.visible_part((60, 30)))
    assert answer.picture is not None
    assert answer.picture.width == pytest.approx(answer.picture.height, abs=1)

    maps = answerer.heat(answers, 0, [5, 2])
    image = loaded.transform(picture(60, 30, 3))[None]
    [expected] = Explainer(loaded.model, 32).maps(image, [[5, 2]])
    np.testing.assert_allclose(maps, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert answerer.heat(answers, 0, [2])[0] is maps[1], "made once"
    assert answerer.method(answers) == Explainer(loaded.model, 32).method


def test_an_exported_file_has_scores_but_no_heat_maps(
    exported: ExportedEngine, photo: Make
) -> None:
    answerer = Answerer(exported)
    answers = answerer.answer([photo(1)])
    expected = scores(networks.loaded("groups"), exported.transform(picture(40, 30, 1))[None])[0]
    torch.testing.assert_close(answers.photos[0].scores, expected)
    assert answers.photos[0].pixels is None, "not kept without use"
    assert not answerer.explains
    with pytest.raises(ConfigError, match="an exported file has no heat maps"):
        answerer.heat(answers, 0, [1])


def test_a_zero_shot_model_scores_the_classes_that_are_typed(
    zero_shot: TorchEngine, photo: Make, vectors: str
) -> None:
    answerer = Answerer(zero_shot, vectors)
    assert answerer.takes_classes
    own = answerer.answer([photo(1)])
    assert len(own.photos[0].scores) == networks.CLASSES

    typed = answerer.answer([photo(1)], " umbrella, zebra,")
    assert typed.engine.classes.names == ("umbrella", "zebra")
    queries = torch.tensor([[0.0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    image = zero_shot.transform(picture(40, 30, 1))[None]
    expected = zero_shot.loaded.model(image, queries).sigmoid()[0]
    torch.testing.assert_close(typed.photos[0].scores, expected)

    again = answerer.again(own, "umbrella,zebra")
    torch.testing.assert_close(again.photos[0].scores, expected)
    assert again.engine is typed.engine, "the file is read once"
    [map] = answerer.heat(again, 0, [1])
    assert map.shape == (32, 32)
    assert len(answerer.again(again, "").photos[0].scores) == networks.CLASSES


def test_typed_classes_by_the_text_encoder_of_the_training(
    photo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tower = {**CLIP, "embed_dim": networks.WIDTH}
    source = f"clip:{write_folder(tmp_path / 'tower', tower, {})}"
    loaded = networks.loaded("words")
    names, queries, origin = word_vectors(source, loaded.classes.names, keep=False)
    classes = Classes(names, queries=queries, origin=origin)
    engine = TorchEngine(replace(loaded, classes=classes))

    answerer = Answerer(engine)
    assert answerer.takes_classes
    typed = answerer.answer([photo(1)], "umbrella, zebra").photos[0].scores
    image = engine.transform(picture(40, 30, 1))[None]
    vectors = TextEncoder.open(source).encode(["a photo of a umbrella.", "a photo of a zebra."])
    torch.testing.assert_close(typed, loaded.model(image, vectors).sigmoid()[0])
    assert not (tmp_path / "cache" / "mldec").exists(), "nothing that is typed is written"


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("unicorn", "unicorn"),
        (",,", "names no class"),
        ("zebra,zebra", "zebra"),
        (",".join(f"c{number}" for number in range(1001)), "1,001 classes: name at most 1,000"),
    ],
)
def test_wrong_classes_are_one_line(
    zero_shot: TorchEngine, photo: Make, vectors: str, typed: str, reason: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=reason):
        Answerer(zero_shot, vectors).answer([photo()], typed)


def test_classes_need_a_zero_shot_model_and_vectors_of_its_width(
    engine: TorchEngine, zero_shot: TorchEngine, photo: Make, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="it is no zero-shot model"):
        Answerer(engine).answer([photo()], "zebra")
    with pytest.raises(ConfigError, match=r"start mldec\.demo with --vectors FILE"):
        Answerer(zero_shot).answer([photo()], "zebra")
    assert not Answerer(zero_shot).takes_classes

    path = tmp_path / "wide.txt"
    path.write_text("zebra 1 2 3\n")
    with pytest.raises(CheckpointError, match="3 numbers"):
        Answerer(zero_shot, str(path)).answer([photo()], "zebra")


def test_only_the_last_lists_of_classes_are_kept(
    zero_shot: TorchEngine, photo: Make, vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "CLASS_LISTS", 1)
    answerer = Answerer(zero_shot, vectors)
    first = answerer.answer([photo()], "zebra").engine
    assert answerer.answer([photo()], "zebra").engine is first
    answerer.answer([photo()], "umbrella")
    assert answerer.answer([photo()], "zebra").engine is not first


def test_one_request_at_a_time(
    engine: TorchEngine, photo: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    answerer, inside, most = Answerer(engine), threading.Semaphore(1), []
    answer = engine.answer

    def watched(*args: object, **options: object) -> object:
        most.append(inside.acquire(blocking=False))
        try:
            return answer(*args, **options)  # type: ignore[arg-type]
        finally:
            inside.release()

    monkeypatch.setattr(engine, "answer", watched)
    threads = [threading.Thread(target=answerer.answer, args=([photo(n)],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [True] * 8


def test_thresholds_are_those_of_the_model_or_of_the_user(
    engine: TorchEngine, zero_shot: TorchEngine
) -> None:
    own = stored_or(engine, None)
    assert own is not None
    assert own.tolist() == pytest.approx(networks.CALIBRATION.thresholds)
    same = stored_or(engine, 0.25)
    assert same is not None
    assert same.tolist() == [0.25] * networks.CLASSES
    default = stored_or(zero_shot, None)
    assert default is not None
    assert default.tolist() == [0.5] * networks.CLASSES
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="is not a number from 0 to 1"):
            stored_or(engine, wrong)


def test_classes_are_ranked_with_their_decisions(engine: TorchEngine) -> None:
    values = torch.tensor([0.1, 0.9, 0.4, 0.9, 0.5, 0.3, 0.2])
    thresholds = torch.tensor([0.0, 0.95, 0.4, 0.5, 0.6, 0.3, 0.9])
    named = ranked(engine, values, thresholds)
    assert [item.index for item in named] == [1, 3, 4, 2, 5, 6, 0]
    assert [item.present for item in named] == [False, True, False, True, True, False, True]
    assert named[0].name == "thing 1"
    assert (named[0].score, named[0].threshold) == (pytest.approx(0.9), pytest.approx(0.95))


def test_with_one_label_the_most_probable_class_is_present() -> None:
    engine = TorchEngine(networks.loaded("gap", exclusive=True))
    assert stored_or(engine, 0.9) is None
    named = ranked(engine, torch.tensor([0.1, 0.3, 0.3, 0.1, 0.1, 0.05, 0.05]), None)
    assert [item.present for item in named] == [True] + [False] * 6
    assert {item.threshold for item in named} == {None}
