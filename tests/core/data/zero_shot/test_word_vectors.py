import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_towers import clip_folder
from support import made

from mldec.data.readers.coco import coco_zsl
from mldec.data.readers.nuswide import nuswide_official, nuswide_zsl
from mldec.data.text_encoder import TextEncoder, read_templates
from mldec.data.word_vectors import VectorSettings, word_vectors
from mldec.errors import ConfigError, DataError

Save = Callable[[str, Any], Path]
ARRAY = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def test_a_file_and_its_hash(save: Save) -> None:
    path = save("glove.txt", "sky 1 2\ndog 3 4\nsea 5 6\n")
    names, queries, origin = word_vectors(str(path), ["sea", "sky"])
    assert names == ("sea", "sky")
    assert queries.tolist() == [[5, 6], [1, 2]]
    assert origin.source == "glove.txt"
    assert origin.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert origin.templates == ()


@pytest.mark.parametrize("form", ["text", "array"])
def test_optional_names_may_be_missing(form: str, save: Save, caplog) -> None:
    text = "sky 1 2\ndog 3 4\nhot 5 6\n"
    path = save("v.txt", text) if form == "text" else save("v.npy", ARRAY)
    made_of = word_vectors(
        str(path), ["dog"], optional=["sea", "sky", "hot dog"], order=["sky", "dog", "x"]
    )
    if form == "text":
        # A name of several words is their mean; nobody asked for this one, so nothing is said.
        assert made_of.names == ("dog", "sky", "hot dog")
        assert made_of.queries.tolist() == [[3, 4], [1, 2], [4, 5]]
        assert not caplog.messages
    else:
        assert made_of.names == ("dog", "sky")
        assert made_of.queries.tolist() == ARRAY[[1, 0]].tolist()
    with pytest.raises(DataError, match="1 of 2 names have no vector: sea"):
        word_vectors(str(path), ["dog", "sea"], order=["sky", "dog", "x"])


def test_a_relative_file_is_in_the_folder_of_the_data(save: Save, tmp_path: Path) -> None:
    save("v.npy", ARRAY)
    settings = VectorSettings(vectors="v.npy")
    names = ["sky", "dog", "sea"]
    assert settings.of_classes(tmp_path, ["sea"], names).queries.tolist() == ARRAY[[2]].tolist()
    save("v.txt", "sea\nsky\ndog\n")
    assert settings.of_classes(tmp_path, ["sea"], names).queries.tolist() == ARRAY[[0]].tolist()


def test_a_text_encoder_with_prompts(tmp_path: Path) -> None:
    source = f"clip:{clip_folder(tmp_path / 'model')}"
    encoder, cache = TextEncoder.open(source), str(tmp_path / "cache")
    (tmp_path / "mine.txt").write_text("my {}\nyour {}\n")

    for prompts in ("a photo of a {}.", "simple7", "mine.txt"):
        settings = VectorSettings(vectors=source, prompts=prompts, cache_dir=cache)
        names, queries, origin = settings.of_classes(tmp_path, ["ox", "dog"], [])
        assert names == ("ox", "dog")
        templates = read_templates(prompts, tmp_path)
        torch.testing.assert_close(queries, encoder.encode_names(names, templates))
        assert (origin.source, origin.sha256) == (source, encoder.sha256)
        assert origin.templates == templates
        assert origin.fault() is None


def test_names_that_cannot_be(save: Save) -> None:
    path = save("v.txt", "sky 1 2\n")
    for source in (str(path), "clip:ViT-B-32"):
        with pytest.raises(DataError, match="classes 0 and 1 are both called 'sky'"):
            word_vectors(source, ["sky", "sky"])


def test_prompts_of_a_file_have_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"^data\.prompts 'clip80' has no effect on the vectors"):
        VectorSettings(prompts="clip80")


@pytest.mark.parametrize("reader", [nuswide_zsl, nuswide_official, coco_zsl])
def test_every_zero_shot_reader_has_the_settings(reader: Any, tmp_path: Path) -> None:
    (tmp_path / "some file").touch()
    with pytest.raises(ConfigError, match=r"^data\.prompts"):
        made(reader, root=str(tmp_path), vectors="v.txt", prompts="clip80")
