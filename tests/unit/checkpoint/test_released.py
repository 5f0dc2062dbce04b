"""Files in the layouts of the authors; more of their logits are in tests/full/checkpoint."""

from pathlib import Path

import fill
import numpy as np
import official
import pytest
import torch

from mldec.backbones import TimmBackbone
from mldec.checkpoint import load_model, released
from mldec.checkpoint.loading import initialise
from mldec.errors import CheckpointError, DataError
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier

FILE = "tresnet_m_COCO_224_84_2.pth"
POOL = "head.decoder.duplicate_pooling"


@pytest.fixture(scope="module")
def medium():
    """The rebuilt weights of TResNet-M for COCO, under the released names."""
    return official.rebuilt(official.read("tresnet_m_coco_224.keys"))


@pytest.fixture(scope="module")
def path(medium, tmp_path_factory):
    """A file of them; tests must not change it."""
    path = tmp_path_factory.mktemp("released") / FILE
    torch.save({"model": medium}, path)
    return path


def converted(state, file=FILE, image_size=None, names=None):
    return released.convert(state, Path(file), image_size=image_size, names=names)


def test_a_released_file_gives_the_official_logits(path):
    loaded = load_model(path)
    assert (loaded.transform.image_size, loaded.weights, loaded.of_run) == (224, "raw", False)
    assert loaded.classes.names[0] == "person"
    assert not loaded.classes.exclusive
    with torch.no_grad():
        logits = loaded.model(torch.from_numpy(fill.images(224))).numpy()
    expected = np.load(official.NUMBERS / "tresnet_m_coco_224.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("container", ["model", "state_dict", "ema", None])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_containers_prefixes_and_counters_change_nothing(medium, container, prefix):
    norms = [key.removesuffix("running_mean") for key in medium if key.endswith("running_mean")]
    state = medium | {f"{norm}num_batches_tracked": torch.tensor(7) for norm in norms}
    state = {prefix + key: value for key, value in state.items()}
    ours = released.tensors({container: state, "epoch": 3} if container else state)
    expected = released.tensors({"model": medium})
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_scales_become_positive_exactly_once(medium):
    ours = released.tensors({"model": medium})
    name = "backbone.network.body.layer1.0.conv1.bn.weight"
    weight = medium["body.layer1.0.conv1.1.weight"]
    assert (weight < 0).any()
    assert torch.equal(ours[name], weight.abs() + 1e-5)

    # timm's own layout is batch norm already.
    again = released.tensors({key.removeprefix("backbone.network."): t for key, t in ours.items()})
    assert torch.equal(again[name], ours[name])


def test_known_lists_stand_in_for_names_that_a_file_lacks(sample_data):
    lists = sample_data / "label_embeddings"
    for name, count in (("coco80_category_id_order.txt", 80), ("voc20.txt", 20)):
        assert list(released.KNOWN_NAMES[count]) == (lists / name).read_text().split("\n")[:count]


def test_names_are_cleaned_and_kept_apart(medium):
    odd = {3: '"Tree"', 4: " 'Tree'", 5: "O'Hare"}
    names = {str(index): f"thing {index}" for index in range(80) if index not in odd} | odd
    classes = converted({"model": medium, "idx_to_class": names}).classes
    assert classes.names[2:6] == ("thing 2", "Tree (3)", "Tree (4)", "O'Hare")


def test_given_names_replace_those_of_a_file(medium):
    # Also names that are too few.
    state = {"model": medium, "idx_to_class": {0: "a"}}
    names = [f"thing {index}" for index in range(80)]
    assert converted(state, names=names).classes.names == tuple(names)
    with pytest.raises(ValueError, match="it has 80 classes, the file names 1"):
        converted(state)
    with pytest.raises(ValueError, match="it has 80 classes, the file names 2"):
        converted(state, names=["a", "b"])


def test_a_zero_shot_file_has_word_vectors_in_place_of_classes(medium):
    state = official.zero_shot_file(medium)
    classes = converted(state, "zsl.pth", 64).classes
    assert classes.names == ()
    assert classes.word_vectors.shape == (0, 300)
    with pytest.raises(ValueError, match="it has 0 classes, the file names 2"):
        converted(state, "zsl.pth", 64, names=["a", "b"])

    # Word vectors as wide as the decoder are not projected.
    del state["head.wordvec_proj.weight"], state["head.wordvec_proj.bias"]
    assert converted(state, "zsl.pth", 64).config["head"]["word_dim"] == 768


def test_init_takes_what_fits_and_says_so(medium, tmp_path):
    start = {key: value for key, value in medium.items() if "duplicate_pooling" not in key}
    torch.save({"model": start}, tmp_path / "start.pth")
    model = Classifier(TimmBackbone("tresnet_m"), MLDecoder(2048, 20))
    report = initialise(model, tmp_path / "start.pth")
    assert "of another shape (head.queries)" in report
    assert "2 not in the file (head.pool_bias, head.pool_weight)" in report
    weight = medium["body.conv1.1.weight"].abs() + 1e-5
    assert torch.equal(model.backbone.network.body.conv1.bn.weight.data, weight)

    with torch.device("meta"):
        other = Classifier(TimmBackbone("tresnet_l"), MLDecoder(2432, 80))
    with pytest.raises(CheckpointError, match=r"is of another backbone: \d+ tensors are absent"):
        initialise(other, tmp_path / "start.pth")


@pytest.mark.parametrize(
    ("lost", "more", "fault"),
    [
        ("head.", {}, "misses head.fc_weight: it is incomplete, or a start for training"),
        (POOL, {}, "misses head.pool_weight"),
        ("body.layer4.2", {}, "a TResNet of blocks (3, 4, 11, 2)"),
        ("", {}, "is of no known network: its first tensors are none"),
        (POOL, {POOL: torch.zeros(10**12, 0, 1)}, "it misses head.pool_bias"),
        ("body.conv1.0", {"body.conv1.0.weight": torch.tensor(1.0)}, "IndexError"),
        ("-", {"body.layer1.1.conv9.0.weight": torch.zeros(1)}, "1 tensor is unexpected"),
        ("body.layer1.1.conv1.0", {}, "1 tensor is missing"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(medium, tmp_path, lost, more, fault):
    state = {key: value[:1] for key, value in medium.items() if not key.startswith(lost)}
    if "1 tensor" in fault:
        state = {key: value for key, value in medium.items() if not key.startswith(lost)}
    torch.save({"model": state | more}, tmp_path / FILE)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / FILE)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / FILE} ")
    assert fault in message
    assert "\n" not in message
    assert len(message) < 1500


def test_what_cannot_be_told_is_asked_for(medium, path):
    with pytest.raises(DataError, match="pass --image-size"):
        converted({"model": medium}, "renamed.pth")
    with pytest.raises(DataError, match="--image-size 100 is not a multiple of 32"):
        converted({"model": medium}, image_size=100)
    with pytest.raises(CheckpointError, match="pass --weights raw"):
        load_model(path, "ema")
    assert converted({"model": medium}, "renamed.pth", 96).transform.image_size == 96


def test_numbered_names_are_told(medium, caplog):
    head = {"head.fc.weight": torch.zeros(3, 2048), "head.fc.bias": torch.zeros(3)}
    state = {key: value for key, value in medium.items() if not key.startswith("head.")} | head
    checkpoint = converted(state)
    assert checkpoint.classes.names == ("class 0", "class 1", "class 2")
    assert f"{FILE} names no classes: they are numbered from 0 to 2" in caplog.text


def test_the_old_serialisation_is_read(medium, tmp_path):
    torch.save({"model": medium}, tmp_path / FILE, _use_new_zipfile_serialization=False)
    assert len(load_model(tmp_path / FILE).classes) == 80
