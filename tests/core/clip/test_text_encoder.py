import open_clip
import pytest
import torch
from clip_towers import clip_folder, siglip_folder

from mldec.data.text_encoder import BATCH_SIZE, TextEncoder, read_templates


@pytest.mark.parametrize("folder", [clip_folder, siglip_folder])
def test_vectors_are_those_of_open_clip(folder, tmp_path) -> None:
    path = folder(tmp_path / "model")
    encoder = TextEncoder.open(f"clip:{path}")

    # More than one batch, and a text that is longer than the context.
    texts = [f"thing {number}" for number in range(BATCH_SIZE + 3)] + ["zebra " * 50]
    model = open_clip.create_model(f"local-dir:{path}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{path}")(texts)
    with torch.no_grad():
        wanted = model.encode_text(tokens, normalize=True)

    vectors = encoder.encode(texts)
    torch.testing.assert_close(vectors, wanted, atol=1e-6, rtol=1e-5)
    assert vectors.dtype == torch.float32
    assert not vectors.is_inference()
    assert not vectors.requires_grad
    assert len({tuple(row) for row in vectors.tolist()}) == len(texts)

    assert encoder.encode([]).shape == (0, encoder.width)


def test_images_are_not_kept(tmp_path) -> None:
    encoder = TextEncoder.open(f"clip:{clip_folder(tmp_path / 'model')}")
    assert not hasattr(encoder._model, "visual")
    assert encoder.source.folder == tmp_path / "model"
    assert len(encoder.sha256) == 64


def test_templates_are_averaged_as_in_clip(tmp_path) -> None:
    path = clip_folder(tmp_path / "model")
    encoder = TextEncoder.open(f"clip:{path}")
    templates = read_templates("clip80", tmp_path)
    names = ["zebra", "traffic jam", "ox", "tea"]

    model = open_clip.create_model(f"local-dir:{path}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{path}")
    # The library's own classifier, its weights [D, K].
    wanted = open_clip.build_zero_shot_classifier(
        model, tokenizer, names, open_clip.OPENAI_IMAGENET_TEMPLATES, num_classes_per_batch=None
    )
    vectors = encoder.encode_names(names, templates)
    torch.testing.assert_close(vectors, wanted.T, atol=1e-6, rtol=1e-5)
    assert encoder.encode_names([], templates).shape == (0, encoder.width)
