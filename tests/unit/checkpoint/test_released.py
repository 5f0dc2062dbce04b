"""Files in the layouts of the authors; see also tests/full/checkpoint."""

from pathlib import Path

import fill
import numpy as np
import official
import pytest
import torch

from mldec.backbones import TimmBackbone
from mldec.checkpoint import load_model, released
from mldec.checkpoint.loading import initialize
from mldec.errors import CheckpointError, UserError
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


def test_released_file_gives_official_logits(path):
    loaded = load_model(path)
    assert (loaded.transform.image_size, loaded.weights, loaded.of_run) == (224, "raw", False)
    assert loaded.classes.names[0] == "person"
    assert not loaded.classes.exclusive
    with torch.no_grad():
        logits = loaded.model(torch.from_numpy(fill.images(224))).numpy()
    expected = np.load(official.NUMBERS / "tresnet_m_coco_224.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("container", "prefix"), [("model", ""), ("state_dict", "module."), ("ema", ""), (None, "")]
)
def test_containers_prefixes_and_counters_are_ignored(medium, container, prefix):
    norms = [key.removesuffix("running_mean") for key in medium if key.endswith("running_mean")]
    state = medium | {f"{norm}num_batches_tracked": torch.tensor(7) for norm in norms}
    state = {prefix + key: value for key, value in state.items()}
    ours = released.tensors({container: state, "epoch": 3} if container else state)
    expected = released.tensors({"model": medium})
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_scales_are_converted_once(medium):
    ours = released.tensors({"model": medium})
    name = "backbone.network.body.layer1.0.conv1.bn.weight"
    weight = medium["body.layer1.0.conv1.1.weight"]
    assert (weight < 0).any()
    assert torch.equal(ours[name], weight.abs() + 1e-5)

    # timm's own layout is batch norm already.
    again = released.tensors({key.removeprefix("backbone.network."): t for key, t in ours.items()})
    assert torch.equal(again[name], ours[name])


def test_known_class_names_match_the_lists(sample_data):
    lists = sample_data / "label_embeddings"
    for name, count in (("coco80_category_id_order.txt", 80), ("voc20.txt", 20)):
        assert list(released.KNOWN_NAMES[count]) == (lists / name).read_text().split("\n")[:count]


def test_names_are_cleaned_and_disambiguated(medium):
    odd = {3: '"Tree"', 4: " 'Tree'", 5: "O'Hare"}
    names = {str(index): f"thing {index}" for index in range(80) if index not in odd} | odd
    classes = converted({"model": medium, "idx_to_class": names}).classes
    assert classes.names[2:6] == ("thing 2", "Tree (3)", "Tree (4)", "O'Hare")


def test_given_names_replace_names_of_the_file(medium):
    state = {"model": medium, "idx_to_class": {0: "a"}}
    names = [f"thing {index}" for index in range(80)]
    checkpoint = converted(state, names=names)
    assert checkpoint.classes.names == tuple(names)
    # The data set is known by its class names only.
    assert checkpoint.config["data"] == {"image_size": 224}
    assert converted({"model": medium}).config["data"]["_target_"].endswith(".coco")
    assert "loss" not in checkpoint.config


def test_zero_shot_file_has_word_vectors_without_names(medium):
    state = official.zero_shot_file(medium)
    classes = converted(state, "zsl.pth", 64).classes
    assert classes.names == ()
    assert classes.word_vectors.shape == (0, 300)
    # Word vectors as wide as the decoder are not projected.
    del state["head.wordvec_proj.weight"], state["head.wordvec_proj.bias"]
    assert converted(state, "zsl.pth", 64).config["head"]["word_dim"] == 768


def test_init_loads_fitting_tensors(medium, tmp_path):
    start = {key: value for key, value in medium.items() if "duplicate_pooling" not in key}
    torch.save({"model": start}, tmp_path / "start.pth")
    model = Classifier(TimmBackbone("tresnet_m"), MLDecoder(2048, 20))
    report = initialize(model, tmp_path / "start.pth")
    assert "(head.queries)" in report
    assert "(head.pool_bias, head.pool_weight)" in report
    weight = medium["body.conv1.1.weight"].abs() + 1e-5
    assert torch.equal(model.backbone.network.body.conv1.bn.weight.data, weight)


@pytest.mark.parametrize(
    ("lost", "more", "name"),
    [
        ("head.", {}, "head.fc_weight"),
        (POOL, {POOL: torch.zeros(10**12, 0, 1)}, "head.pool_bias"),
        ("-", {"body.layer1.1.conv9.0.weight": torch.zeros(1)}, "body.layer1.1.conv9"),
    ],
)
def test_unfitting_file_raises_an_error(medium, tmp_path, lost, more, name):
    state = {key: value for key, value in medium.items() if not key.startswith(lost)}
    torch.save({"model": state | more}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"^{tmp_path / FILE} .*{name}"):
        load_model(tmp_path / FILE)


def test_missing_or_wrong_options_raise_an_error(medium):
    for file, options, name in (
        ("renamed.pth", {}, "--image-size"),
        (FILE, {"image_size": 100}, "--image-size 100"),
        (FILE, {"names": ["a", "b"]}, "--class-names"),
    ):
        with pytest.raises(UserError, match=name):
            converted({"model": medium}, file, **options)


def test_unknown_classes_are_numbered(medium):
    head = {"head.fc.weight": torch.zeros(3, 2048), "head.fc.bias": torch.zeros(3)}
    state = {key: value for key, value in medium.items() if not key.startswith("head.")} | head
    checkpoint = converted(state, "renamed.pth", 96)
    assert checkpoint.classes.names == ("class 0", "class 1", "class 2")
    assert checkpoint.transform.image_size == 96
