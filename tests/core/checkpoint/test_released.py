"""Files in the layouts of the authors; more of their logits are in tests/full/checkpoint."""

from pathlib import Path
from typing import Any

import fill
import numpy as np
import official
import official_cvt
import pytest
import timm
import torch
from torch import Tensor

from mldec import build
from mldec.backbones import TimmBackbone
from mldec.checkpoint import Checkpoint, initialise, load_model, released
from mldec.checkpoint.loading import COMPUTED, match_tensors
from mldec.checkpoint.sources import RELEASED
from mldec.config.compose import parse
from mldec.errors import CheckpointError, DataError
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier

FILE = "tresnet_m_COCO_224_84_2.pth"
POOL = "head.decoder.duplicate_pooling"


@pytest.fixture(scope="module")
def medium() -> dict[str, Tensor]:
    """The rebuilt weights of TResNet-M for COCO, under the released names."""
    return official.rebuilt(official.read("tresnet_m_coco_224.keys"))


@pytest.fixture(scope="module")
def path(medium: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of them; tests must not change it."""
    path = tmp_path_factory.mktemp("released") / FILE
    torch.save({"model": medium}, path)
    return path


def converted(
    state: dict[Any, Any], file: str = FILE, image_size: int | None = None, names: Any = None
) -> Checkpoint:
    return released.convert(state, file, image_size=image_size, names=names)


def test_a_released_file_gives_the_official_logits(path: Path) -> None:
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
def test_containers_prefixes_and_counters_change_nothing(
    medium: dict[str, Tensor], container: str | None, prefix: str
) -> None:
    norms = [key.removesuffix("running_mean") for key in medium if key.endswith("running_mean")]
    state = medium | {f"{norm}num_batches_tracked": torch.tensor(7) for norm in norms}
    state = {prefix + key: value for key, value in state.items()}
    ours = released.tensors({container: state, "epoch": 3} if container else state)
    expected = released.tensors({"model": medium})
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_scales_become_positive_exactly_once(medium: dict[str, Tensor]) -> None:
    ours = released.tensors({"model": medium})
    name = "backbone.network.body.layer1.0.conv1.bn.weight"
    weight = medium["body.layer1.0.conv1.1.weight"]
    assert (weight < 0).any()
    assert torch.equal(ours[name], weight.abs() + 1e-5)

    # timm's own layout is batch norm already.
    again = released.tensors({key.removeprefix("backbone.network."): t for key, t in ours.items()})
    assert torch.equal(again[name], ours[name])


LAYERS = {"tresnet_m": [3, 4, 11, 3], "tresnet_l": [4, 5, 18, 3], "tresnet_xl": [4, 5, 24, 3]}
WIDTHS = {"tresnet_m": 1.0, "tresnet_l": 1.2, "tresnet_xl": 1.3}


@pytest.mark.parametrize(
    ("name", "network", "classes", "bottleneck"),
    [
        ("asl_tresnet_m_coco_224", "tresnet_m", 80, None),
        ("asl_tresnet_l_coco_448", "tresnet_l", 80, None),
        ("asl_tresnet_xl_coco_640", "tresnet_xl", 80, None),
        ("asl_tresnet_xl_voc2007_448", "tresnet_xl", 20, None),
        ("asl_tresnet_l_nuswide_448", "tresnet_l", 81, None),
        ("asl_tresnet_l_openimages_448", "tresnet_l", 9605, 512),
        ("other", "tresnet_m", 11221, None),  # ImageNet-21K: one label per image
    ],
)
def test_each_file_of_asl_fits_the_network_it_is_told_by(
    name: str, network: str, classes: int, bottleneck: int | None
) -> None:
    shapes = official.tresnet_shapes(LAYERS[network], WIDTHS[network])
    features = shapes["body.layer4.2.conv3.1.weight"][0]
    shapes |= official.gap_shapes(features, classes, bottleneck)
    file, size = RELEASED[name][:2] if name in RELEASED else ("other.pth", 64)
    with torch.device("meta"):  # names and shapes only
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        ours = converted({"model": state}, file, None if name in RELEASED else size)
        parts = build.check(parse(ours.config), build.MODEL_PARTS)
        model = build.model(parts, ours.classes, pretrained=False)

    assert ours.config["backbone"]["name"] == network
    assert ours.transform.image_size == size
    assert len(ours.classes) == classes
    assert ours.classes.exclusive == (classes == 11221)
    match = match_tensors(model, ours.model, COMPUTED)
    assert match.missing == match.other_shape == match.unexpected == []


def test_the_shapes_of_a_tresnet_are_those_of_a_released_file(medium: dict[str, Tensor]) -> None:
    body = {key: list(value.shape) for key, value in medium.items() if key.startswith("body.")}
    assert official.tresnet_shapes([3, 4, 11, 3]) == body


def test_swin_and_cvt_are_told_by_their_sizes() -> None:
    head = {"transformer.x": [1], "fc.W": [1, 80, 64], "transformer.decoder.layers.0.linear1": [1]}
    head |= {"transformer.decoder.layers.0.linear1.weight": [96, 64]}

    def node_of(backbone: dict[str, list[int]]) -> Any:
        shapes = {f"backbone.0.{key}": shape for key, shape in backbone.items()} | head
        state = {f"module.{key}": torch.empty(shape) for key, shape in shapes.items()}
        return converted({"state_dict": state}, "q2l.pkl", 384).config["backbone"]

    with torch.device("meta"):
        for name in ("swin_large_patch4_window12_384", "swin_base_patch4_window7_224"):
            network = timm.create_model(name, num_classes=0).state_dict()
            node = node_of({key: list(value.shape) for key, value in network.items()})
            target = "mldec.backbones.TimmBackbone"
            assert node == {"_target_": target, "name": name, "image_size": 384}
        with pytest.raises(DataError, match=r"a Swin of blocks \(2, 2, 18, 1\) and width 128"):
            node_of(
                {key: [*t.shape] for key, t in network.items() if "layers.3.blocks.1." not in key}
            )

        node = node_of(official_cvt.shapes([192, 768, 1024], [2, 2, 20]))
    sizes = {"embed_dim": [192, 768, 1024], "num_heads": [3, 12, 16], "depth": [2, 2, 20]}
    assert node["config"] == {"model_type": "cvt", **sizes}
    assert (node["name"], node["mean"][0]) == ("microsoft/cvt-w24-384-22k", 0.485)


def test_known_lists_stand_in_for_names_that_a_file_lacks(sample_data: Path) -> None:
    lists = sample_data / "label_embeddings"
    for name, count in (("coco80_category_id_order.txt", 80), ("voc20.txt", 20)):
        assert list(released.KNOWN_NAMES[count]) == (lists / name).read_text().split("\n")[:count]


def test_names_are_cleaned_and_kept_apart(medium: dict[str, Tensor]) -> None:
    odd = {3: '"Tree"', 4: " 'Tree'", 5: "O'Hare"}
    names = {str(index): f"thing {index}" for index in range(80) if index not in odd} | odd
    classes = converted({"model": medium, "idx_to_class": names}).classes
    assert classes.names[2:6] == ("thing 2", "Tree (3)", "Tree (4)", "O'Hare")


def test_given_names_replace_those_of_a_file(medium: dict[str, Tensor]) -> None:
    # Also names that are too few.
    state = {"model": medium, "idx_to_class": {0: "a"}}
    names = [f"thing {index}" for index in range(80)]
    assert converted(state, names=names).classes.names == tuple(names)
    with pytest.raises(ValueError, match="it has 80 classes, the file names 1"):
        converted(state)
    with pytest.raises(ValueError, match="it has 80 classes, the file names 2"):
        converted(state, names=["a", "b"])


def test_a_zero_shot_file_has_word_vectors_in_place_of_classes(medium: dict[str, Tensor]) -> None:
    state = official.zero_shot_file(medium)
    classes = converted(state, "zsl.pth", 64).classes
    assert classes.names == ()
    assert classes.queries is not None
    assert classes.queries.shape == (0, 300)
    with pytest.raises(ValueError, match="it has 0 classes, the file names 2"):
        converted(state, "zsl.pth", 64, names=["a", "b"])

    # Word vectors as wide as the decoder are not projected.
    del state["head.wordvec_proj.weight"], state["head.wordvec_proj.bias"]
    assert converted(state, "zsl.pth", 64).config["head"]["word_dim"] == 768


def test_init_takes_what_fits_and_says_so(medium: dict[str, Tensor], tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointError, match=r"is of another backbone: \d+ of the model's"):
        initialise(other, tmp_path / "start.pth")


@pytest.mark.parametrize(
    ("lost", "more", "fault"),
    [
        (
            "head.",
            {},
            "misses head.fc_weight: it is incomplete, or a start for training",
        ),
        (POOL, {}, "misses head.pool_weight"),
        ("body.layer4.2", {}, "a TResNet of blocks (3, 4, 11, 2)"),
        ("", {}, "is of no known network: its first tensors are none"),
        ("body.conv1", {}, "is of no known network"),
        (POOL, {POOL: torch.zeros(80)}, "not enough values to unpack"),
        (POOL, {POOL: torch.zeros(10**12, 0, 1)}, "it misses head.pool_bias"),
        ("body.conv1.0", {"body.conv1.0.weight": torch.tensor(1.0)}, "IndexError"),
        ("-", {"body.layer1.1.conv9.0.weight": torch.zeros(1)}, "1 tensor is unexpected"),
        ("-", {f"head.decoder.layers.{'9' * 30}.norm1": torch.zeros(1)}, "1 tensor is unexpected"),
        ("body.layer1.1.conv1.0", {}, "1 tensor is missing"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    medium: dict[str, Tensor], tmp_path: Path, lost: str, more: dict[str, Tensor], fault: str
) -> None:
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


@pytest.mark.parametrize("names", [{None: "a"}, {"9" * 6000: "a"}, {0: 3}])
def test_class_names_that_are_none_are_refused(
    medium: dict[str, Tensor], names: dict[Any, Any]
) -> None:
    names = {index: f"thing {index}" for index in range(1, 80)} | names
    with pytest.raises((ValueError, TypeError, AttributeError)):
        converted({"model": medium, "idx_to_class": names})


def test_what_cannot_be_told_is_asked_for(medium: dict[str, Tensor], path: Path) -> None:
    with pytest.raises(DataError, match="pass --image-size"):
        converted({"model": medium}, "renamed.pth")
    with pytest.raises(DataError, match="--image-size 100 is not a multiple of 32"):
        converted({"model": medium}, image_size=100)
    with pytest.raises(CheckpointError, match="pass --weights raw"):
        load_model(path, "ema")
    assert converted({"model": medium}, "renamed.pth", 96).transform.image_size == 96


def test_numbered_names_are_told(
    medium: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    head = {"head.fc.weight": torch.zeros(3, 2048), "head.fc.bias": torch.zeros(3)}
    state = {key: value for key, value in medium.items() if not key.startswith("head.")} | head
    checkpoint = converted(state)
    assert checkpoint.classes.names == ("class 0", "class 1", "class 2")
    assert f"{FILE} names no classes: they are numbered from 0 to 2" in caplog.text


def test_the_old_serialisation_is_read(medium: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"model": medium}, tmp_path / FILE, _use_new_zipfile_serialization=False)
    assert len(load_model(tmp_path / FILE).classes) == 80
