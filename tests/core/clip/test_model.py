import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest
import torch
from clip_towers import CLIP, clip_folder, siglip_folder
from safetensors.torch import load_file

from mldec.data.text_encoder import ClipSource, open_model
from mldec.errors import ConfigError


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip") / "model")


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict], None]:
    """Give a small model a name of open_clip: those that have one are large."""
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIG_PATHS", [])
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIGS", {})

    def register(name: str, config: dict) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path / f"{name}.json")

    return register


def fault(source: str) -> str:
    with pytest.raises(ConfigError) as error:
        open_model(source)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)


def test_sources(tmp_path: Path, clip: Path) -> None:
    file = tmp_path / "weights.pt"
    file.touch()
    for text, model, weights in (
        ("clip:ViT-B-32", "ViT-B-32", "openai"),
        ("clip:ViT-B-32:laion2b_s34b_b79k", "ViT-B-32", "laion2b_s34b_b79k"),
        (f"clip:ViT-B-32:{file}", "ViT-B-32", str(file)),
        (f"clip:{clip}", f"local-dir:{clip}", None),
        (f"clip:local-dir:{clip}", f"local-dir:{clip}", None),
        ("clip:hf-hub:owner/name", "hf-hub:owner/name", None),
    ):
        source = ClipSource.parse(text)
        assert (source.model, source.weights) == (model, weights)
        assert source.text == text
        assert source.file == (file if weights == str(file) else None)
        assert source.folder == (clip if weights is None and "hub" not in text else None)


def test_a_source_is_the_same_in_another_working_directory(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.pt").touch()
    monkeypatch.chdir(tmp_path)
    link = Path("link")
    link.symlink_to(clip)
    for text, anywhere in (
        ("clip:link", f"clip:{tmp_path}/link"),
        ("clip:local-dir:link", f"clip:{tmp_path}/link"),
        ("clip:ViT-B-32:weights.pt", f"clip:ViT-B-32:{tmp_path}/weights.pt"),
        ("clip:ViT-B-32", "clip:ViT-B-32:openai"),
        ("clip:hf-hub:owner/name", "clip:hf-hub:owner/name"),
    ):
        source = ClipSource.parse(text)
        assert source.anywhere == anywhere
        again = ClipSource.parse(anywhere)
        assert (again.model, again.weights) == (source.model, source.weights)


def test_sources_that_cannot_be(tmp_path: Path, clip: Path) -> None:
    assert "names no model" in fault("clip:")
    assert "names no model" in fault("clip::openai")
    assert "holds no open_clip_config.json" in fault(f"clip:{tmp_path}")
    assert f"no file at {tmp_path}/none.pt" in fault(f"clip:ViT-B-32:{tmp_path}/none.pt")
    assert f"write clip:{clip}" in fault(f"clip:ViT-B-32:{clip}")
    assert "no model 'ViT-B-23', and there is no such folder; did you mean 'ViT-" in (
        fault("clip:ViT-B-23:openai")
    )
    assert fault("clip:something").endswith("open_clip.list_models() names all")
    assert "no weights 'webly' of ViT-B-16-SigLIP2, and there is no such file; did you mean " in (
        fault("clip:ViT-B-16-SigLIP2:webly")
    )


def test_open_clip_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert fault("clip:ViT-B-32").endswith("pip install 'mldec[text]'")


@pytest.mark.parametrize("folder", [clip_folder, siglip_folder])
def test_a_folder_holds_all_of_a_model(folder, tmp_path: Path, monkeypatch) -> None:
    path = folder(tmp_path / "model")
    # Nothing may be asked of the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = torch.random.get_rng_state()
    ours = open_model(f"clip:{path}")
    assert torch.equal(torch.random.get_rng_state(), before)

    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{path}")
    theirs.eval()
    texts = ["a photo of a zebra.", "an ox"]
    tokens = open_clip.get_tokenizer(f"local-dir:{path}")(texts)
    assert torch.equal(ours.tokenizer(texts), tokens)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for got, wanted in zip(ours.model(images, tokens), theirs(images, tokens), strict=True):
            torch.testing.assert_close(got, wanted)

    assert not ours.model.training
    assert ours.width == 16
    assert ours.weights.name == "open_clip_model.safetensors"
    assert len(ours.sha256) == 64
    normalise = preprocess.transforms[-1]
    assert tuple(ours.preprocessing["mean"]) == tuple(normalise.mean)
    assert tuple(ours.preprocessing["std"]) == tuple(normalise.std)


def test_weights_that_do_not_fit(tmp_path: Path, clip: Path, register) -> None:
    weights = clip / "open_clip_model.safetensors"
    register("Tiny", CLIP)
    register("Wide", {**CLIP, "embed_dim": 24})
    register("Deep", {**CLIP, "text_cfg": {**CLIP["text_cfg"], "layers": 3}})
    assert open_model(f"clip:Tiny:{weights}").width == 16
    for name in ("Wide", "Deep"):
        assert "does not fit the model" in fault(f"clip:{name}:{weights}")

    (tmp_path / "page.pt").write_text("<html>")
    assert "cannot be read" in fault(f"clip:Tiny:{tmp_path / 'page.pt'}")

    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(clip / "open_clip_config.json", bare)
    assert "holds 0 files of weights" in fault(f"clip:{bare}")
    for name in ("one.pt", "two.pt"):
        torch.save(load_file(weights), bare / name)
    assert "holds 2 files of weights" in fault(f"clip:{bare}")
    (bare / "two.pt").unlink()
    assert open_model(f"clip:{bare}").weights == bare / "one.pt"


def test_a_stranger_s_folder_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path = siglip_folder(tmp_path / "model")
    file = path / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]["trust_remote_code"] = True
    file.write_text(json.dumps(config))
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))

    # Without the setting of ours the file would be run, so the trap is a real one.
    with pytest.raises(AttributeError, match="'Mine'"):
        open_clip.get_tokenizer(f"local-dir:{path}")
    (tmp_path / "ran").unlink()
    fault(f"clip:{path}")
    assert not (tmp_path / "ran").exists()


def test_configurations_that_are_none(tmp_path: Path, clip: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(clip, path)
    for content in (
        "[",
        "[1]",
        "{}",
        '{"model_cfg": 3}',
        '{"model_cfg": {"embed_dim": 3, "text_cfg": 5}}',
        '{"model_cfg": {"embed_dim": "x", "text_cfg": {}}}',
        '{"model_cfg": {"embed_dim": 3, "text_cfg": {}}}',
    ):
        (path / "open_clip_config.json").write_text(content)
        fault(f"clip:{path}")


def test_a_tokenizer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = siglip_folder(tmp_path / "model")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        assert fault(f"clip:{path}").endswith("needs transformers: pip install 'mldec[text]'")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    assert "its tokenizer cannot be had" in fault(f"clip:{path}")


def test_a_tag_says_the_activation_and_the_normalisation(
    clip: Path, tmp_path: Path, register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("Tiny", CLIP)
    tag = {
        "file": str(clip / "open_clip_model.safetensors"),
        "quick_gelu": True,
        "mean": (0.1, 0.2, 0.3),
    }
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "Tiny", {"mine": tag})

    opened = open_model("clip:Tiny:mine")
    activations = {type(module).__name__ for module in opened.model.modules()}
    assert "QuickGELU" in activations
    assert opened.preprocessing["mean"] == (0.1, 0.2, 0.3)
    assert opened.preprocessing["size"] == (32, 32)

    tag["file"] = str(tmp_path / "gone.pt")
    assert "cannot be read" in fault("clip:Tiny:mine")
    del tag["file"]
    monkeypatch.setattr("open_clip.pretrained.download_pretrained_from_url", lambda *a, **k: 1 / 0)
    tag["url"] = "https://example.org/x.pt"
    assert "cannot be downloaded" in fault("clip:Tiny:mine")
