"""The addresses that the script asks for: those of the released files and of the data sets."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "ask_addresses.py"


def test_addresses_are_those_of_the_zoo_and_of_the_data_sets():
    script = runpy.run_path(str(SCRIPT))
    listed = script["addresses"]()
    assert any(address.endswith("tresnet_l_COCO__448_90_0.pth") for address in listed)
    assert any("VOCtrainval_06-Nov-2007.tar" in address for address in listed)
    assert script["expanded"]("http://a/{b,c}.txt") == ["http://a/b.txt", "http://a/c.txt"]
    assert not any(mark in address for address in listed for mark in "{}`|")
