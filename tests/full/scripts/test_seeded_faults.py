"""scripts/seeded_faults.py on a checkout of two files."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "seeded_faults.py"
TABLE = """
losses: a sum is a difference
- return a + b
+ return a - b
losses: nobody asks for the sign
- return -a
+ return +a
"""


def test_the_table_is_whole() -> None:
    script = runpy.run_path(str(SCRIPT))
    faults = script["read_faults"]()
    assert [fault.number for fault in faults] == list(range(1, 61))
    assert {fault.subject for fault in faults} == script["TESTS"].keys()
    assert all(fault.old != fault.new for fault in faults)


def test_a_fault_is_caught_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "mldec").mkdir(parents=True)
    (checkout / "tests" / "losses").mkdir(parents=True)
    (checkout / "mldec" / "__init__.py").touch()
    code = "def add(a, b):\n    return a + b\n\n\ndef negative(a):\n    return -a\n"
    (checkout / "mldec" / "sums.py").write_text(code)
    test = "from mldec.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    (checkout / "tests" / "losses" / "test_sums.py").write_text(test)
    for words in (["init"], ["add", "."], ["commit", "-m", "one"]):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *words], cwd=checkout, check=True, capture_output=True)

    code = SCRIPT.read_text()
    start, end = code.index('FAULTS = r"""'), code.index('"""', code.index('FAULTS = r"""') + 13)
    script = tmp_path / "seeded_faults.py"
    script.write_text(f'{code[:start]}FAULTS = r"""{TABLE}{code[end:]}')
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [str(script), str(checkout), "--json", str(found)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")

    assert stop.value.code == 1
    content = json.loads(found.read_text())
    assert (content["caught"], content["of"]) == (1, 2)
    first, second = content["faults"]
    assert first["caught_by"] == "tests/losses/test_sums.py::test_add"
    assert second["caught_by"] is None
    assert "nobody asks for the sign: not caught" in capsys.readouterr().out
