"""The table of seeded_faults.py fits the package; its faults are seeded by hand."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "seeded_faults.py"


def test_the_table_is_whole():
    script = runpy.run_path(str(SCRIPT))
    faults = script["read_faults"]()
    assert [fault.number for fault in faults] == list(range(1, 81))
    assert {fault.subject for fault in faults} == script["TESTS"].keys()
    assert all(fault.old != fault.new for fault in faults)
    for fault in faults:
        assert script["place_of"](fault.old, SCRIPT.parents[2])
