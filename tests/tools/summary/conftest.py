import json
from collections.abc import Callable
from pathlib import Path

import pytest

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write the folder of a run as far as the table needs it; return the folder of all runs."""

    def make(
        name: str, values: list[float | None], *, metric: str = "mAP", macs: int | None = 10**9
    ) -> Path:
        folder = tmp_path / "outputs" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.pt").touch()
        lines = [
            {"step": epoch, "epoch": epoch, "time": 1800 * epoch, f"val/{metric}": value}
            for epoch, value in enumerate(values, start=1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        facts = {"name": name, "command": "", "versions": {}, "commit": None, "epochs": 9}
        facts |= {"image_size": 64, "parameters": 7, "multiply_accumulates": macs}
        (folder / "run.json").write_text(json.dumps(facts))
        return folder.parent

    return make
