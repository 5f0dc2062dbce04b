"""The page of a report in a browser: its table, charts, slider and safety."""

import re
from dataclasses import replace

import numpy as np
import pytest
from browser import opened
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from support import QUICK, train_here, wait_until

from mldec.tools import report
from mldec.tools.report.content import build_content, open_checkpoint, open_other
from mldec.tools.report.page import render_page

HOSTILE = "<b>&amp;</b><img src=x onerror=\"document.title='hacked'\"></script>\u2028{{ 7 * 7 }}"
VISIBLE = HOSTILE.replace("\u2028", "?")  # as `mldec.errors.visible` does
UNDEFINED = "\N{EN DASH}"


def content_of(run, other):
    words = [str(run), "--plugin", "patches", "--compare", str(other), "--out", "r.html"]
    options = report.ReportOptions.of(vars(report.parser().parse_intermixed_args(words)))
    setup = open_checkpoint(options)
    return build_content(setup, open_other(options, str(other), setup))


def hostile(content):
    """Insert names with HTML and scripts, and a class without images."""
    names = (*content.table.names[:4], HOSTILE, *content.table.names[5:])
    columns = {name: [*values[:-1], np.nan] for name, values in content.table.columns.items()}
    columns["positives"][-1] = 0.0
    positives = content.histograms.positives.copy()
    negatives = content.histograms.negatives.copy()
    positives[-1] = negatives[-1] = 0
    gaps = content.comparison.per_class.copy()
    gaps[:, -1] = np.nan
    return replace(
        content,
        title="Report on digits.pt",
        table=replace(content.table, names=names, columns=columns),
        histograms=replace(content.histograms, positives=positives, negatives=negatives),
        examples=[one for one in content.examples if one.class_index < len(names) - 1],
        photos={
            row: replace(photo, name=HOSTILE + "\udcff") for row, photo in content.photos.items()
        },
        unreadable=[f"photos/{HOSTILE}.png: the file is cut off"],
        comparison=replace(content.comparison, other=f"runs/{HOSTILE}.pt", per_class=gaps),
    )


@pytest.fixture(scope="module")
def contents(digits_run, tmp_path_factory):
    """Reports on multi-label and single-label digits."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["+experiment=digits_single", *QUICK[1:]]
    outputs = train_here(folder, *words)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mldec.tools.report.statistics.MAX_RESAMPLES", 100)
        for name, run in (("several", digits_run), ("single", outputs / "digits_single")):
            checkpoints = run / "checkpoints"
            found[name] = content_of(checkpoints / "best.pt", checkpoints / "last.1.pt")
    return {**found, "several": hostile(found["several"])}


class Page:
    """A browser with one of the reports."""

    def __init__(self, browser, folder):
        self.browser = browser
        self.folder = folder
        # Clicks fail while the page scrolls.
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [calm]})

    def report(self, name, width=1600):
        """Open a report in a window of this width."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        file = (self.folder / f"{name}.html").as_uri()
        if self.browser.current_url.partition("#")[0] != file:
            self.browser.get(file)
        self.wait()
        return self

    def wait(self):
        """Wait for the script and the images of the page."""
        ready = (
            "return document.getElementById('content').ariaBusy == 'false'"
            "&& [...document.images].every((one) => one.complete)"
        )
        wait_until(lambda: self.script(ready), lambda: str(self.browser.get_log("browser")))

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        """Return the texts of elements, including hidden elements."""
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def cells(self, table):
        return self.script(
            "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))",
            table,
        )

    def chart(self, name):
        """Return the traces of a chart by name."""
        traces = self.script(
            "return JSON.parse(JSON.stringify(document.getElementById(arguments[0]).data))", name
        )
        return {trace.get("name"): trace for trace in traces}

    def sort(self, heading):
        """Click on a heading of the table of classes; return its sort order."""
        for cell in self.all("#class-table th[scope=col]"):
            if cell.text.split("\xa0")[0].replace("\n", " ") == heading:
                cell.find_element(By.TAG_NAME, "button").click()
                return str(cell.get_attribute("aria-sort"))
        raise AssertionError(heading)

    def type(self, selector, text):
        field = self.one(selector)
        field.clear()
        field.send_keys(text)


@pytest.fixture(scope="module")
def browser_page(contents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(render_page(content, folder), encoding="utf-8")
    with opened(folder / "several.html", width=1600) as browser:
        yield Page(browser, folder)


def outcome(content, k, edge):
    """Return the expected rows of the threshold table."""
    counts = content.histograms.positives[k], content.histograms.negatives[k]
    right, wrong = (own[edge:].sum() for own in counts)
    positives = counts[0].sum()
    missed = positives - right
    precision = 100 * right / (right + wrong) if right + wrong else np.nan
    recall = 100 * right / positives if positives else np.nan
    f1 = 200 * right / (2 * right + wrong + missed)
    return [precision, recall, f1, right + wrong, right, wrong, missed]


def numbers(cells):
    texts = [cell.replace("\N{MINUS SIGN}", "-").replace(",", "") for cell in cells]
    return [np.nan if text == UNDEFINED else float(text) for text in texts]


def test_table_sorts_and_filters(browser_page, contents):
    page, table = browser_page.report("several"), contents["several"].table
    names = [VISIBLE if name == HOSTILE else name for name in table.names]
    precision = table.columns["AP"]
    by_ap = sorted(range(len(names) - 1), key=lambda k: (-precision[k], k))
    assert page.sort("AP (%)") == "descending"
    rows = page.cells("#class-table")
    assert [row[0] for row in rows] == [*(names[k] for k in by_ap), names[-1]]
    low, high = (bounds[by_ap[0]] for bounds in table.intervals)
    assert rows[0][2] == f"{precision[by_ap[0]]:.1f} ({low:.1f} to {high:.1f})"
    assert rows[-1][-1] == UNDEFINED

    page.type("#filter-text", names[0].upper())
    assert [row[0] for row in page.cells("#class-table")] == [names[0]]
    assert page.one("#filter-result").text == f"1 of {len(names)} classes"
    page.script("document.getElementById('filter').reset()")
    page.type("#filter-positives", "1")
    assert len(page.cells("#class-table")) == sum(count > 0 for count in table.columns["positives"])


def test_row_selects_its_class(browser_page, contents):
    page, content = browser_page.report("several"), contents["several"]
    page.script("document.getElementById('filter').reset()")
    counted = content.histograms
    for k in (0, 2):
        name = content.table.names[k]
        [button] = [one for one in page.all("#class-table button.link") if one.text == name]
        page.script("arguments[0].click()", button)
        assert page.one("#class-name").text == name

        for sign, counts in (("positives", counted.positives), ("negatives", counted.negatives)):
            groups = (counted.edges[:-1] * 50 + 1e-9).astype(int)
            expected = np.bincount(groups, counts[k]).tolist()
            assert page.chart("scores")[sign]["y"] == expected

        curve = page.chart("precision-recall")["precision"]
        points = np.array([outcome(content, k, edge) for edge in range(len(counted.edges) - 1)])
        points = points[np.isfinite(points[:, 0])]
        assert curve["y"] == pytest.approx(points[:, 0].tolist())
        assert curve["x"] == pytest.approx(points[:, 1].tolist())

        kinds = [one for one in page.all(".gallery") if one.is_displayed()]
        images = [one for kind in kinds for one in kind.find_elements(By.CSS_SELECTOR, "img.heat")]
        own = [one for one in content.examples if one.class_index == k and one.heat is not None]
        assert len(images) == len(own) > 0


def test_slider_updates_metrics_and_markers(browser_page, contents):
    page, content = browser_page.report("several"), contents["several"]
    k, edges = 1, content.histograms.edges
    Select(page.one("#class-select")).select_by_index(k)
    start = int(np.abs(edges - content.table.columns["threshold"][k]).argmin())
    slider = page.one("#threshold")
    steps = []
    for keys in ((), (Keys.ARROW_RIGHT,) * 3, (Keys.PAGE_DOWN,), (Keys.HOME,)):
        slider.send_keys(*keys)
        steps.append(int(slider.get_property("value")))
        now, before = outcome(content, k, steps[-1]), outcome(content, k, start)

        _, *columns = zip(*page.cells("#threshold-table"), strict=True)
        change = np.subtract(now, before)
        for column, expected in zip(columns, (now, before, change), strict=True):
            assert numbers(column) == pytest.approx(expected, abs=0.0501, nan_ok=True)
        line = page.script("return document.getElementById('scores').layout.shapes[1].x0")
        assert line == pytest.approx(edges[steps[-1]])
        assert float(page.one("#threshold-value").text) == pytest.approx(edges[steps[-1]], abs=6e-4)
    assert steps[:2] == [start, start + 3]
    assert steps[2] < start
    assert steps[3] == 0

    page.one("#to-best").click()
    best = max(outcome(content, k, edge)[2] for edge in range(len(edges) - 1))
    assert float(page.cells("#threshold-table")[2][1]) == pytest.approx(best, abs=0.0501)
    page.one("#to-reference").click()
    assert int(slider.get_property("value")) == start

    # A class without a threshold and images has undefined metrics.
    Select(page.one("#class-select")).select_by_index(len(content.table.names) - 1)
    assert page.one("#reference").text == "At 0.500"
    assert [row[1] for row in page.cells("#threshold-table")[:2]] == [UNDEFINED] * 2
    assert page.one("#no-examples").is_displayed()


def test_gallery_filters_its_photos(browser_page, contents):
    page, content = browser_page.report("several"), contents["several"]

    def shown():
        script = "return [...arguments[0].children].map((one) => Number(one.dataset.row))"
        return page.script(script, page.one("#photo-grid"))

    assert shown() == content.gallery == list(range(content.images))
    decisions = {row: content.photos[row].decisions for row in content.gallery}
    k = 1
    Select(page.one("#photo-class")).select_by_visible_text(content.table.names[k])
    for kind, sign in (("right", -1), ("missed", 1)):
        Select(page.one("#photo-kind")).select_by_value(kind)
        scores = {}
        for row, own in decisions.items():
            for one in own:
                if one[:2] == (k, kind):
                    scores[row] = one.score
        rows = sorted(scores, key=lambda row, scores=scores, sign=sign: sign * scores[row])
        assert shown() == rows
    assert rows

    # Bounds of the score apply to the same decision as the other filters.
    middle = round(float(np.median(list(scores.values()))), 2)
    page.type("#photo-high", str(middle) + Keys.TAB)
    assert shown() == [row for row in rows if scores[row] <= middle]

    page.script("document.getElementById('photo-filter').reset()")
    Select(page.one("#photo-kind")).select_by_value("error")
    wrong = {
        row for row, own in decisions.items() if {"wrong", "missed"} & {one.kind for one in own}
    }
    assert set(shown()) == wrong
    assert len(page.all("#photo-grid .error")) == len(wrong)
    Select(page.one("#photo-kind")).select_by_value("")


def test_photo_is_enlarged_with_its_decisions(browser_page, contents):
    page, content = browser_page.report("single"), contents["single"]
    example = next(one for one in content.examples if one.heat is not None)
    Select(page.one("#class-select")).select_by_index(example.class_index)
    page.one(f".examples:not([hidden]) [data-row='{example.row}']").click()
    viewer = page.one("#viewer")
    assert viewer.is_displayed()
    image, heat = viewer.find_elements(By.TAG_NAME, "img")
    assert image.get_attribute("src") == content.photos[example.row].picture
    assert heat.size == image.size
    rows = viewer.find_elements(By.TAG_NAME, "tr")
    names = [row.find_element(By.TAG_NAME, "th").text for row in rows]
    decisions = content.photos[example.row].decisions
    assert names == [content.table.names[one.class_index] for one in decisions]

    viewer.find_element(By.CSS_SELECTOR, ".show-heat").click()
    assert not heat.is_displayed()
    viewer.find_element(By.CSS_SELECTOR, ".close").click()
    assert not viewer.is_displayed()


def test_charts_follow_the_color_scheme_of_the_system(browser_page):
    page = browser_page.report("single")
    color = "return document.getElementById('calibration').layout.paper_bgcolor"
    light = page.script(color)
    try:
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [dark]})
        wait_until(lambda: page.script(color) != light, lambda: str(page.script(color)))
        channels = page.script("return getComputedStyle(document.body).backgroundColor")
        assert max(int(value) for value in re.findall(r"\d+", channels)) < 50
    finally:
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [calm]})


def test_axes_of_counts_have_three_ticks_or_more(browser_page, contents):
    page = browser_page.report("several")
    for k in range(len(contents["several"].table.names)):
        Select(page.one("#class-select")).select_by_index(k)
        layout = "return document.getElementById('scores').layout[arguments[0]]"
        for axis in ("yaxis", "yaxis2"):
            found = page.script(layout, axis)
            low, high = found["range"]
            assert sum(low <= np.log10(tick) <= high for tick in found["tickvals"]) >= 3


def test_hostile_names_are_text(browser_page):
    page = browser_page.report("several")
    Select(page.one("#class-select")).select_by_index(4)
    assert page.texts("#class-name") == [VISIBLE]
    for selector in (
        "#class-select option",
        "#photo-class option",
        "#class-table button.link",
        "#pairs-table th",
    ):
        assert VISIBLE in page.texts(selector)
    assert f"photos/{VISIBLE}.png: the file is cut off" in page.texts(".messages li")
    assert any(text == f"{VISIBLE}?" for text in page.texts(".gallery p"))
    for chart in ("pairs-chart", "differences-chart"):
        assert any(text.startswith("<b>&amp;</b>") for text in page.texts(f"#{chart} text"))
    assert page.browser.title == "Report on digits.pt"
    assert not page.all("img[src=x], svg a[href], svg img")


@pytest.mark.parametrize("name", ["several", "single"])
def test_page_has_no_error_and_fits_the_window(browser_page, name):
    page = browser_page.report(name)
    too_wide = (
        "return [document.documentElement, ...document.querySelectorAll('main *')].filter((one) =>"
        "!one.closest('.scroll, pre, svg, nav') && one.scrollWidth > arguments[0]"
        ").map((one) => one.outerHTML.slice(0, 100))"
    )
    for width in (400, 1600):
        # The charts follow the window with a delay.
        browser_page.report(name, width)
        wait_until(
            lambda width=width: not page.script(too_wide, width),
            lambda width=width: str(page.script(too_wide, width)),
        )
    assert page.browser.get_log("browser") == []

    pictures = page.script(
        "return [...document.images].map((one) => [one.alt, one.naturalWidth, one.src])"
    )
    assert all(alt and size and source.startswith("data:") for alt, size, source in pictures)
    requests = page.script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert not [name for name in requests if not name.startswith(("data:", "blob:"))]
