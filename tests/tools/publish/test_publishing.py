"""From a checkpoint to a repository and back, as a user does it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fake_hub
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from support import one_line

from mldec.checkpoint import load_model
from mldec.predict.engine import TorchEngine
from mldec.publish import check_new_folder, parser

Cli = Callable[..., tuple[int, str, str]]
WORDS = ["--plugin", "patches"]


def test_a_run_is_published_and_used_from_the_hub(
    cli: Cli,
    hub: fake_hub.Hub,
    digits_run: Path,
    few_resamples: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    few = [*WORDS, "data.val_images=40"]
    status, _, err = cli("report", digits_run, *few, "--out", "r.html", "--json", "r.json")
    assert status == 0, err
    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    status, out, err = cli(
        *("publish", digits_run, "me/digits", *WORDS, "--results", "r.json", "--license", "mit")
    )
    assert status == 0, err
    address = re.fullmatch(r"published: (hf:me/digits@[0-9a-f]{40})\n", out)
    assert address is not None, out

    # What lies there is the card, the settings and the weights, without paths of this machine.
    files = hub.repositories["me/digits"].commits[address[1][-40:]]
    assert files.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    for name in ("README.md", "config.json"):
        for folder in (tmp_path, digits_run.parent, Path(sys.executable).parent):
            assert str(folder).encode() not in files[name]
    card = ModelCard(files["README.md"].decode())
    report = json.loads(Path("r.json").read_text())
    assert card.data.license == "mit"
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values["mAP"] == pytest.approx(report["metrics"]["mAP"], abs=1e-4)
    low, high = report["intervals"]["mAP"]
    shown = re.search(r"\| mAP \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", card.text)
    assert shown is not None
    assert [float(text) for text in shown.groups()] == pytest.approx(
        [report["metrics"]["mAP"], low, high], abs=0.006
    )

    # Bit for bit the scores of the run, from the branch and from the commit.
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 64), np.uint8))
    own = TorchEngine(load_model(digits_run, plugins=["patches"])).answer([image])
    for name in ("hf:me/digits", "hf:me/digits@main", address[1]):
        other = TorchEngine(load_model(name, plugins=["patches"])).answer([image])
        assert torch.equal(own.scores, other.scores), name
    tables = [
        cli("evaluate", name, *few)[1].splitlines()[-18:] for name in (digits_run, address[1])
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) > 5

    # The example of the card runs as it stands.
    [example] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save("photo.jpg")
    exec(compile(example, "README.md", "exec"), {})


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, in a process."""
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_real_process_publishes(hub: fake_hub.Hub, digits_run: Path) -> None:
    done = run("mldec.publish", digits_run, "me/digits", *WORDS, HF_TOKEN=fake_hub.WRITER)
    [_, commit] = hub.repositories["me/digits"].commits
    assert f"published: hf:me/digits@{commit}\n" in done.stdout
    assert "the card has neither intervals nor a table of classes" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_a_real_process_predicts(
    cli: Cli, hub: fake_hub.Hub, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(tmp_path / "photo.png")
    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    assert cli("publish", digits_run, "me/digits", *WORDS)[0] == 0

    rows = []
    for name in ("hf:me/digits", digits_run):
        done = run("mldec.predict", name, tmp_path / "photo.png", *WORDS, "--json", "-")
        rows.append(json.loads(done.stdout))
    assert rows[0] == rows[1] != []


def test_a_dry_run_asks_no_network_and_its_folder_is_a_checkpoint(
    cli: Cli, hub: fake_hub.Hub, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["publish", digits_run, "me/digits", *WORDS, "--dry-run", "files/mine"]
    status, out, err = cli(*words)
    assert status == 0, err
    assert out.splitlines() == [
        "the card has neither intervals nor a table of classes: pass --results with a file of "
        "mldec.report --json",
        "the card states no licence of the model: pass --license, such as apache-2.0",
        "files/mine: the files for me/digits; not uploaded",
    ]
    assert hub.asked == []
    folder = Path("files/mine")
    status, _, err = cli(*words[:-1], "raw", "--weights", "raw")
    assert status == 0, err
    assert load_model("raw", plugins=["patches"]).weights == "raw"
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert load_model(folder, plugins=["patches"]).weights in ("ema", "raw")

    # It can be published again, and is not written over.
    assert cli("publish", folder, "me/digits", *WORDS, "--dry-run", "again")[0] == 0
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == Path("again", name).read_bytes()
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "--dry-run files/mine: it holds files")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["{run}", "mine"], ["mldec: mine: 'mine' is no repository; write owner/name"]),
        (["{run}", "me/mine"], ["there is no token for the hub", "--dry-run FOLDER"]),
        (["{run}", "me/mine", "--dry-run", "file"], ["--dry-run file:", "is a file"]),
        (["{run}", "me/mine", "--dry-run", "x", "--private"], ["--private has no effect"]),
        (["none.pt", "me/mine", "--dry-run", "x"], ["no file at none.pt"]),
        (["{run}", "me/mine", "--dry-run", "x"], ["cannot be used", "patches"]),
        (["{run}", "me/mine", "--dry-run", "x", "--results", "file", *WORDS], ["file", "JSON"]),
    ],
)
def test_wrong_words_are_one_line_and_write_nothing(
    cli: Cli,
    hub: fake_hub.Hub,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    status, _, err = cli("publish", *(word.format(run=digits_run) for word in words))
    assert status == 1
    one_line(err, *parts)
    assert not Path("x").exists()
    assert hub.asked == []


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    args = parser().parse_args(["x", "me/mine", "--dry-run", str(tmp_path)])
    check_new_folder(args)
    check_new_folder(parser().parse_args(["x", "me/mine", "--dry-run", str(tmp_path / "new")]))
