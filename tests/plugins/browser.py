"""Headless Chromium, for tests of web pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

PROGRAMS = ("chromium", "chromedriver")  # Debian packages chromium and chromium-driver

# Options for containers, and for machines without a screen or a network.
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-background-networking",
)


@contextmanager
def opened(page: Path | str, *, width: int) -> Iterator[webdriver.Chrome]:
    """Open a page. Skip the test if Chromium is not installed.

    Args:
        page: File or URL.
        width: Width of the window in pixels.
    """
    for name in PROGRAMS:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed (.ci/run installs it)")

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in FLAGS:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})

    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        # A window cannot be as narrow as a phone, so the width of the device is emulated.
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page if isinstance(page, str) else page.resolve().as_uri())
        yield driver
    finally:
        driver.quit()
