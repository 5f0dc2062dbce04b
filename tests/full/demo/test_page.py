"""A server process, and its page in a browser."""

import csv
import itertools
import json
import re
import signal
import socket
from contextlib import contextmanager

import httpx
import networks
import pytest
from browser import opened
from forked import Forked, mldec_command
from photos import write_photos
from pictures import png
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support import one_line, wait_until


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A checkpoint of three classes with thresholds."""
    return networks.save_calibrated(tmp_path_factory.mktemp("demo") / "calibrated.pt")


@contextmanager
def served(home, *words, number=signal.SIGTERM, status=143):
    """Yield the address of a server. Stop it by a signal, and check that it wrote no file."""
    folders = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for folder in (*folders.values(), home / "work"):
        folder.mkdir(parents=True)
    out, err = home.with_suffix(".out"), home.with_suffix(".err")
    words = ["demo", *map(str, words), "--port", "0", "--device", "cpu"]
    environment = {key: str(folder) for key, folder in folders.items()}
    process = Forked(mldec_command, *words, cwd=home / "work", out=out, err=err, env=environment)

    def address():
        return out.exists() and re.search(r"^http://127\.0\.0\.1:\d+", out.read_text(), re.M)

    wait_until(lambda: address() or process.poll() is not None)
    if process.poll() is not None:
        pytest.fail(err.read_text())
    try:
        yield address()[0]
    finally:
        process.send_signal(number)
        found = process.wait(timeout=120)
    assert found == status
    one_line(err.read_text(), f"stopped by {number.name}")
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_server_stops_at_a_signal(calibrated, tmp_path, number, status):
    with served(tmp_path / "x", calibrated, number=number, status=status) as url:
        files = [("photos", ("../1.png", png(1, 1200, 900)))]
        [row] = httpx.post(f"{url}/api/predict", files=files, data={"top": 3}).json()
        assert (row["image"], len(row["predictions"])) == ("1.png", 3)

        # The signal interrupts this request without a traceback.
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        headers = "Host: localhost\r\nContent-Length: 99\r\n"
        connection.sendall(f"POST /api/predict HTTP/1.1\r\n{headers}\r\n".encode())


def waited(driver, condition):
    """Wait until a JavaScript expression is true."""
    wait_until(
        lambda: driver.execute_script(f"return {condition}"), lambda: driver.page_source[-3000:]
    )


HOLD_AT_0 = """
const slider = document.getElementById("threshold");
slider.value = 0;
slider.dispatchEvent(new Event("input"));
"""


def count(selector):
    return f"document.querySelectorAll({selector!r}).length"


def bars(driver):
    """Return name, score and decision of each bar."""
    script = """return [...document.querySelectorAll('.bar')].map(bar => [
        bar.querySelector('.name').textContent.replace('✓ ', ''),
        bar.querySelector('.score').textContent, bar.classList.contains('present')])"""
    return [(name, score, present) for name, score, present in driver.execute_script(script)]


def check_quiet(driver, url):
    """Check that the console is empty and all requests were sent to the server."""
    assert driver.get_log("browser") == []
    requested = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            requested.add(message["params"]["request"]["url"])
    assert {f"{url}/", f"{url}/api/predict"} <= requested
    assert [each for each in requested if not each.startswith((f"{url}/", "data:"))] == []


@pytest.mark.parametrize("width", [400, 1400])
def test_page_shows_the_predictions_of_the_model(calibrated, tmp_path, width):
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(png(seed, 400, 300))
    (tmp_path / "text.jpg").write_text("text")

    with served(tmp_path / "x", calibrated) as url, opened(url, width=width) as driver:
        files = [("photos", (tmp_path / f"{seed}.png").read_bytes()) for seed in (1, 2)]
        rows = httpx.post(f"{url}/api/predict", files=files, data={"top": 3}).json()

        def expected(threshold):
            """Return the bars for a threshold, or None for the thresholds of the model."""
            named = []
            for item in itertools.chain(*[row["predictions"] for row in rows]):
                lowest = item["threshold"] if threshold is None else threshold
                named.append((item["name"], f"{item['score']:.3f}", item["score"] >= lowest))
            return named

        [entry] = driver.find_elements(By.ID, "photos")
        entry.send_keys("\n".join(str(tmp_path / name) for name in ("1.png", "2.png", "text.jpg")))
        waited(driver, f"{count('.fault')} === 1 && {count('.card')} === 3")
        assert bars(driver) == expected(None)

        # The slider is for all classes. The switch restores the thresholds of the model.
        [slider] = driver.find_elements(By.ID, "threshold")
        slider.send_keys(Keys.END)
        assert bars(driver) == expected(1)
        slider.send_keys(Keys.HOME)
        assert bars(driver) == expected(0)
        driver.find_element(By.ID, "own").click()
        assert bars(driver) == expected(None)

        # At 1 the best class of each photo has a map. At 0 all three classes have maps, also while
        # the slider is held.
        slider.send_keys(Keys.END)
        driver.find_element(By.ID, "heat").click()
        waited(driver, f"{count('.heat img')} === 2")
        driver.execute_script(HOLD_AT_0)
        waited(driver, f"{count('.heat img')} === 6")
        waited(driver, "document.getElementById('status').textContent.includes('Bright')")
        sizes = "[...document.images].every(image => image.complete && image.naturalWidth > 100)"
        waited(driver, sizes)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        driver.find_element(By.ID, "heat").click()
        waited(driver, f"{count('.heat img')} === 0")

        driver.find_element(By.ID, "clear").click()
        waited(driver, f"{count('.card')} === 0")
        check_quiet(driver, url)


def emulate(driver, scheme):
    """Emulate a phone of 390 x 844 pixels, with a light or dark color scheme."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


LUMINANCE = """
const style = getComputedStyle(document.querySelector(arguments[0]));
const [red, green, blue] = style[arguments[1]].match(/[0-9.]+/g).map(Number);
return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answer_for_an_example_is_visible_on_a_phone(calibrated, tmp_path, scheme):
    (tmp_path / "try").mkdir()
    for seed in range(7):
        (tmp_path / "try" / f"{seed}.png").write_bytes(png(seed, 400, 300))
    words = (calibrated, "--examples", tmp_path / "try")
    with served(tmp_path / "x", *words) as url, opened(url, width=390) as driver:
        emulate(driver, scheme)
        buttons = driver.find_elements(By.CSS_SELECTOR, "#examples button")
        names = [button.get_attribute("title") for button in buttons]
        assert names == ["0.png", "2.png", "4.png", "6.png"]
        buttons[2].click()
        waited(driver, f"{count('.bar .score')} === 3")
        content = (tmp_path / "try" / "4.png").read_bytes()
        files = [("photos", ("4.png", content))]
        [row] = httpx.post(f"{url}/api/predict", files=files, data={"top": 3}).json()
        shown = [(item["name"], f"{item['score']:.3f}") for item in row["predictions"]]
        assert [each[:2] for each in bars(driver)] == shown

        last = "[...document.querySelectorAll('.bar')].at(-1).getBoundingClientRect().bottom"
        assert driver.execute_script(f"return {last}") < 844
        assert driver.execute_script("return [scrollY, document.body.scrollWidth]") == [0, 390]
        # The answer is also visible if the visitor has scrolled to the settings.
        driver.execute_script("scrollTo(0, 500)")
        assert driver.execute_script("return scrollY") > 0
        driver.execute_script("document.querySelector('#examples button').click()")
        waited(driver, f"{count('.bar .score')} === 6 && scrollY === 0")

        for selector in ("body", ".card", ".panel"):
            paper = driver.execute_script(LUMINANCE, selector, "backgroundColor")
            ink = driver.execute_script(LUMINANCE, selector, "color")
            assert (paper > 200 > 60 > ink) if scheme == "light" else (paper < 60 < 200 < ink)
        check_quiet(driver, url)


def test_results_are_downloaded_as_csv(calibrated, tmp_path):
    (tmp_path / "a, b.png").write_bytes(png(1, 400, 300))
    (tmp_path / "text.jpg").write_text("text")
    with served(tmp_path / "x", calibrated) as url, opened(url, width=1400) as driver:
        behavior = {"behavior": "allow", "downloadPath": str(tmp_path / "down")}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
        [entry] = driver.find_elements(By.ID, "photos")
        entry.send_keys("\n".join(str(tmp_path / name) for name in ("a, b.png", "text.jpg")))
        waited(driver, f"{count('.fault')} === 1 && {count('.bar .score')} === 3")
        driver.find_element(By.ID, "threshold").send_keys(Keys.HOME)
        expected = bars(driver)
        driver.find_element(By.ID, "csv").click()
        path = tmp_path / "down" / "predictions.csv"
        wait_until(path.exists)

        with path.open(newline="", encoding="utf-8") as file:
            photo, invalid = csv.DictReader(file)
        assert (photo["image"], photo["error"]) == ("a, b.png", "")
        assert photo["classes"].split(";") == [name for name, _, _ in expected]
        scores = [f"{float(score):.3f}" for score in photo["scores"].split(";")]
        assert scores == [score for _, score, _ in expected]
        assert (invalid["image"], invalid["classes"]) == ("text.jpg", "")
        assert invalid["error"]
        check_quiet(driver, url)


def test_training_photos_are_shown_for_present_classes(cli, here):
    own = write_photos(here / "own")
    prefix = "a_long_name_of_a_photo_"
    for path in own.glob("*.png"):
        path.rename(own / f"{prefix}{path.name}")
    header, *rows = (own / "data.csv").read_text().split()
    (own / "data.csv").write_text("\n".join([header, *(prefix + row for row in rows)]))
    words = ["+experiment=finetune_frozen", "backbone=tiny", "data.root=own", "name=mine"]
    words += ["data.cache_dir=cache", "data.image_size=32", "train.workers=0", "device=cpu"]
    cli.out("train", *words)
    photo = own / f"{prefix}3.png"
    command = (here / "outputs" / "mine", "--training-photos", own)
    with served(here / "x", *command) as url, opened(url, width=390) as driver:
        files = [("photos", ("3.png", photo.read_bytes()))]
        data = {"training_photos": True, "top": 3, "threshold": 0}
        [row] = httpx.post(f"{url}/api/predict", files=files, data=data).json()
        expected = []
        for item in row["predictions"]:
            for other in item["training_photos"]:
                expected.append(f"+{other['contribution']:.2f} {other['image']}")

        driver.find_element(By.ID, "photos").send_keys(str(photo))
        driver.find_element(By.ID, "threshold").send_keys(Keys.HOME)
        captions = "[...document.querySelectorAll('.evidence figcaption')].map(e => e.textContent)"
        waited(driver, f"{captions}.length === {len(expected)}")
        assert driver.execute_script(f"return {captions}") == expected
        waited(driver, "[...document.images].every(image => image.naturalWidth > 10)")
        edges = (
            "[...document.querySelectorAll('.evidence img')].map(e => e.getBoundingClientRect())"
        )
        assert max(edge["right"] for edge in driver.execute_script(f"return {edges}")) < 390
        driver.find_element(By.ID, "training").click()
        waited(driver, f"{count('.evidence')} === 0")
        check_quiet(driver, url)
