"""The page of a report, looked at in a browser: what it shows, and what cannot happen in it."""

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import opened
from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from support import wait_until

from mldec.report.comparison import Change, Comparison
from mldec.report.examples import Example, Kind, Picture, Suspect
from mldec.report.page import Content, page
from mldec.report.statistics import ClassTable, Histograms, Interval, Pairs

HOSTILE = "<b>&amp;</b><img src=x onerror=\"document.title='hacked'\"></script>\u2028{{ 7 * 7 }}"
SHOWN = HOSTILE.replace("\u2028", "?")  # as `mldec.errors.visible` does
UNDEFINED = "\N{EN DASH}"
NAMES = ("circle", "square", "triangle", "star", HOSTILE, "class without any image")
IMAGES = 400
KINDS: tuple[Kind, ...] = ("right", "wrong", "missed")
THRESHOLDS = [0.5, 0.35, 0.62, 0.2, 0.4, np.nan]
EDGES = np.concatenate([np.linspace(0, 0.1, 41), np.linspace(0.1, 1, 181)[1:]])

CONFUSIONS = np.diag([150, 90, 60, 40, 20, 0]) + np.arange(36).reshape(6, 6) % 5
IN_CLASS = CONFUSIONS.sum(1) + 7  # some are predicted as a class that the matrix does not show


def scores_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Return scores from 0 to 1 and labels, both [IMAGES, K]; the last class has no positive."""
    random = np.random.default_rng(0)
    labels = random.random((IMAGES, len(NAMES))) < [0.5, 0.3, 0.2, 0.1, 0.05, 0]
    logits = random.normal(size=labels.shape) + 2.5 * labels - 1.5
    return 1 / (1 + np.exp(-logits)), labels


def histograms(scores: np.ndarray, labels: np.ndarray) -> Histograms:
    columns = range(scores.shape[1])

    def counts(weights: np.ndarray) -> np.ndarray:
        return np.stack(
            [np.histogram(scores[:, k], EDGES, weights=weights[:, k])[0] for k in columns]
        )

    return Histograms(
        EDGES,
        counts(labels.astype(float)).astype(np.int64),
        counts((~labels).astype(float)).astype(np.int64),
        counts(scores),
    )


def drawn(number: int) -> bytes:
    """Draw a ground of its own colour, as a JPEG file."""
    ground = tuple(np.random.default_rng(number).integers(60, 200, 3).tolist())
    buffer = io.BytesIO()
    Image.new("RGB", (160, 120), ground).save(buffer, "JPEG")
    return buffer.getvalue()


def heat(number: int) -> np.ndarray:
    y, x = np.mgrid[:12, :16]
    spot = np.exp(-((x - 6 - number % 8 / 2) ** 2 + (y - 6) ** 2) / 8)
    return (255 * spot).astype(np.uint8)


def content() -> Content:
    """Return a report of six classes; the numbers of its table are made up."""
    scores, labels = scores_and_labels()
    positives = labels.sum(0)
    predicted = scores >= np.nan_to_num(THRESHOLDS, nan=0.5)
    matrices = Pairs(
        list(range(6)),
        labels.T.astype(np.int64) @ labels,
        predicted.T.astype(np.int64) @ predicted,
    )
    pictures = [
        Picture(f"photos/{number:04d}.jpg", drawn(number), NAMES[number % 3 : number % 3 + 2])
        for number in range(12)
    ]
    pictures[3] = replace(pictures[3], name=HOSTILE + "\udcff", labels=(HOSTILE,))
    examples = [
        Example(k, kind, (5 * k + 3 * row + rank) % 12, 0.9 - rank / 10, heat(rank + k))
        for k in range(5)
        for row, kind in enumerate(KINDS)
        for rank in range(4)
    ]
    return Content(
        title="Report on digits.pt",
        summary={"Checkpoint": "outputs/digits/checkpoints/best.pt", "Images": f"{IMAGES}"},
        settings="name: digits\ntrain:\n  epochs: 8",
        images=IMAGES,
        curves={
            "train/loss": [(20 * step, 1 / (1 + step)) for step in range(40)],
            "val/loss": [(100, 0.5), (200, 0.3), (300, float("nan"))],
            "val/mAP": [(100, 60.0), (200, 80.0), (300, 85.0)],
        },
        metrics={
            "mAP": Interval(81.234, 79.1, 83.3),
            "CF1": Interval(70.0, 68.5, 71.2),
            "OF1": Interval(75.5, 74.0, 77.1),
            "classes_without_positives": Interval(1.0, float("nan"), float("nan")),
        },
        table=ClassTable(
            NAMES,
            {
                "positives": positives.astype(float).tolist(),
                "AP": [95.2, 81.5, 70.1, 66.6, 55.5, float("nan")],
                "precision": [90.0, 80.0, 70.0, 60.0, 50.0, float("nan")],
                "recall": [91.0, 81.0, 71.0, 61.0, 51.0, float("nan")],
                "F1": [90.5, 80.5, 70.5, 60.5, 50.5, float("nan")],
                "threshold": THRESHOLDS,
                "calibration error": [1.0, 2.0, 3.0, 4.0, 5.0, float("nan")],
            },
            (
                [94.0, 80.0, 65.0, 60.0, 45.0, float("nan")],
                [96.0, 83.0, 74.0, 72.0, 66.0, float("nan")],
            ),
        ),
        histograms=histograms(scores, labels),
        exclusive=False,
        pairs=matrices,
        heat_method="Attention of the class's query, averaged over heads.",
        pictures=dict(enumerate(pictures)),
        examples=examples,
        suspects=[Suspect(k % 5, k % 12, k % 2 == 0, 0.03 + 0.9 * (k % 2)) for k in range(20)],
        unreadable=[f"photos/{HOSTILE}.png: the file is cut off"],
        notes=["Heat maps are of a sample of 60 images."],
    )


def compared() -> Content:
    one, other = Interval(81.2, 79.0, 83.0), Interval(79.0, 77.0, 81.0)
    return replace(
        content(),
        comparison=Comparison(
            other=f"runs/{HOSTILE}.pt",
            metrics={
                "mAP": (one, other, Interval(2.2, 0.4, 4.1)),
                "CF1": (Interval(70, 69, 71), Interval(70, 69, 71), Interval(0, -1.25, 1.25)),
            },
            p_value=0.012,
            test="Paired bootstrap with 1,000 samples of the images.",
            per_class=[Interval(4.0 - 1.5 * k, 2.0 - 1.5 * k, 6.0 - 1.5 * k) for k in range(5)]
            + [Interval(*[float("nan")] * 3)],
            changed=[
                Change(0, 1, True, 0.8, 0.3, True),
                Change(1, 3, False, 0.1, 0.9, True),
                Change(2, 4, True, 0.2, 0.7, False),
            ],
            fixed=1234,
            broken=17,
        ),
    )


def exclusive() -> Content:
    """Return a report of images of one label, of 230 classes: the first six have confusions."""
    whole = compared()
    comparison = whole.comparison
    assert comparison is not None
    others = tuple(f"class {number}" for number in range(6, 230))
    blank = [float("nan")] * len(others)
    columns = {
        name: whole.table.columns[name] + (blank if name != "positives" else [1.0] * len(others))
        for name in ("positives", "AP", "precision", "recall", "F1")
    }
    empty = np.zeros((len(others), len(EDGES) - 1), np.int64)
    scores = whole.histograms
    return replace(
        whole,
        exclusive=True,
        table=ClassTable(NAMES + others, columns, tuple([50.0] * 230 for _ in range(2))),
        histograms=Histograms(
            EDGES,
            np.concatenate([scores.positives, empty]),
            np.concatenate([scores.negatives, empty]),
            np.concatenate([scores.score_sums, empty]),
        ),
        pairs=Pairs(list(range(6)), np.diag(IN_CLASS), CONFUSIONS),
        comparison=replace(
            comparison,
            per_class=comparison.per_class + [Interval(1.0, 0.5, 1.5)] * len(others),
            changed=[replace(image, present=True) for image in comparison.changed],
        ),
        metrics={"top1": Interval(88.0, 86.0, 90.0)},
        curves={},
        suspects=[],
        unreadable=[],
        heat_method=None,
        examples=[replace(example, heat=None) for example in whole.examples],
    )


def empty() -> Content:
    """Return a report of a class without any image or picture."""
    nothing = np.zeros((1, 2), np.int64)
    return Content(
        title="Nothing",
        summary={},
        settings="",
        images=0,
        curves={},
        metrics={"mAP": Interval(*[float("nan")] * 3)},
        table=ClassTable(
            ("one",), {"positives": [0.0], "AP": [float("nan")]}, ([float("nan")], [float("nan")])
        ),
        histograms=Histograms(np.array([0, 0.5, 1]), nothing, nothing, nothing.astype(float)),
        exclusive=False,
        pairs=Pairs([], np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)),
        heat_method=None,
        pictures={},
        examples=[],
        suspects=[],
        unreadable=[],
    )


class Shown:
    """A browser that shows one of the reports; what a test needs to look at and to do."""

    def __init__(self, browser: Chrome, folder: Path) -> None:
        self.browser = browser
        self.folder = folder
        # A page that still scrolls cannot be clicked on.
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [calm]})

    def report(self, name: str, width: int = 1600) -> "Shown":
        """Show a report in a window of this width, unless it is shown already."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        file = (self.folder / f"{name}.html").as_uri()
        if self.browser.current_url.partition("#")[0] != file:
            self.browser.get(file)
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until the script of the page has drawn everything, and its images are there."""
        ready = (
            "return document.getElementById('content').ariaBusy == 'false'"
            "&& [...document.images].every((one) => one.complete)"
        )
        wait_until(lambda: self.script(ready), lambda: str(self.browser.get_log("browser")))

    def wait_until_it_fits(self, width: int) -> None:
        """Wait until nothing is wider than the window, which charts follow in a moment."""

        def too_wide() -> list[str]:
            return self.script(
                "return [...document.querySelectorAll('main *')].filter((one) => !one.closest("
                "'.scroll, pre, svg, nav') && one.getBoundingClientRect().right > innerWidth)"
                ".map((one) => one.outerHTML.slice(0, 100))"
            )

        def fits() -> bool:
            page = self.script("return document.documentElement.scrollWidth")
            return page <= width and not too_wide()

        wait_until(fits, lambda: str(too_wide()))

    def script(self, text: str, *arguments: Any) -> Any:
        return self.browser.execute_script(text, *arguments)

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements, hidden ones too."""
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def cells(self, table: str) -> list[list[str]]:
        return self.script(
            "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))",
            table,
        )

    def chart(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the traces of a chart by name."""
        traces = self.script(
            "return document.getElementById(arguments[0]).data.map((trace) => JSON.parse("
            "JSON.stringify(trace)))",
            name,
        )
        return {trace["name"]: trace for trace in traces}

    def choose(self, index: int) -> None:
        Select(self.one("#class-select")).select_by_index(index)
        self.wait()

    def sort(self, heading: str) -> str:
        """Click on a heading of the table of classes; return the state that it announces."""
        for cell in self.all("#class-table th[scope=col]"):
            if cell.text.split("\xa0")[0].replace("\n", " ") == heading:
                cell.find_element(By.TAG_NAME, "button").click()
                return str(cell.get_attribute("aria-sort"))
        raise AssertionError(heading)

    def type(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("reports")
    for form in (compared, exclusive, empty):
        (folder / f"{form.__name__}.html").write_text(page(form()), encoding="utf-8")
    with opened(folder / "compared.html", width=1600) as browser:
        yield Shown(browser, folder)


def outcome(k: int, threshold: float) -> list[float]:
    """Return precision, recall, F1, predicted, true and false positives, and missed, by numpy."""
    scores, labels = scores_and_labels()
    predicted, positive = scores[:, k] >= threshold, labels[:, k]
    right, wrong = (predicted & positive).sum(), (predicted & ~positive).sum()
    missed = (~predicted & positive).sum()
    f1 = 200 * right / (2 * right + wrong + missed)
    precision = 100 * right / predicted.sum() if predicted.any() else np.nan
    shares = [precision, 100 * right / positive.sum(), f1]
    return [*shares, predicted.sum(), right, wrong, missed]


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace("\N{MINUS SIGN}", "-").replace(",", "")) for cell in cells]


def test_the_table_sorts_with_undefined_values_last(shown: Shown) -> None:
    page = shown.report("compared")
    by_ap = [*NAMES[:4], SHOWN, NAMES[5]]  # the AP of the last class is undefined

    assert page.sort("AP (%)") == "descending"
    assert [row[0] for row in page.cells("#class-table")] == by_ap
    assert page.sort("AP (%)") == "ascending"
    assert [row[0] for row in page.cells("#class-table")] == [*by_ap[4::-1], by_ap[5]]

    assert page.sort("Class") == "ascending"
    assert {"none", "ascending"} == {
        cell.get_attribute("aria-sort") for cell in page.all("#class-table th[scope=col]")
    }
    names = [row[0] for row in page.cells("#class-table")]
    assert names[1:] == ["circle", "class without any image", "square", "star", "triangle"]

    page.sort("AP of A \N{MINUS SIGN} B (points)")
    assert [row[-1] for row in page.cells("#class-table")] == [
        "+4.0 (+2.0 to +6.0)",
        "+2.5 (+0.5 to +4.5)",
        "+1.0 (\N{MINUS SIGN}1.0 to +3.0)",
        "\N{MINUS SIGN}0.5 (\N{MINUS SIGN}2.5 to +1.5)",
        "\N{MINUS SIGN}2.0 (\N{MINUS SIGN}4.0 to 0.0)",
        UNDEFINED,
    ]
    assert page.cells("#class-table")[0][2] == "95.2 (94.0 to 96.0)"


def test_the_table_filters_by_text_and_positives(shown: Shown) -> None:
    page = shown.report("compared")
    page.type("#filter-text", "AR")
    assert {row[0] for row in page.cells("#class-table")} == {"square", "star"}
    page.type("#filter-positives", "50")
    assert [row[0] for row in page.cells("#class-table")] == ["square"]
    assert page.one("#filter-result").text == "1 of 6 classes"

    page.type("#filter-text", "no such class")
    assert page.cells("#class-table") == []
    page.script("document.getElementById('filter').reset()")
    page.type("#filter-text", Keys.SPACE)
    assert len(page.cells("#class-table")) == 6


def test_a_row_of_the_table_shows_its_class(shown: Shown) -> None:
    page = shown.report("compared")
    page.script("document.getElementById('filter').reset()")
    for k in (0, 2):
        [button] = [one for one in page.all("#class-table button.link") if one.text == NAMES[k]]
        page.script("arguments[0].click()", button)
        assert page.one("#class-name").text == NAMES[k]

        scores, labels = scores_and_labels()
        for sign, images in (("positives", labels[:, k]), ("negatives", ~labels[:, k])):
            expected, _ = np.histogram(scores[images, k], np.linspace(0, 1, 51))
            assert page.chart("scores")[sign]["y"] == expected.tolist()

        curve = page.chart("precision-recall")["precision"]
        expected = [outcome(k, edge) for edge in EDGES[:-1] if (scores[:, k] >= edge).any()]
        assert curve["y"] == pytest.approx([row[0] for row in expected])
        assert curve["x"] == pytest.approx([row[1] for row in expected])

        [wrong] = [one for one in page.all(".wrong") if one.is_displayed()]
        examples = wrong.find_elements(By.CSS_SELECTOR, "img:not(.heat)")
        assert examples[0].get_attribute("alt").startswith("Image ")
        assert len(examples) == len(wrong.find_elements(By.CSS_SELECTOR, "img.heat")) == 4


def test_the_slider_moves_numbers_and_marks(shown: Shown) -> None:
    page = shown.report("compared")
    k = 1
    page.choose(k)
    start = int(np.abs(EDGES - THRESHOLDS[k]).argmin())
    slider = page.one("#threshold")
    moves = ((), (Keys.ARROW_RIGHT,) * 3, (Keys.PAGE_DOWN,), (Keys.HOME,))
    steps = []
    for keys in moves:
        slider.send_keys(*keys)
        steps.append(int(slider.get_property("value")))
        now, before = outcome(k, EDGES[steps[-1]]), outcome(k, THRESHOLDS[k])

        _, *columns = zip(*page.cells("#threshold-table"), strict=True)
        change = np.subtract(now, before)
        for column, expected in zip(columns, (now, before, change), strict=True):
            assert numbers(column) == pytest.approx(expected, abs=0.0501)

        mark = page.chart("precision-recall")["slider"]
        assert (mark["y"], mark["x"]) == (pytest.approx(now[:1]), pytest.approx(now[1:2]))
        line = page.script("return document.getElementById('scores').layout.shapes[1].x0")
        assert line == pytest.approx(EDGES[steps[-1]])
        assert float(page.one("#threshold-value").text) == pytest.approx(EDGES[steps[-1]], abs=6e-4)
    assert steps[:2] == [start, start + 3]
    assert steps[2] < start
    assert steps[3] == 0

    page.one("#to-best").click()
    best = float(page.cells("#threshold-table")[2][1])
    assert best == pytest.approx(max(outcome(k, edge)[2] for edge in EDGES[:-1]), abs=0.0501)
    page.one("#to-reference").click()
    assert int(slider.get_property("value")) == start


def test_a_class_without_threshold_and_image_has_numbers_that_say_so(shown: Shown) -> None:
    page = shown.report("compared")
    page.choose(5)
    assert page.one("#threshold-value").text == "0.500"
    assert page.one("#reference").text == "At 0.500"
    assert [row[1] for row in page.cells("#threshold-table")[:3]] == ["0.0", UNDEFINED, "0.0"]
    assert page.one("#no-examples").is_displayed()
    assert not [one for one in page.all(".examples") if one.is_displayed()]


def test_pairs_of_classes_are_shares_of_the_row(shown: Shown) -> None:
    page = shown.report("compared")
    matrices = content().pairs
    z = page.script("return document.getElementById('pairs-chart').data[0].z")
    assert z[0][0] is None
    labels, predictions = (
        100 * matrix[1, 2] / matrix[1, 1] for matrix in (matrices.labels, matrices.predictions)
    )
    assert z[1][2] == pytest.approx(predictions - labels)
    cell = page.cells("#pairs-table")[1][3]
    assert cell == f"{matrices.labels[1, 2]} / {matrices.predictions[1, 2]}"


def test_a_comparison_names_differences_and_images(shown: Shown) -> None:
    page = shown.report("compared")
    text = " ".join(page.one("section[aria-labelledby=comparison]").text.split())
    assert "p = 0.0120 for the difference of the main metric. Paired bootstrap" in text
    assert "Only A decides 1,234 pairs of image and class correctly, only B 17." in text
    assert "mAP 81.20 79.00 +2.20 0.40 to 4.10" in text
    assert "CF1 70.00 70.00 +0.00 \N{MINUS SIGN}1.25 to 1.25" in text
    assert [len(page.all(f"#{side} img")) for side in ("fixed", "broken")] == [2, 1]

    marks = page.script("return document.getElementById('differences-chart').data[0].x")
    assert marks == [4.0, 2.5, 1.0, -0.5, -2.0]


def test_the_heat_maps_can_be_switched_off(shown: Shown) -> None:
    page = shown.report("compared")
    page.choose(0)
    assert page.one(".examples:not([hidden]) .heat").is_displayed()
    page.one(".show-heat").click()
    assert not page.one(".examples:not([hidden]) .heat").is_displayed()
    page.one(".show-heat").click()


def test_a_suspect_names_its_label_and_its_probability(shown: Shown) -> None:
    page = shown.report("compared")
    assert len(page.all("#suspect-list img")) == 20
    assert page.one("#suspect-list li").text.startswith(
        "circle\nlabelled present\nprobability 0.030"
    )


def test_names_from_outside_are_text(shown: Shown) -> None:
    page = shown.report("compared")
    page.choose(4)
    assert page.texts("#class-name") == [SHOWN]
    assert SHOWN in page.texts("#class-select option")
    assert SHOWN in page.texts("#class-table button.link")
    assert SHOWN in page.texts("#pairs-table th")
    assert f"photos/{SHOWN}.png: the file is cut off" in page.texts(".messages li")
    assert any(text == f"{SHOWN}?" for text in page.texts(".gallery p"))
    for chart in ("pairs-chart", "differences-chart"):
        assert any(text.startswith("<b>&amp;</b>") for text in page.texts(f"#{chart} text"))

    assert page.browser.title == "Report on digits.pt"
    assert not page.all("img[src=x], svg a[href], svg img")


@pytest.mark.parametrize("form", ["compared", "exclusive", "empty"])
def test_a_page_has_no_error_and_fits_narrow_and_wide_windows(shown: Shown, form: str) -> None:
    for width in (400, 1600):
        page = shown.report(form, width)
        page.wait_until_it_fits(width)
    assert page.browser.get_log("browser") == []

    pictures = page.script(
        "return [...document.images].map((one) => [one.alt, one.naturalWidth, one.src])"
    )
    assert bool(pictures) == (form != "empty")
    assert all(alt and size and source.startswith("data:") for alt, size, source in pictures)
    asked = page.script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert not [name for name in asked if not name.startswith(("data:", "blob:"))]

    levels = [
        int(name[1])
        for name in page.script(
            "return [...document.querySelectorAll('h1, h2, h3, h4')].map((one) => one.tagName)"
        )
    ]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.script(
        "return [...document.querySelectorAll('input, select, output[for]')].every((one) =>"
        "one.labels.length || one.tagName == 'OUTPUT')"
    )


def test_images_of_one_label_have_a_confusion_matrix_and_no_threshold(shown: Shown) -> None:
    page = shown.report("exclusive")
    assert not page.all("#threshold, .show-heat")
    assert "Confusions" in page.texts("h2")
    assert page.chart("precision-recall").keys() == {"precision"}

    z = page.script("return document.getElementById('pairs-chart').data[0].z")
    assert z[1] == pytest.approx((100 * CONFUSIONS[1] / IN_CLASS[1]).tolist())
    assert page.cells("#pairs-table")[2][1:] == [str(count) for count in CONFUSIONS[2]]
    assert "Shown are 6 of 230 classes." in page.texts("section > p.small")
    assert "labelled" not in page.one("#fixed").text


def test_a_long_table_is_shown_in_parts(shown: Shown) -> None:
    page = shown.report("exclusive")
    page.sort("Class")
    lengths = []
    while True:
        lengths.append(len(page.cells("#class-table")))
        if not page.one("#next-page").is_enabled():
            break
        page.one("#next-page").click()
    assert lengths == [100, 100, 30]
    assert page.one("#page-range").text == "rows 201 to 230"
    page.one("#previous-page").click()
    assert page.cells("#class-table")[0][0] == "class 104"  # after two others and class 6 to 103


def test_9605_classes_fit_into_a_small_file() -> None:
    """Random sparse counts of 40,000 images take more room than real ones, which repeat."""
    classes, bins = 9605, 200
    random = np.random.default_rng(0)
    negatives = random.poisson(0.5, (classes, bins))
    negatives[:, 0] = 39_000
    positives = random.poisson(0.05, (classes, bins))
    edges = np.linspace(0, 1, bins + 1)
    sums = (positives + negatives) * (edges[:-1] + random.random((classes, bins)) / bins)
    columns = {
        name: random.random(classes).tolist()
        for name in ("positives", "AP", "precision", "recall", "F1", "threshold")
    }
    whole = replace(
        content(),
        table=ClassTable(
            tuple(f"class {k}" for k in range(classes)), columns, (columns["AP"], columns["AP"])
        ),
        histograms=Histograms(edges, positives, negatives, sums),
    )

    start = time.process_time()
    text = page(whole)
    assert time.process_time() - start < 15
    assert len(text.encode()) < 15e6
