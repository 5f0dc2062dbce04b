"""The command `mldec report`: its page, its JSON file and its errors."""

import base64
import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from support import QUICK, one_line

from mldec.backbones import TimmBackbone
from mldec.checkpoint import load_model
from mldec.tools.heat_maps import Explainer
from mldec.tools.report import content as module
from mldec.tools.report.examples import THUMBNAIL_SIDE
from mldec.tools.report.page import charts, heat_image, link, pair_chart
from mldec.tools.report.statistics import Predictions, class_pairs, weighted_counts
from mldec.tools.report.training import learning_curves, read_training
from mldec.words.digits import NAMES

PLUGIN = ["--plugin", "patches"]


@pytest.fixture
def contents(few_resamples, here, monkeypatch):
    """The contents of all reports of a test."""
    collected = []
    build_content = module.build_content

    def collect(*setups):
        collected.append(build_content(*setups))
        return collected[-1]

    monkeypatch.setattr(module, "build_content", collect)
    return collected


def evaluate(cli, path, *words):
    """Return the JSON of evaluate."""
    cli.out("evaluate", path, *PLUGIN, *words, "--json", "evaluated.json")
    return json.loads(Path("evaluated.json").read_text())


def test_report_equals_evaluate_and_compares_two_checkpoints(cli, best, digits_run, contents):
    small = ["data.val_images=90"]
    other_path = digits_run / "checkpoints" / "last.pt"
    cli.out("calibrate", best, *PLUGIN, *small, "--out", "calibrated.pt")
    files = ["--compare", other_path, "--out", "r.html", "--json", "r.json"]
    cli.out("report", "calibrated.pt", *PLUGIN, *small, *files)

    # The JSON is that of evaluate with intervals.
    [content] = contents
    own = json.loads(Path("r.json").read_text())
    expected = evaluate(cli, "calibrated.pt", *small)
    intervals = own.pop("intervals")
    per_class = own.pop("per_class")
    expected_per_class = expected.pop("per_class")
    comparison = own.pop("comparison")
    assert own == expected
    assert comparison["checkpoint"] == str(other_path)
    assert comparison["metric"] == "mAP"
    assert 0 < comparison["p_value"] <= 1
    assert intervals.keys() == {"mAP", "mAP_skip_empty", "CF1", "OF1"}
    for name, (low, high) in intervals.items():
        assert low <= own["metrics"][name] <= high or math.isclose(low, high), name
    for name, values in expected_per_class.items():
        for key, value in values.items():
            assert per_class[name][key] == pytest.approx(value), (name, key)
        assert per_class[name]["AP_low"] <= per_class[name]["AP"] <= per_class[name]["AP_high"]

    # The other checkpoint has its own thresholds.
    other_metrics = evaluate(cli, other_path, *small)["metrics"]
    for name, (_, other, gap) in content.comparison.metrics.items():
        assert other.value == pytest.approx(other_metrics[name])
        assert gap.value == pytest.approx(content.metrics[name].value - other.value)
        assert np.isnan(gap.low) or gap.low <= gap.high

    for example in content.examples:
        decisions = content.photos[example.row].decisions
        own = [one for one in decisions if one.class_index == example.class_index]
        assert [one.kind for one in own] == [example.kind]
        assert own[0].score == pytest.approx(example.score, abs=1e-4)
        assert content.photos[example.row].picture
    assert content.gallery == list(range(90))
    assert any("the metrics are optimistic" in note for note in content.notes)
    positives = content.histograms.positives.sum(1).tolist()
    assert positives == content.table.columns["positives"]

    text = Path("r.html").read_text(encoding="utf-8")
    check_offline(text)
    assert 'class="heat" src="data:image/png;base64,' in text


class Tags(HTMLParser):
    """Collects tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def check_offline(text):
    """Check that a page makes no request and runs no script in an attribute."""
    for tag, attributes in Tags(text).tags:
        assert tag not in ("link", "iframe", "base", "object")
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert str(attributes.get("href", "#")).startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name == "srcset"]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            assert str(attributes["content"]).startswith("default-src 'none'; ")
            assert "http" not in str(attributes["content"])
    assert not re.search(r"@import|url\(", text[text.index("<style>") : text.index("</style>")])


def test_heat_image_has_the_heat_as_opacity():
    address = heat_image(np.array([[0, 51, 255]], np.uint8))
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(content)) as image:
        assert np.asarray(image.getchannel("A")).tolist() == [[0, 40, 204]]


@pytest.mark.skipif(os.name == "nt", reason="the file names are not valid on Windows")
@pytest.mark.parametrize("name", ["a b#1?.jpg", "javascript:alert(1).jpg", "\udcff%20.jpg"])
def test_link_leads_from_the_folder_of_the_page_to_the_file(tmp_path, name):
    path = tmp_path / "photos" / name
    address = link(str(path), tmp_path / "reports")
    base = (tmp_path / "reports" / "r.html").as_uri()
    parts = urlsplit(urljoin(base, address))
    assert (parts.scheme, parts.query, parts.fragment) == ("file", "", "")
    assert unquote(parts.path, errors="surrogateescape") == str(path)


def test_chart_of_metrics_marks_the_best_epoch(cli, digits_run, here, contents):
    cli.out("report", digits_run, *PLUGIN, "data.val_images=40", "--out", "r.html")
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "val/mAP" in line]
    best = max(evaluations, key=lambda line: max(line["val/mAP"], line["val_raw/mAP"]))
    chart = charts(contents[0], list(NAMES))["metric-chart"]
    [mark] = chart.layout.shapes
    assert mark.x0 == mark.x1 == best["epoch"]
    assert mark.line.width > 0
    assert str(best["epoch"]) in chart.layout.annotations[0].text


@pytest.fixture
def own_photos(here):
    """Write 24 photos of noise around one of two colors, and a table without splits."""
    rng = np.random.default_rng(0)
    lines = ["path,labels"]
    Path("own").mkdir()
    for number in range(24):
        name, color = [("red", (200, 40, 40)), ("green", (40, 200, 40))][number % 2]
        pixels = rng.integers(-40, 40, (64, 64, 3)) + color + 3 * number
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(f"own/{number}.png")
        lines.append(f"{number}.png,{name}")
    Path("own/data.csv").write_text("\n".join(lines) + "\n")
    words = ["+experiment=finetune_frozen", "backbone=tiny", "data.root=own", "name=mine"]
    words += ["data.cache_dir=cache", "data.image_size=64", "train.workers=0", "device=cpu"]
    return words


@pytest.mark.parametrize(
    "settings",
    [["head.kernel=rbf"], ["head.kernel=linear", "data.val_fraction=0.25"]],
    ids=["left-out", "validation"],
)
def test_training_photos_have_the_largest_contributions(cli, own_photos, contents, settings):
    cli.out("train", *own_photos, *settings)
    cli.out("report", "outputs/mine", "--out", "r.html")
    [content] = contents
    model = load_model("outputs/mine")
    stored = np.load("outputs/mine/leave_one_out.npz")
    names = [os.fsdecode(name) for name in stored["names"][stored["fitted"]].tolist()]
    examples = stored["examples"].astype(np.float64)

    predictions = 0
    assert content.training.speaking.keys() == {example.row for example in content.examples}
    for row, speaking in content.training.speaking.items():
        path = Path(content.photos[row].name)
        tokens = model.model.backbone(model.transform(Image.open(path).convert("RGB"))[None])
        own = model.model.head.normalize(tokens[:, 0])[0].double().detach().numpy()
        kernel = examples @ own
        if settings == ["head.kernel=rbf"]:
            gamma = float(model.model.head.gamma)
            kernel = np.exp(-gamma * ((examples - own) ** 2).sum(1))
        decided = [one for one in content.photos[row].decisions if one.kind != "missed"]
        assert list(speaking) == [one.class_index for one in decided]
        for index, found in speaking.items():
            coefficients = stored["coefficients"][:, index]
            values = (kernel - kernel.mean()) * coefficients
            values[coefficients <= 0] = 0
            if path.name in names:
                values[names.index(path.name)] = 0
            # Photos with nearly equal contributions may be in another order.
            expected = [value for value in np.sort(values)[:-4:-1] if value > 0]
            own_values = [values[names.index(name)] for name, _ in found]
            assert own_values == pytest.approx(expected, rel=0.01)
            assert [value for _, value in found] == pytest.approx(expected, rel=0.01)
            predictions += len(found)
    assert predictions > 3

    # Each thumbnail is stored once.
    speaking = content.training.speaking.values()
    used = {name for own in speaking for found in own.values() for name, _ in found}
    assert content.training.thumbnails.keys() == used
    text = Path("r.html").read_text(encoding="utf-8")
    for url in content.training.thumbnails.values():
        with Image.open(urlopen(url)) as image:
            assert max(image.size) <= THUMBNAIL_SIDE
        assert text.count(json.dumps(url)) <= 2  # a photo of the gallery can be the same
    assert not [note for note in content.notes if "raining photos" in note]


def test_missing_training_photos_are_left_out_with_a_note(cli, own_photos, contents):
    cli.out("train", *own_photos, "data.val_fraction=0.25")
    run = Path("outputs/mine")
    names = np.load(run / "leave_one_out.npz")["names"].tolist()
    for name in names[1:]:
        Path("own", os.fsdecode(name)).write_bytes(b"damaged")
    cli.out("report", run, "--out", "r.html")
    assert contents[0].training.thumbnails.keys() <= {os.fsdecode(names[0])}

    # Photos with other names are other photos.
    shutil.copytree("own", "other")
    table = Path("other/data.csv")
    table.write_text(table.read_text().replace("\n0.png", "\nfirst.png"))
    Path("other/0.png").rename("other/first.png")
    cli.out("report", run, "data.root=other", "--out", "r.html")
    (run / "leave_one_out.npz").unlink()
    cli.out("report", run, "--out", "r.html")
    for content in contents[1:]:
        assert not content.training.thumbnails
        assert len([note for note in content.notes if "raining photos" in note]) == 1


def test_heat_maps_of_cached_tokens_equal_those_of_the_images(
    cli, own_photos, contents, monkeypatch
):
    gradient = ["head=csra", "train.epochs=2", "train.min_steps=null"]
    cli.out("train", *own_photos, *gradient, "data.val_fraction=0.25")
    images = []
    forward = TimmBackbone.forward

    def count(backbone, batch):
        if batch.device.type == "cpu":
            images.extend(batch)
        return forward(backbone, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TimmBackbone, "forward", count)
        cli.out("report", "outputs/mine", "--out", "r.html")
    [content] = contents
    # Folded batch norms are compared with one image, and the shift is measured with another one.
    assert len(images) == 3

    loaded = load_model("outputs/mine")
    explainer = Explainer(loaded.model, 64)
    for example in content.examples:
        image = loaded.transform(Image.open(content.photos[example.row].name).convert("RGB"))
        [[heat]] = explainer.maps(image[None], [[example.class_index]])
        if example.heat is None:
            assert heat.max() == 0
        else:
            np.testing.assert_allclose(example.heat, 255 * heat / heat.max(), atol=0.51)


def test_chart_of_pairs_compares_shares_of_annotated_images():
    # "a" is present in six images. "b" is annotated in three of them, and present in two.
    labels = np.array([[1, 1], [1, 1], [1, 0], [1, -1], [1, -1], [1, -1], [0, 1]], np.int8)
    logits = np.array([[1, 1], [1, -1], [1, -1], [1, 1], [1, 1], [1, 1], [-1, 1]], np.float32)
    predictions = Predictions(logits, labels, exclusive=False, logit_threshold=None)
    [counts] = weighted_counts(predictions, np.ones((1, 7, 1), np.float32))
    pairs = class_pairs(predictions, counts)
    [chart] = pair_chart(pairs, ["a", "b"], exclusive=False).data
    assert chart.z[0][1] == pytest.approx(100 * (1 / 3 - 2 / 3))


def test_report_lists_unreadable_images_and_resamples_partial_labels(
    cli, best, digits_run, here, contents
):
    rows = ["path,labels,negatives,split"]
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 40, 3), np.uint8)
        Image.fromarray(pixels).save(f"{number}.png")
        labels = f"{';'.join(NAMES[number % 3 :])},{';'.join(NAMES[: number % 3])}"
        rows.append(f"{number}.png,{labels},{'val' if number else 'train'}")
    Path("data.csv").write_text("\n".join(rows) + "\n")
    Path("7.png").write_bytes(b"damaged")
    settings = ["data=csv", f"data.root={here}", f"data.cache_dir={here}", "--threshold", "0.3"]
    settings += ["data.image_size=64", "--compare", best]
    cli.out("report", digits_run, *PLUGIN, *settings, "--out", "r.html")

    [content] = contents
    [message] = content.unreadable
    assert "7.png" in message
    assert content.images == 10
    assert content.table.columns["threshold"] == pytest.approx([0.3] * 10)

    # Names of images are relative to data.root.
    text = Path("r.html").read_text()
    assert re.search(r'alt="Image \d+\.png; ', text)
    assert "<li>7.png: " in text

    # The metric of tables with unknown labels has an interval and a p-value.
    name, interval = next(iter(content.metrics.items()))
    assert name == content.comparison.metric == "mAP_partial"
    assert interval.low <= interval.value <= interval.high
    assert content.comparison.p_value == 1
    assert "p = 1.0000 for the difference of mAP_partial" in text


@pytest.mark.parametrize("experiment", ["digits_single", "digits_zsl"])
def test_report_supports_single_label_and_zero_shot_data(cli, contents, experiment):
    cli.out("train", f"+experiment={experiment}", *QUICK[1:], "train.epochs=1")
    run = Path("outputs", experiment)
    cli.out("report", run, *PLUGIN, "--compare", run, "--out", "r.html")

    [content] = contents
    metrics = evaluate(cli, run)["metrics"]
    assert {name: interval.value for name, interval in content.metrics.items()} == metrics
    assert content.exclusive == (experiment == "digits_single")
    assert (content.comparison.fixed, content.comparison.broken) == (0, 0)
    if content.exclusive:
        assert np.isfinite(content.metrics["top1"].low)
        assert content.comparison.p_value == 1
    else:
        assert "zsl_mAP" in metrics


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--out", "-"], "--out"), (["--out", "r.html", "--compare", "no.pt"], "no.pt")],
)
def test_errors_come_before_the_first_image(cli, digits_run, here, monkeypatch, words, part):
    monkeypatch.setattr(module, "build_content", None)
    one_line(cli.fault("report", digits_run, *PLUGIN, *words), part)


def test_training_cost_and_curves_are_read_from_the_run(digits_run, tmp_path):
    copy = shutil.copytree(digits_run, tmp_path / "run")
    cost, curves, notes = read_training(copy)
    facts = json.loads((copy / "run.json").read_text())
    assert cost["Trainable parameters"] == f"{facts['parameters']:,}"
    assert facts["command"] in cost["Trained by"]
    assert list(curves) == ["train/loss", "val/loss", "val/mAP", "val_raw/mAP"]
    assert notes == []

    # A damaged file is a note.
    (copy / "run.json").write_text("[")
    [note] = read_training(copy)[2]
    assert "run.json" in note
    _, curves, [note] = read_training(None)
    assert curves == {}

    # Missing values are skipped.
    lines = [{"step": step, "epoch": 0, "train/loss": 1.0 * step} for step in range(3)]
    lines.append({"step": 4, "epoch": 2, "val/top1": None, "val/top5": 3.0, "val_raw/top1": 5})
    curves = learning_curves(lines)
    assert curves["train/loss"][1:] == [(0.5, 1.0), (1.0, 2.0)]  # two steps per epoch
    assert curves["val_raw/top1"] == [(2.0, 5.0)]
    assert curves.keys() == {"train/loss", "val_raw/top1"}
