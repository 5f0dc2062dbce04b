"""The faults of seeded_faults.py exist in the package, and their tests exist."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "seeded_faults.py"


def test_faults_and_tests_exist():
    script = runpy.run_path(str(SCRIPT))
    faults = script["read_faults"]()
    assert [fault.number for fault in faults] == list(range(1, 81))
    assert {fault.subject for fault in faults} == script["TESTS"].keys()
    assert all(fault.old != fault.new for fault in faults)
    for fault in faults:
        assert script["place_of"](fault.old, SCRIPT.parents[2])
    for patterns in script["TESTS"].values():
        for pattern in patterns.split():
            assert list(SCRIPT.parents[2].glob(f"tests/{pattern}")), pattern
