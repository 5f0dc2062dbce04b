"""The command from a checkpoint to a page, on data of each kind, and what it refuses."""

import base64
import importlib.util
import io
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import CONFIGS, QUICK, one_line

from mldec.files.run_folder import folder_of_run
from mldec.tools.report import make
from mldec.tools.report.make import to_dict
from mldec.tools.report.page import page
from mldec.tools.report.training import learning_curves, of_run

WORDS = ["--plugin", "patches"]


@pytest.fixture
def squares(cli, tmp_path):
    """A run on a fold of squares of mixed colours, of which one file is damaged."""
    rng = np.random.default_rng(0)
    root = tmp_path / "mine"
    root.mkdir()
    rows = ["path,labels,split"]
    for number in range(60):
        shown = rng.random(3) < 0.4
        pixels = 200 * shown + rng.integers(0, 50, (20, 40, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        labels = [name for name, is_shown in zip("rgb", shown, strict=True) if is_shown]
        rows.append(f"{number}.png,{';'.join(labels)},train")
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    (root / "7.png").write_bytes(b"damaged")

    words = [word for word in QUICK if not word.startswith(("data.", "head.", "--config"))]
    cli.out(
        "train",
        *words,
        f"--config-dir={CONFIGS}",
        *("head=gap", "loss=bce", "data=csv", f"data.root={root}", f"data.cache_dir={tmp_path}"),
        *("data.fold=1/2", "data.image_size=16", "data.augment=none", "data.cutout=0"),
        *("data.bad_images=skip", "name=squares", "data.test_crop=0.5"),
    )
    return tmp_path / "outputs" / "squares"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def contents(few_resamples, monkeypatch):
    """What the reports of a test say, while it writes them."""
    written = []
    gather = make.gather

    def keep(*subjects):
        written.append(gather(*subjects))
        return written[-1]

    monkeypatch.setattr(make, "gather", keep)
    return written


def evaluated(cli, path, *words):
    """Return the JSON of evaluate."""
    cli.out("evaluate", path, *WORDS, *words, "--json", "evaluated.json")
    return json.loads(Path("evaluated.json").read_text())


def test_a_report_on_a_run_and_its_comparison(cli, best, digits_run, contents):
    small = ["data.val_images=90"]
    assert cli("calibrate", best, *WORDS, *small, "--out", "calibrated.pt")[0] == 0
    words = [*small, "--compare", digits_run / "checkpoints" / "last.pt"]
    words += ["--out", "r.html", "--json", "r.json"]
    out = cli.out("report", "calibrated.pt", *WORDS, *words)
    assert re.search(r"^r.html: a report on calibrated.pt, \d+\.\d MB, made in \d+ s$", out, re.M)

    # The JSON is that of evaluate with intervals, and the other model is at its own thresholds.
    [content] = contents
    ours, theirs = json.loads(Path("r.json").read_text()), evaluated(cli, "calibrated.pt", *small)
    intervals = ours.pop("intervals")
    text = Path("r.html").read_text()
    assert f'<p class="verdict">mAP {ours["metrics"]["mAP"]:.2f} % (95 % interval: ' in text
    title = f"digits compared with {digits_run / 'checkpoints' / 'last.pt'}"
    assert f"<h1>{title}: 10 classes, 90 images</h1>" in text
    better = re.search(r"(Neither is better beyond|[AB] has the better mAP)", text)
    assert better is not None
    assert (better[1][0] == "N") == (content.comparison.p_value >= 0.05)
    per_class, expected = ours.pop("per_class"), theirs.pop("per_class")
    assert ours == theirs
    assert intervals.keys() == {"mAP", "mAP_skip_empty", "CF1", "OF1"}
    for name, (low, high) in intervals.items():
        assert low <= ours["metrics"][name] <= high or math.isclose(low, high), name
    for name, values in expected.items():
        for key, value in values.items():
            assert per_class[name][key] == pytest.approx(value), (name, key)
        assert per_class[name]["AP_low"] <= per_class[name]["AP"] <= per_class[name]["AP_high"]
    others = evaluated(cli, digits_run / "checkpoints" / "last.pt", *small)["metrics"]
    for name, (_, other, gap) in content.comparison.metrics.items():
        assert other.value == pytest.approx(others[name])
        assert gap.value == pytest.approx(content.metrics[name].value - other.value)
        assert np.isnan(gap.low) or gap.low <= gap.high
    notes = " ".join(content.notes)
    assert "fitted on these images" in notes
    assert "on images outside the fit their calibration error is" in notes
    assert "Train anew: " not in Path("r.html").read_text()
    assert not any("mldec calibrate" in str(step.command) for step in content.steps)

    # Images by class, each with a place where the model looked.
    assert content.heat_method
    assert any(example.heat is not None for example in content.examples)
    for example in content.examples:
        name = content.table.names[example.class_index]
        shows_it = name in content.pictures[example.row].labels
        assert shows_it == (example.kind != "wrong")
    assert content.histograms.positives.sum(1).tolist() == content.table.columns["positives"]
    check_page(content, Path("r.html").read_text(encoding="utf-8"))


def test_a_report_of_views_has_the_numbers_of_evaluate(cli, best, contents):
    words = ["data.val_images=20", "--views", "scales"]
    cli.out("report", best, *WORDS, *words, "--out", "r.html", "--json", "r.json")
    ours, theirs = json.loads(Path("r.json").read_text()), evaluated(cli, best, *words)
    single = evaluated(cli, best, *words[:1])
    assert ours["views"] == theirs["views"] == "scales"
    assert ours["metrics"] == theirs["metrics"] != single["metrics"]
    assert "views" not in single
    assert contents[0].summary["Image size"] == "96 pixels, two views (--views scales)"


class Tags(HTMLParser):
    """Collect tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def check_page(content, text):
    """A page is one file that asks for nothing; its numbers and pictures are in a block of JSON."""
    for tag, attributes in Tags(text).tags:
        assert tag not in ("link", "iframe", "base", "object")
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert str(attributes.get("href", "#")).startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name == "srcset"]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            assert str(attributes["content"]).startswith("default-src 'none'; ")
            assert "http" not in str(attributes["content"])
    assert not re.search(r"@import|url\(", text[text.index("<style>") : text.index("</style>")])

    [address, *_] = re.findall(r'class="heat" src="data:image/png;base64,([^"]+)"', text)
    [heat, *_] = [one.heat for one in content.examples if one.heat is not None]
    with Image.open(io.BytesIO(base64.b64decode(address))) as image:
        opacity = np.asarray(image.getchannel("A"))
    assert np.abs(opacity - 0.8 * heat).max() <= 1


def test_a_fold_of_files_with_a_damaged_one(cli, squares, contents):
    for words in (["data.fold=2/2"], ["--threshold", "0.3"]):
        cli.out("report", squares, *WORDS, *words, "--out", "r.html")
    [message] = contents[0].unreadable + contents[1].unreadable
    assert "7.png" in message

    content = contents[1]
    assert content.table.columns["threshold"] == pytest.approx([0.3] * 3)
    names = {"train/loss", "val/mAP_skip_empty", "val_raw/mAP_skip_empty"}
    assert content.curves.keys() == names
    assert "The threshold is 0.3, as the command line says." in content.notes
    assert any("data.threshold" in note for note in contents[0].notes)
    assert "Training time" in content.summary
    assert "squares" in content.settings

    # Inside data.root, paths are shown without it.
    text = Path("r.html").read_text()
    assert re.search(r'alt="Image \d+\.png; ', text)
    assert "<li>7.png: " in text
    assert text.count(f"{squares.parent.parent / 'mine'}") == 2, "data and settings"
    calibrate = f"mldec calibrate {squares} --out calibrated.pt"
    assert calibrate in [step.command for step in content.steps]

    # A name cannot leave the text it stands in.
    hostile = '</script><img src=x onerror="x()">{{ 7 * 7 }}'
    table = replace(content.table, names=(hostile, *content.table.names[1:]))
    text = page(replace(content, table=table, unreadable=[hostile], title=hostile))
    assert not [tag for tag, attributes in Tags(text).tags if attributes.get("src") == "x"]
    assert "</script><img" not in text


@pytest.mark.parametrize("experiment", ["digits_single", "digits_zsl"])
def test_one_label_and_unseen_classes(cli, contents, experiment):
    cli.out("train", f"+experiment={experiment}", *QUICK[1:], "train.epochs=1")
    run = Path("outputs", experiment)
    cli.out("report", run, *WORDS, "--compare", run, "--out", "r.html")

    [content] = contents
    metrics = evaluated(cli, run)["metrics"]
    assert {name: shown.value for name, shown in content.metrics.items()} == metrics
    assert np.isfinite(content.metrics["top1"].low) if "top1" in metrics else "zsl_mAP" in metrics
    assert content.exclusive == (experiment == "digits_single")
    assert (content.comparison.fixed, content.comparison.broken) == (0, 0)
    assert content.comparison.p_value == 1 or "zsl_mAP" in metrics
    assert to_dict(content, "x.pt", "ema")["metrics"] == metrics


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--out", "-"], "--out -: this is written to a file"),
        (["--out", "{folder}/no/r.html"], "there is no folder {folder}/no"),
        (["--out", "r.html", "--compare", "{folder}/no.pt"], "{folder}/no.pt: file not found"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    cli,
    digits_run,
    tmp_path,
    monkeypatch,
    words,
    part,
):
    monkeypatch.setattr(make, "gather", None)  # which scores the images
    filled = [word.format(folder=tmp_path) for word in words]
    one_line(cli.fault("report", digits_run, *WORDS, *filled), part.format(folder=tmp_path))
    assert not Path("r.html").exists()


def test_models_that_cannot_be_compared_are_refused_before_the_first_image(
    cli, digits_run, squares, monkeypatch
):
    monkeypatch.setattr(make, "gather", None)
    err = cli.fault("report", digits_run, *WORDS, "--compare", squares, "--out", "r.html")
    one_line(err, f"{squares} has other classes than the data, 3 and 10")

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)
    )
    err = cli.fault("report", "no.pt", "--out", "r.html")
    one_line(err, "a report needs plotly: run pip install -e '.[report]'")


def test_a_run_has_a_cost_and_curves(digits_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(digits_run, copy)
    best = copy / "checkpoints" / "best.pt"
    summary, curves, notes = of_run(folder_of_run(best))
    facts = json.loads((copy / "run.json").read_text())
    assert summary["Trainable parameters"] == f"{facts['parameters']:,}"
    assert facts["command"] in summary["Trained by"]
    assert summary["Training time"].startswith("0:00:")
    assert list(curves) == ["train/loss", "val/mAP", "val_raw/mAP"]
    assert notes == []

    # A damaged file does not end a report.
    (copy / "run.json").write_text("[")
    _, curves, [note] = of_run(folder_of_run(best))
    assert "cannot be used" in note
    _, curves, [note] = of_run(None)
    assert curves == {}
    assert "Neither metrics.jsonl nor run.json lies beside the checkpoint" in note

    # Gaps are left out.
    lines = [{"step": step, "train/loss": 1.0 * step, "train/lr": 1} for step in range(3)]
    lines.append({"step": 3, "val/top1": None, "val/top5": 3.0, "val_raw/top1": 5})
    curves = learning_curves(lines)
    assert curves["train/loss"][-1] == (2, 2.0)
    assert curves["val_raw/top1"] == [(3, 5.0)]
    assert curves.keys() == {"train/loss", "val_raw/top1"}
