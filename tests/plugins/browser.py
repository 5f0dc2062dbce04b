"""Chromium without a window, for tests of pages that people look at."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

NEEDED = ("chromium", "chromedriver")  # of Debian's packages chromium and chromium-driver

# For a machine without a screen and without network, and for containers.
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-background-networking",
)


@contextmanager
def opened(page: Path | str, *, width: int) -> Iterator[webdriver.Chrome]:
    """Open a page in a window of this width in pixels; skip the test where there is no Chromium.

    Args:
        page: a file, or an address.
        width: of the window.
    """
    for name in NEEDED:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed (.ci/run installs it)")

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in FLAGS:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})

    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        # A window cannot be as narrow as a telephone: the page is shown on one that is made up.
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page if isinstance(page, str) else page.resolve().as_uri())
        yield driver
    finally:
        driver.quit()
