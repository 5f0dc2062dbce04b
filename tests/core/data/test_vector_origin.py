from typing import Any

import pytest

from mldec.data.types import MAX_SOURCE, VectorOrigin

HASH = "0123456789abcdef" * 4


def test_files_and_text_encoders() -> None:
    file = VectorOrigin("glove.txt", HASH)
    assert not file.is_encoder
    assert file.fault() is None
    assert file.described() == "glove.txt (sha256 0123456789ab)"

    encoder = VectorOrigin("clip:ViT-B-32:openai", HASH, ("a {}",))
    assert encoder.is_encoder
    assert encoder.fault() is None


@pytest.mark.parametrize(
    ("source", "sha256", "templates"),
    [
        ("", HASH, ()),
        (5, HASH, ()),
        ("x" * (MAX_SOURCE + 1), HASH, ()),
        ("glove.txt", "", ()),
        ("glove.txt", HASH[1:], ()),
        ("glove.txt", None, ()),
        ("glove.txt", HASH, ("a {}",)),
        ("clip:ViT-B-32", HASH, ()),
        ("clip:ViT-B-32", HASH, ["a {}"]),
        ("clip:ViT-B-32", HASH, ("a photo",)),
        ("clip:ViT-B-32", HASH, (5,)),
    ],
)
def test_values_of_a_stranger(source: Any, sha256: Any, templates: Any) -> None:
    assert VectorOrigin(source, sha256, templates).fault() is not None
