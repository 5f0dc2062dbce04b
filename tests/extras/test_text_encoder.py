"""Text encoders of open_clip, templates, and cached vectors."""

import json
import shutil
import sys

import numpy as np
import open_clip
import pytest
import torch
from clip_models import CLIP, clip_folder, siglip_folder

from mldec.errors import ConfigError, UserError
from mldec.words.encoder import (
    BATCH_SIZE,
    ClipModel,
    ClipSource,
    encode_names,
    open_encoder,
    open_model,
    read_templates,
)

TEMPLATES = ("a {}", "the {}")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("clip") / "model")


@pytest.fixture
def register(tmp_path, monkeypatch):
    """Register a small model in open_clip."""
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIG_PATHS", [])
    monkeypatch.setattr("open_clip.factory._MODEL_CONFIGS", {})

    def register(name, config):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path / f"{name}.json")

    return register


def test_sources_are_absolute(tmp_path, clip, monkeypatch):
    (tmp_path / "weights.pt").touch()
    (tmp_path / "link").symlink_to(clip)
    monkeypatch.chdir(tmp_path)
    file, link = tmp_path / "weights.pt", f"local-dir:{tmp_path}/link"
    for text, model, weights, absolute in (
        ("clip:ViT-B-32", "ViT-B-32", "openai", "clip:ViT-B-32:openai"),
        ("clip:ViT-B-32:laion2b", "ViT-B-32", "laion2b", "clip:ViT-B-32:laion2b"),
        ("clip:ViT-B-32:weights.pt", "ViT-B-32", str(file), f"clip:ViT-B-32:{file}"),
        ("clip:link", link, None, f"clip:{tmp_path}/link"),
        ("clip:local-dir:link", link, None, f"clip:{tmp_path}/link"),
        ("clip:hf-hub:owner/name", "hf-hub:owner/name", None, "clip:hf-hub:owner/name"),
    ):
        source = ClipSource.parse(text)
        assert (source.text, source.model, source.weights) == (text, model, weights)
        assert source.absolute == absolute
        again = ClipSource.parse(absolute)
        assert (again.model, again.weights) == (model, weights)
        assert source.file == (file if weights == str(file) else None)
        assert source.folder == (tmp_path / "link" if model == link else None)


def test_unavailable_models_raise_an_error(tmp_path, clip, register):
    weights = clip / "open_clip_model.safetensors"
    register("Tiny", CLIP)
    register("Wide", {**CLIP, "embed_dim": 24})
    assert open_model(f"clip:Tiny:{weights}").width == 16
    (tmp_path / "page.pt").write_text("<html>")
    for source, name in (
        ("clip::openai", "clip::openai"),
        (f"clip:{tmp_path}", str(tmp_path)),
        (f"clip:Tiny:{tmp_path}/none.pt", "none.pt"),
        ("clip:Tinny", "'Tiny'"),
        ("clip:Tiny:webly", "'webly'"),
        (f"clip:Wide:{weights}", "size mismatch|Error"),
        (f"clip:Tiny:{tmp_path / 'page.pt'}", "page.pt"),
    ):
        with pytest.raises(ConfigError, match=name) as caught:
            open_model(source)
        assert "\n" not in str(caught.value)


def test_third_party_folder_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path = siglip_folder(tmp_path / "model")
    file = path / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]["trust_remote_code"] = True
    file.write_text(json.dumps(config))
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))

    # Without our setting open_clip runs the file.
    with pytest.raises(AttributeError, match="'Mine'"):
        open_clip.get_tokenizer(f"local-dir:{path}")
    (tmp_path / "ran").unlink()
    with pytest.raises(ConfigError, match=str(path)):
        open_model(f"clip:{path}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("folder", [clip_folder, siglip_folder])
def test_vectors_equal_open_clip(folder, tmp_path):
    path = folder(tmp_path / "model")
    encoder = open_encoder(f"clip:{path}")
    # More than one batch, and a text that is longer than the context.
    texts = [f"thing {number}" for number in range(BATCH_SIZE + 3)] + ["zebra " * 50]
    model = open_clip.create_model(f"local-dir:{path}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{path}")
    with torch.no_grad():
        wanted = model.encode_text(tokenizer(texts), normalize=True)
    vectors = encoder.encode_names(texts, ("{}",))
    torch.testing.assert_close(vectors, wanted, atol=1e-6, rtol=1e-5)
    assert not vectors.requires_grad
    assert len({tuple(row) for row in vectors.tolist()}) == len(texts)
    assert not hasattr(encoder.model, "visual")
    assert encoder.source.folder == path
    if folder is siglip_folder:
        return

    # The library's own classifier, its weights [D, K].
    names, templates = ["zebra", "traffic jam", "ox", "tea"], read_templates("clip80", tmp_path)
    wanted = open_clip.build_zero_shot_classifier(
        model, tokenizer, names, open_clip.OPENAI_IMAGENET_TEMPLATES, num_classes_per_batch=None
    )
    vectors = encoder.encode_names(names, templates)
    torch.testing.assert_close(vectors, wanted.T, atol=1e-6, rtol=1e-5)
    assert encoder.encode_names([], templates).shape == (0, encoder.width)


@pytest.fixture
def asked(monkeypatch):
    """Record the names that are encoded."""
    names_of_calls = []
    encode = ClipModel.encode_names

    def recorded(self, names, templates):
        names_of_calls.append(list(names))
        return encode(self, names, templates)

    monkeypatch.setattr(ClipModel, "encode_names", recorded)
    return names_of_calls


def test_names_are_encoded_once(clip, tmp_path, asked, monkeypatch):
    source, cache = f"clip:{clip}", str(tmp_path)
    first, hash_of_weights = encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    # Known names are not encoded again.
    second, _ = encode_names(source, ["dog", "ox"], TEMPLATES, cache)
    # Other templates are other vectors.
    other, _ = encode_names(source, ["ox"], ("{}",), cache)
    assert asked == [["ox", "cat"], ["dog"], ["ox"]]
    assert torch.equal(second[1], first[0])
    assert not torch.allclose(other[0], first[0])
    encoder = open_encoder(source)
    torch.testing.assert_close(second, encoder.encode_names(["dog", "ox"], TEMPLATES))
    assert hash_of_weights == encoder.sha256

    # Known names need no library.
    monkeypatch.setitem(sys.modules, "open_clip", None)
    again, same_hash = encode_names(source, ["cat", "ox"], TEMPLATES, cache)
    assert torch.equal(again.flip(0), first)
    assert same_hash == hash_of_weights


def test_changed_weights_invalidate_the_cache(clip, tmp_path, asked):
    source, cache = f"clip:{tmp_path / 'model'}", tmp_path / "cache"
    shutil.copytree(clip, tmp_path / "model")
    first, first_hash = encode_names(source, ["ox"], TEMPLATES, str(cache))
    shutil.rmtree(tmp_path / "model")
    clip_folder(tmp_path / "model", seed=1)
    second, second_hash = encode_names(source, ["ox"], TEMPLATES, str(cache))
    assert first_hash != second_hash
    assert not torch.allclose(first, second)

    # All names are encoded again with other weights of a tag.
    for file in cache.iterdir():
        with np.load(file) as stored:
            content = dict(stored)
        np.savez(file, **{**content, "sha256": "0" * 64})
    encode_names(source, ["ox", "cat"], TEMPLATES, str(cache))
    assert asked == [["ox"], ["ox"], ["ox", "cat"]]


def test_template_lists_equal_open_clip(tmp_path):
    lists = {
        "clip80": open_clip.OPENAI_IMAGENET_TEMPLATES,
        "simple7": open_clip.SIMPLE_IMAGENET_TEMPLATES,
    }
    for name, functions in lists.items():
        filled = [template.replace("{}", "zebra") for template in read_templates(name, tmp_path)]
        assert filled == [function("zebra") for function in functions]


def test_templates_from_a_sentence_or_file(tmp_path, monkeypatch):
    assert read_templates("a photo of a {}.", tmp_path) == ("a photo of a {}.",)
    (tmp_path / "mine.txt").write_text("a {}\n\nthe {} and the {}\n")
    assert read_templates("mine.txt", tmp_path) == ("a {}", "the {} and the {}")

    (tmp_path / "wrong.txt").write_text("a {}\na cat\n")
    (tmp_path / "empty.txt").touch()
    for setting, name in (
        ("a photo", "'a photo'"),
        ("clip8", "'clip80'"),
        ("", "data.prompts"),
        ("empty.txt", r"empty\.txt"),
        ("wrong.txt", "'a cat'"),
    ):
        with pytest.raises(UserError, match=name):
            read_templates(setting, tmp_path)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[text\]'$"):
        read_templates("clip80", tmp_path)
