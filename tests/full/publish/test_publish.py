"""A run is uploaded to a hub and used from there."""

import json
import re
import sys
from pathlib import Path

import fake_hub
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from mldec.checkpoint import load_model
from mldec.tools.predict.engine import TorchEngine

WORDS = ["--plugin", "patches"]


def test_published_run_has_the_same_scores(cli, hub, digits_run, few_resamples, here, monkeypatch):
    few = [*WORDS, "data.val_images=40"]
    cli.out("report", digits_run, *few, "--out", "r.html", "--json", "r.json")
    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    words = [*WORDS, "--results", "r.json", "--license", "mit"]
    out = cli.out("publish", digits_run, "me/digits", *words)
    address = re.search(r"^published: (hf:me/digits@[0-9a-f]{40})$", out, re.MULTILINE)
    assert address is not None, out

    # The repository has the card, the settings and the weights, without local paths.
    files = hub.repositories["me/digits"].commits[address[1][-40:]]
    assert files.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    for name in ("README.md", "config.json"):
        for folder in (here, digits_run.parent, Path(sys.executable).parent):
            assert str(folder).encode() not in files[name]
    card = ModelCard(files["README.md"].decode())
    report = json.loads(Path("r.json").read_text())
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values["mAP"] == pytest.approx(report["metrics"]["mAP"], abs=1e-4)
    shown = re.search(r"\| mAP \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", card.text)
    assert shown is not None
    expected = [report["metrics"]["mAP"], *report["intervals"]["mAP"]]
    assert [float(text) for text in shown.groups()] == pytest.approx(expected, abs=0.006)

    # Scores are bit-equal to the run, from the branch and from the commit.
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 64), np.uint8))
    own = TorchEngine(load_model(digits_run, plugins=["patches"])).answer([image])
    for name in ("hf:me/digits", "hf:me/digits@main", address[1]):
        other = TorchEngine(load_model(name, plugins=["patches"])).answer([image])
        assert torch.equal(own.scores, other.scores), name

    # The example of the card runs.
    [example] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save("photo.jpg")
    exec(compile(example, "README.md", "exec"), {})
