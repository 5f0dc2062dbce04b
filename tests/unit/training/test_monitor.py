"""What an evaluation shows, compared with numpy on all its logits; TensorBoard; trackers."""

import dataclasses
import importlib.util
import sys

import numpy as np
import pytest
import torch
from support import QUICK, in_processes, one_line
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.pr_curve.metadata import PLUGIN_NAME, parse_plugin_metadata
from tensorboard.util.tensor_util import make_ndarray

from mldec.config.compose import compose
from mldec.config.schema import Log
from mldec.data.loader import Batch
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.evaluation.output import Results
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.training import monitor
from mldec.training.log import RunLog
from mldec.training.monitor import Curve, Details, Observer, draw
from mldec.training.trackers import start_trackers

N, K = 60, 5
NAMES = ("cat", "dog", "traffic light", "a/b", "zoo")
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(N, K, generator=GENERATOR)
LABELS = torch.randint(-1, 2, (N, K), generator=GENERATOR).to(torch.int8)
LABELS[:, 3] = torch.where(LABELS[:, 3] > 0, 0, LABELS[:, 3])  # a class without a positive
IMAGES = torch.randint(255, (N, 3, 8, 6), dtype=torch.uint8, generator=GENERATOR)
CONFIG = compose(["+experiment=digits"])
AP = [10.0, 20.0, 100.0, float("nan"), 30.0]

CURVE = Curve(*(np.linspace(start, start + 1, 101) for start in range(6)))
DETAILS = Details({"val_AP/a/b": 12.5}, {"val_pr/micro": CURVE}, {"val_images": draw([])})
SECRET = "8d1f0000feed0000feed0000feed0000feed1c2b"


class Images:
    def __len__(self):
        return N


def data(exclusive=False):
    def evaluator(classes):
        if exclusive:
            return SingleLabelEvaluator(len(classes))
        return MultiLabelEvaluator(len(classes), threshold=0.6)

    split = Split(Images(), Classes(NAMES, exclusive=exclusive))
    return DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=8))


def config(*trackers, seed=0, **shown):
    """Return the settings of an evaluation, with those of what it shows, and to whom."""
    log = Log(**dict.fromkeys(trackers, True), **shown)
    return dataclasses.replace(CONFIG, seed=seed, log=log)


def observe(observer, labels=LABELS, *, rank=0, count=1, images=IMAGES):
    """Show batches of 7 images, as those that a process gets of an evaluation."""
    indices = torch.arange(N)
    batches = zip(*(part.split(7) for part in (images, labels, indices, LOGITS)), strict=True)
    for number, (pixels, targets, numbers, logits) in enumerate(batches):
        if number % count == rank:
            observer(Batch(pixels, targets, numbers), logits)
    return observer.details(Results({"mAP": 1.0}, {"AP": AP, "f1": AP}, N, [], None))


def shown(settings=CONFIG, **named):
    return observe(Observer(data(), settings), **named)


def assert_curve(curve, probabilities, labels):
    """Compare a curve with one that compares every score with every threshold."""
    positive = probabilities[..., None] >= np.arange(101) / 100
    labels = labels[..., None]
    cases = (positive & (labels == 1), positive & (labels == 0))
    cases += (~positive & (labels == 0), ~positive & (labels == 1))
    counts = np.stack([case.reshape(-1, 101).sum(0) for case in cases])

    assert np.array_equal(np.stack(curve[:4]), counts)
    true_positives, false_positives, _, false_negatives = counts
    with np.errstate(invalid="ignore"):
        precision = true_positives / (true_positives + false_positives)
    assert np.allclose(curve.precision, np.nan_to_num(precision))
    assert np.allclose(curve.recall, true_positives / (true_positives + false_negatives))


def test_curves_are_those_of_every_score_compared_with_every_threshold():
    curves = shown().curves
    probabilities, labels = LOGITS.sigmoid().double().numpy(), LABELS.numpy()
    assert_curve(curves["val_pr/micro"], probabilities, labels)

    of_classes = [curves[f"val_pr_class/{name}"] for name in NAMES if name != "a/b"]
    for curve, index in zip(of_classes, (0, 1, 2, 4), strict=True):
        assert_curve(curve, probabilities[:, index], labels[:, index])
    assert "val_pr_class/a/b" not in curves, "without a positive there is no curve"

    macro = curves["val_pr/macro"]
    assert np.allclose(macro.precision, np.mean([curve.precision for curve in of_classes], 0))
    assert np.allclose(macro.recall, np.mean([curve.recall for curve in of_classes], 0))


def test_a_class_whose_scores_are_the_same_for_all_images_is_named():
    named = []
    for exclusive in (False, True):
        observer = Observer(data(exclusive), CONFIG)
        logits = LOGITS + 40 * (torch.arange(K) == 1)
        observer(Batch(IMAGES, LABELS, torch.arange(N)), logits)
        named.append(observer.constant_classes())
    assert named == [["dog"], []]


def test_the_most_frequent_classes_have_an_ap_and_a_curve():
    details = shown(config(classes=2))
    order = sorted(range(K), key=lambda index: -int((LABELS[:, index] == 1).sum()))
    assert details.scalars == {f"val_AP/{NAMES[index]}": AP[index] for index in order[:2]}
    assert {tag for tag in details.curves if tag.startswith("val_pr_class/")} == {
        f"val_pr_class/{NAMES[index]}" for index in order[:2]
    }

    details = shown(config(classes=0, images=0))
    assert (details.scalars, details.images) == ({}, {})
    assert list(details.curves) == ["val_pr/micro", "val_pr/macro"]


def test_the_images_are_fixed_by_the_seed_and_say_what_is_right(monkeypatch):
    drawn = []
    monkeypatch.setattr(monitor, "draw", lambda examples: drawn.append(list(examples)))
    state = torch.get_rng_state()
    chosen = []
    for seed in (3, 3, 4):
        observer = Observer(data(), config(seed=seed, images=6))
        observe(observer)
        chosen.append(observer.chosen)
    assert torch.equal(torch.get_rng_state(), state), "training draws from this generator"
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == len(drawn[0]) == 6

    kinds = {(1, True): "right", (1, False): "missed", (0, True): "wrong", (-1, True): "unknown"}
    for index, (image, verdicts) in zip(chosen[0], drawn[0], strict=True):
        assert image.size == (168, 224), "8 x 6 pixels, enlarged"
        expected = []
        for name, label, score in zip(
            NAMES, LABELS[index], LOGITS[index].sigmoid().tolist(), strict=True
        ):
            if verdict := kinds.get((int(label), score > 0.6)):
                expected.append((verdict not in ("right", "missed"), -score, verdict, name))
        lines = [f"{verdict} {name} {-score:.2f}" for _, score, verdict, name in sorted(expected)]
        assert verdicts == (lines or ["no labels, no predictions"])


def test_exclusive_classes_have_the_scores_of_a_softmax_and_one_prediction(monkeypatch):
    examples = []
    monkeypatch.setattr(monitor, "draw", examples.extend)
    labels = torch.nn.functional.one_hot(torch.arange(N) % 3, K).to(torch.int8)
    details = observe(Observer(data(exclusive=True), config()), labels)
    assert_curve(details.curves["val_pr/micro"], LOGITS.softmax(1).double().numpy(), labels.numpy())
    for _, verdicts in examples:
        assert [line.split()[0] for line in verdicts] in (["right"], ["missed", "wrong"])


def _of_processes(rank, count, whole):
    details = observe(Observer(data(), config()), rank=rank, count=count)
    assert (details is None) is bool(rank)
    if details is not None:
        assert details.scalars == whole.scalars
        for tag, curve in details.curves.items():
            assert np.array_equal(np.stack(curve), np.stack(whole.curves[tag]))
        assert details.images["val_images"].tobytes() == whole.images["val_images"].tobytes()


def test_several_processes_show_the_same_as_one():
    in_processes(_of_processes, 2, shown())


def test_tensorboard_reads_what_was_written_and_drops_what_a_new_start_repeats(tmp_path):
    for step, steps in ((0, (2, 4)), (2, (3, 5))):
        log = RunLog(tmp_path, step=step)
        for step in steps:
            log.details(step, DETAILS)
        log.close()

    # What TensorBoard shows; it keeps everything as tensors.
    kinds = dict.fromkeys(("scalars", "images", PLUGIN_NAME), 0)
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"), {}, kinds)
    events.Reload()
    for tag in ("val_images", "val_pr/micro", "val_AP/a/b"):
        assert [event.step for event in events.Tensors(tag)] == [2, 3, 5], tag

    assert make_ndarray(events.Tensors("val_AP/a/b")[0].tensor_proto) == 12.5
    curve = events.Tensors("val_pr/micro")[0]
    assert np.allclose(make_ndarray(curve.tensor_proto), np.stack(CURVE))
    content = events.PluginTagToContent(PLUGIN_NAME)["val_pr/micro"]
    assert parse_plugin_metadata(content).num_thresholds == 101


class StandIn:
    """The interface that wandb and trackio share, in memory."""

    def __init__(self):
        self.rows = []
        self.opened = {}
        self.broken = False

    def init(self, **named):
        self.finish()
        self.opened = named
        return self

    def log(self, values, step=None):
        self.finish()
        self.rows.append((values, step))

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def finish(self):
        if self.broken:
            raise ConnectionError("no\nnetwork")

    def Settings(self, **named):
        return named

    def Image(self, image):
        return "image", image.size


@pytest.fixture(params=["wandb", "trackio"])
def name(request):
    return str(request.param)


@pytest.fixture
def package(name, monkeypatch):
    package = StandIn()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return package


def test_numbers_and_pictures_are_sent(name, package, tmp_path):
    log = RunLog(tmp_path, tracked=config(name))
    log.scalars(7, 1, {"val/mAP": 50.0, "val/odd": float("nan")})
    log.details(7, DETAILS)
    log.close()

    picture = "image", DETAILS.images["val_images"].size
    sent = [{"val/mAP": 50.0}, {"val_AP/a/b": 12.5, "val_images": picture}]
    if name == "wandb":
        assert package.rows == [({"step": 7, **values}, None) for values in sent]
    else:
        assert package.rows == [(values, 7) for values in sent]
    assert (package.opened["project"], package.opened["resume"]) == ("mldec", "allow")
    assert package.opened["config"]["optim"]["lr"] == 1e-2
    assert SECRET not in repr(package.opened)

    # A resumed run goes on with its record.
    records = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        start_trackers(config(name), tmp_path / folder)
        records.append(package.opened["id" if name == "wandb" else "name"])
    assert records[0] == records[1] != records[2]


@pytest.mark.parametrize("moment", ["start", "second", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(name, package, tmp_path, caplog, moment):
    package.broken = moment == "start"
    (tracker,) = start_trackers(config(name), tmp_path)
    for now in ("first", "second"):
        package.broken |= moment == now
        tracker.add(1, DETAILS)
    package.broken |= moment == "close"
    tracker.close()
    tracker.close()

    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == f"log.{name}: ConnectionError: no; training goes on, nothing more is sent"
    assert len(package.rows) == {"start": 0, "second": 1, "close": 2}[moment]


def test_a_package_that_is_not_installed_is_named_before_anything_is_written(
    cli, name, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = cli("train", *QUICK, f"log.{name}=true")
    assert status == 1
    one_line(err, f"log.{name}=true needs {name}", f"pip install -e '.[{name}]'")
    assert not list(tmp_path.rglob("*.pt"))
