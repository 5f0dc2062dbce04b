"""The URLs that ask_addresses.py checks."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "ask_addresses.py"


def test_urls_of_the_zoo_and_the_data_sets():
    script = runpy.run_path(str(SCRIPT))
    urls = script["find_urls"]()
    assert any(url.endswith("tresnet_l_COCO__448_90_0.pth") for url in urls)
    assert any("VOCtrainval_06-Nov-2007.tar" in url for url in urls)
    assert script["expand"]("http://a/{b,c}.txt") == ["http://a/b.txt", "http://a/c.txt"]
    assert not any(mark in url for url in urls for mark in "{}`|")
