"""Files in the layouts of the authors, rebuilt from names and shapes, through `load_model`."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fill
import numpy as np
import official
import pytest
import torch
from PIL import Image
from support import one_line
from torch import Tensor, nn

from mldec import build
from mldec.backbones import TimmBackbone
from mldec.checkpoint import initialise, load_model, released, zoo
from mldec.checkpoint.loading import COMPUTED, match_tensors
from mldec.config.compose import parse
from mldec.errors import CheckpointError
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier


def from_keys(name: str) -> dict[str, Tensor]:
    """Return the rebuilt weights of a released file, under the released names."""
    return official.rebuilt(official.read(f"{name}.keys"))


def tresnet_layout(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights under the names of the official TResNet repositories."""
    names = {}
    for key, value in model.state_dict().items():
        if key.startswith("backbone.network."):
            key = key.removeprefix("backbone.network.")
            key = re.sub(r"(conv\d|downsample\.\d)\.conv\.", r"\1.0.", key)
            names[re.sub(r"(conv\d|downsample\.\d)\.bn\.", r"\1.1.", key)] = value
        elif key.startswith("head."):
            for old, new in reversed(ML_DECODER):
                key = re.sub(rf"\b{re.escape(new)}\b", old, key)
            names[key] = value
    return names


def without_counters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


@pytest.fixture(scope="module")
def medium() -> dict[str, Tensor]:
    return from_keys("tresnet_m_coco_224")


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(content: Any, name: str = "tresnet_m_COCO_224_84_2.pth", **options: Any) -> Path:
        torch.save(content, tmp_path / name, **options)
        return tmp_path / name

    return save


def logits(path: Path, size: int, **options: Any) -> np.ndarray:
    with torch.no_grad():
        return load_model(path, **options).model(torch.from_numpy(fill.images(size))).numpy()


@pytest.mark.parametrize(
    ("name", "file", "size", "classes"),
    [
        ("tresnet_m_coco_224", "tresnet_m_COCO_224_84_2.pth", 224, 80),
        ("tresnet_l_coco_448", "tresnet_l_COCO__448_90_0.pth", 448, 80),
        ("tresnet_m_openimages_224", "tresnet_m_open_images_200_groups_86_8.pth", 224, 9605),
    ],
)
def test_a_released_file_gives_the_official_logits(
    save: Callable[..., Path], name: str, file: str, size: int, classes: int
) -> None:
    names = {index: f"'thing {index}'" for index in range(classes)}
    path = save({"model": from_keys(name), "idx_to_class": names}, file)
    loaded = load_model(path)
    assert loaded.transform.image_size == size
    assert loaded.classes.names[:2] == ("thing 0", "thing 1")
    assert len(loaded.classes) == classes
    assert loaded.weights == "raw"
    expected = np.load(official.NUMBERS / f"{name}.npz")["logits"]
    np.testing.assert_allclose(logits(path, size), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("container", ["model", "state_dict", "ema", None])
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("counters", [False, True])
def test_containers_prefixes_and_counters_change_nothing(
    save: Callable[..., Path],
    medium: dict[str, Tensor],
    container: str | None,
    prefix: str,
    counters: bool,
) -> None:
    state = dict(medium)
    if counters:
        norms = [key.removesuffix("running_mean") for key in medium if key.endswith("running_mean")]
        state |= {f"{norm}num_batches_tracked": torch.tensor(7) for norm in norms}
    state = {prefix + key: value for key, value in state.items()}
    path = save({container: state, "epoch": 3} if container else state)
    expected = np.load(official.NUMBERS / "tresnet_m_coco_224.npz")["logits"]
    np.testing.assert_allclose(logits(path, 224), expected, rtol=0, atol=1e-4)


def test_the_old_serialisation_is_read(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    path = save({"model": medium}, _use_new_zipfile_serialization=False)
    assert len(load_model(path).classes) == 80


def test_the_xl_network_is_told_by_its_blocks(save: Callable[..., Path]) -> None:
    backbone = TimmBackbone("tresnet_v2_l", model_args={"layers": [3, 8, 34, 5]})
    model = Classifier(backbone, MLDecoder(2048, 80))
    path = save({"model": tresnet_layout(model)}, "tresnet_xl_COCO_640_91_4.pth")
    loaded = load_model(path)
    assert loaded.config.backbone["model_args"] == {"layers": [3, 8, 34, 5]}
    assert loaded.transform.image_size == 640
    assert loaded.classes.names[0] == "person"
    assert loaded.classes.names[79] == "toothbrush"


def test_cars_have_one_label_an_image(save: Callable[..., Path]) -> None:
    model = Classifier(TimmBackbone("tresnet_v2_l"), MLDecoder(2048, 196, num_groups=100))
    loaded = load_model(save({"model": tresnet_layout(model)}, "tresnet_l_stanford_card_96.41.pth"))
    assert loaded.classes.exclusive
    assert loaded.config.head["num_groups"] == 100
    assert loaded.transform.image_size == 384


def test_a_file_of_imagenet21k_has_one_label_per_image(save: Callable[..., Path]) -> None:
    torch.manual_seed(0)
    model = Classifier(TimmBackbone("tresnet_m"), GAP(2048, 11221)).eval()
    state = tresnet_layout(model)
    loaded = load_model(save({"state_dict": without_counters(state)}, "other.pth"), image_size=64)
    assert loaded.config.backbone["name"] == "tresnet_m"
    assert loaded.classes.exclusive
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        # In-place ABN scales by |w| + 1e-5, so a norm of scale 1 comes back larger by 1e-5.
        torch.testing.assert_close(loaded.model(images), model(images), rtol=1e-2, atol=1e-2)


def test_the_shapes_of_a_tresnet_are_those_of_a_released_file(medium: dict[str, Tensor]) -> None:
    shapes = official.tresnet_shapes([3, 4, 11, 3])
    body = {key: list(value.shape) for key, value in medium.items() if key.startswith("body.")}
    assert shapes == body


@pytest.mark.parametrize(
    ("name", "layers", "width_factor", "classes", "bottleneck"),
    [
        ("asl_tresnet_m_coco_224", [3, 4, 11, 3], 1.0, 80, None),
        ("asl_tresnet_l_coco_448", [4, 5, 18, 3], 1.2, 80, None),
        ("asl_tresnet_xl_coco_640", [4, 5, 24, 3], 1.3, 80, None),
        ("asl_tresnet_xl_voc2007_448", [4, 5, 24, 3], 1.3, 20, None),
        ("asl_tresnet_l_nuswide_448", [4, 5, 18, 3], 1.2, 81, None),
        ("asl_tresnet_l_openimages_448", [4, 5, 18, 3], 1.2, 9605, 512),
    ],
)
def test_each_file_of_asl_fits_the_network_it_is_told_by(
    name: str, layers: list[int], width_factor: float, classes: int, bottleneck: int | None
) -> None:
    shapes = official.tresnet_shapes(layers, width_factor)
    features = shapes["body.layer4.2.conv3.1.weight"][0]
    shapes |= official.gap_shapes(features, classes, bottleneck)
    with torch.device("meta"):  # names and shapes only
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        file = zoo.FILES[name]
        converted = released.convert({"model": state}, Path(file.file), image_size=None, names=None)
        parts = build.check(parse(converted.config), build.MODEL_PARTS)
        model = build.model(parts, converted.classes, pretrained=False)

    assert converted.transform.image_size == file.image_size
    assert len(converted.classes) == classes
    match = match_tensors(model, converted.tensors)
    assert [key for key in match.missing if not key.endswith(COMPUTED)] == []
    assert match.other_shape == match.unexpected == []


@pytest.mark.parametrize(
    ("file", "layers", "width_factor", "classes", "bottleneck", "size", "network"),
    [
        ("MS_COCO_TRresNet_M_224_81.8.pth", [3, 4, 11, 3], 1.0, 80, None, 224, "tresnet_m"),
        ("MS_COCO_TResNet_xl_640_88.4.pth", [4, 5, 24, 3], 1.3, 80, None, 640, "tresnet_xl"),
        ("Open_ImagesV6_TRresNet_L_448.pth", [4, 5, 18, 3], 1.2, 9605, 512, 448, "tresnet_l"),
    ],
)
def test_the_files_of_asl_give_the_logits_of_its_formulas(
    save: Callable[..., Path],
    file: str,
    layers: list[int],
    width_factor: float,
    classes: int,
    bottleneck: int | None,
    size: int,
    network: str,
) -> None:
    shapes = official.tresnet_shapes(layers, width_factor)
    features = shapes["body.layer4.2.conv3.1.weight"][0]
    state = official.rebuilt(shapes | official.gap_shapes(features, classes, bottleneck))
    names = {index: f"thing {index}" for index in range(classes)}
    path = save({"model": state, "num_classes": classes, "idx_to_class": names}, file)

    loaded = load_model(path)
    assert loaded.config.backbone["name"] == network
    assert loaded.transform.image_size == size
    assert loaded.classes.names == tuple(names.values())
    assert not loaded.classes.exclusive
    images = torch.from_numpy(fill.images(64))
    with torch.no_grad():
        expected = official.gap_logits(state, official.tresnet_features(state, images))
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(loaded.model(images), expected, rtol=1e-4, atol=1e-4)


def test_a_zero_shot_file_of_the_official_code(
    save: Callable[..., Path], medium: dict[str, Tensor], tmp_path: Path
) -> None:
    state = official.zero_shot_file(medium)
    path = save(state, "zsl.pth")
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match=r"zsl\.pth has 0 classes, the file names 2"):
        load_model(path, image_size=64, class_names=tmp_path / "names.txt")

    loaded = load_model(path, image_size=64)
    assert loaded.classes.names == ()
    assert loaded.classes.queries is not None
    assert loaded.classes.queries.shape == (0, 300)

    # The head alone was compared with the official one in tests/parity.
    head = MLDecoder(2048, 0, num_groups=None, word_dim=300).eval()
    inner = {key.removeprefix("head."): value for key, value in state.items() if "head." in key}
    for old, new in released.ML_DECODER:
        inner = {key.replace(old, new): value for key, value in inner.items()}
    head.load_state_dict(inner)
    images, words = torch.from_numpy(fill.images(64)), torch.from_numpy(fill.word_vectors(23))
    with torch.no_grad():
        tokens = loaded.model.backbone(images)
        features = official.tresnet_features(state, images)
        torch.testing.assert_close(tokens.mean(1), features, rtol=1e-4, atol=1e-4)
        logits = loaded.model(images, words)
        assert logits.shape == (2, 23)
        torch.testing.assert_close(logits, head(tokens, words))


def test_a_file_without_names_has_none_to_write(
    cli: Callable[..., Any], save: Callable[..., Path], medium: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save(official.zero_shot_file(medium), "zsl.pth")
    words = ["--image-size", "64", "--write-classes", tmp_path / "names.txt"]
    status, _, err = cli("evaluate", path, *words)
    assert status == 1
    one_line(err, f"--write-classes: {path} names no classes, it scores those of word vectors")
    assert not (tmp_path / "names.txt").exists()


def test_given_names_replace_those_of_a_file(
    save: Callable[..., Path], medium: dict[str, Tensor], tmp_path: Path
) -> None:
    # Also names that are too few, or none at all.
    path = save({"model": medium, "idx_to_class": {0: "a"}})
    with pytest.raises(CheckpointError, match="names 1 classes, but its head has 80"):
        load_model(path)
    names = [f"thing {index}" for index in range(80)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    loaded = load_model(path, class_names=tmp_path / "names.txt")
    assert loaded.classes.names == tuple(names)


def test_word_vectors_as_wide_as_the_decoder_are_not_projected(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    state = official.zero_shot_file(medium)
    del state["head.wordvec_proj.weight"], state["head.wordvec_proj.bias"]
    loaded = load_model(save(state, "zsl.pth"), image_size=64)
    assert loaded.config.head["word_dim"] == 768


@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.parametrize("network", ["resnet101", "tresnet_l", "tresnet_v2_l"])
def test_query2label_files(save: Callable[..., Path], network: str, self_attention: bool) -> None:
    torch.manual_seed(0)
    sizes = {"embed_dim": 64, "mlp_dim": 96, "input_proj": True, "self_attention": self_attention}
    backbone = TimmBackbone(network)
    model = Classifier(backbone, Query2Label(backbone.num_features, 80, **sizes)).eval()
    state = {}
    for key, value in tresnet_layout(Classifier(backbone, nn.Identity())).items():
        state[f"module.backbone.0.body.{key.removeprefix('body.')}"] = value
    for key, value in model.head.state_dict().items():
        for old, new in [
            ("encoder.", "transformer.encoder.layers."),
            ("decoder.", "transformer.decoder.layers."),
        ]:
            key = re.sub(rf"^{old}", new, key)
        key = re.sub(r"^norm\.", "transformer.decoder.norm.", key)
        for old, new in [
            ("cross_attn", "multihead_attn"),
            ("mlp.0", "linear1"),
            ("mlp.3", "linear2"),
        ]:
            key = key.replace(old, new)
        key = {"queries": "query_embed.weight", "fc_weight": "fc.W", "fc_bias": "fc.b"}.get(
            key, key
        )
        value = value[None] if key.startswith("fc.") else value
        state["module." + key] = value[..., None, None] if key == "input_proj.weight" else value
    state["module.backbone.1.pe"] = torch.zeros(1, 64, 2, 2)
    loaded = load_model(
        save({"state_dict": without_counters(state), "best_mAP": 85.0}, "checkpoint.pkl"),
        image_size=64,
    )
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images), rtol=1e-2, atol=1e-2)


def test_a_resnet_with_the_official_head(save: Callable[..., Path]) -> None:
    model = Classifier(TimmBackbone("resnet101"), MLDecoder(2048, 21, num_groups=21)).eval()
    state = {
        key.removeprefix("backbone.network."): value for key, value in model.state_dict().items()
    }
    official_head = {
        key: value for key, value in tresnet_layout(model).items() if key.startswith("head.")
    }
    state = {
        key: value for key, value in state.items() if not key.startswith(("head.", "backbone."))
    }
    state |= {"fc." + key.removeprefix("head."): value for key, value in official_head.items()}
    loaded = load_model(save(state, "voc.pth"), image_size=64)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images))
    assert loaded.classes.names[3] == "class 3"


def test_known_lists_stand_in_for_names_that_a_file_lacks(sample_data: Path) -> None:
    lists = sample_data / "label_embeddings"
    for name, count in (("coco80_category_id_order.txt", 80), ("voc20.txt", 20)):
        assert list(released.KNOWN_NAMES[count]) == (lists / name).read_text().split("\n")[:count]


def test_scales_become_positive_exactly_once(medium: dict[str, Tensor]) -> None:
    ours = released.tensors({"model": medium}, Path("x.pth"))
    weight = medium["body.layer1.0.conv1.1.weight"]
    assert (weight < 0).any()
    torch.testing.assert_close(
        ours["backbone.network.body.layer1.0.conv1.bn.weight"], weight.abs() + 1e-5
    )
    converted = {key.removeprefix("backbone.network."): value for key, value in ours.items()}
    again = released.tensors(converted, Path("x.pth"))
    name = "backbone.network.body.layer1.0.conv1.bn.weight"
    assert torch.equal(again[name], ours[name]), "timm's own layout is batch norm already"


def test_names_are_cleaned_and_kept_apart(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    names = {index: f"thing {index}" for index in range(80)} | {
        3: '"Tree"',
        4: " 'Tree'",
        5: "O'Hare",
    }
    loaded = load_model(save({"model": medium, "idx_to_class": names}))
    assert loaded.classes.names[3:6] == ("Tree (3)", "Tree (4)", "O'Hare")


def test_init_takes_what_fits_and_says_so(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    start = {key: value for key, value in medium.items() if "duplicate_pooling" not in key}
    model = Classifier(TimmBackbone("tresnet_m"), MLDecoder(2048, 20))
    report = initialise(model, save({"model": start}))
    assert "of another shape (head.queries)" in report
    assert "2 not in the file (head.pool_bias, head.pool_weight)" in report
    weight = medium["body.conv1.1.weight"].abs() + 1e-5
    torch.testing.assert_close(model.backbone.network.body.conv1.bn.weight.data, weight)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda s: {k: v for k, v in s.items() if not k.startswith("head.")},
            ["has no head", "init="],
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != "head.decoder.duplicate_pooling"},
            ["misses head.pool_weight"],
        ),
        (
            lambda s: {k: v for k, v in s.items() if "layer4.2" not in k},
            ["a TResNet of blocks (3, 4, 11, 2)"],
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != "body.layer1.1.conv1.0.weight"},
            ["does not fit", "1 tensor is missing"],
        ),
        (
            lambda s: {**s, "body.layer9.0.conv1.0.weight": torch.zeros(1)},
            ["does not fit", "1 tensor is unexpected"],
        ),
        (lambda s: {f"encoder.{k}": v for k, v in s.items()}, ["is of no known network"]),
        (lambda s: {}, ["holds no weights"]),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_reason(
    save: Callable[..., Path],
    medium: dict[str, Tensor],
    change: Callable[..., Any],
    parts: list[str],
) -> None:
    path = save({"model": change(medium)})
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for part in parts:
        assert part in message


def set_to(*changes: tuple[str, Any]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {**state, **dict(changes)}


def without_decoder(state: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Return the weights with a head of one linear layer."""
    state = {key: value for key, value in state.items() if not key.startswith("head.")}
    return {**state, "head.fc.weight": weight, "head.fc.bias": torch.zeros(3)}


HUGE = 10**12
LAYER = "head.decoder.layers.{}.norm1.weight"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            lambda s: without_decoder(s, torch.tensor(1.0)),
            "its head.fc.weight has the shape [], not 2 sizes above 0",
        ),
        (
            lambda s: without_decoder(s, torch.zeros(HUGE, 0)),
            f"has the shape [{HUGE}, 0], not 2 sizes above 0",
        ),
        (lambda s: without_decoder(s, torch.zeros(3)), "has the shape [3], not 2"),
        (
            set_to(("head.decoder.duplicate_pooling", torch.zeros(80))),
            "head.pool_weight has the shape [80], not 3",
        ),
        (
            set_to(("head.decoder.duplicate_pooling_bias", torch.zeros(HUGE, 0))),
            "head.pool_bias has the shape",
        ),
        (
            set_to(("head.decoder.duplicate_pooling_bias", torch.tensor(1.0))),
            "head.pool_bias has the shape []",
        ),
        (set_to(("body.conv1.0.weight", torch.tensor(1.0))), "conv1.conv.weight has the shape []"),
        (
            set_to(("body.conv1.1.weight", torch.ones(64, dtype=torch.bool))),
            "are torch.bool, weights are floating",
        ),
        (
            set_to((LAYER.format(9_999_999), torch.zeros(768))),
            "1 tensor is unexpected",
        ),
        (set_to((LAYER.format("9" * 30), torch.zeros(768))), "1 tensor is unexpected"),
        (set_to((LAYER.format("9" * 6000), torch.zeros(768))), "1 tensor is unexpected"),
        (
            set_to((f"body.layer1.{'9' * 9}.conv1.0.weight", torch.zeros(1))),
            "1 tensor is unexpected",
        ),
    ],
)
def test_a_shape_that_lies_is_refused_before_anything_is_built(
    save: Callable[..., Path], medium: dict[str, Tensor], change: Callable[..., Any], part: str
) -> None:
    path = save({"model": change(medium)})
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    assert part in message
    assert len(message.splitlines()) == 1
    assert len(message) < 1500
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "names",
    [
        {None: "a"},
        {1.5: "a"},
        {"x": "a"},
        {"9" * 6000: "a"},
        {True: "a"},
        {0: None},
        {0: 3},
        {0: torch.zeros(2)},
        {(): "a"},
    ],
)
def test_class_names_that_are_none_are_refused(
    save: Callable[..., Path], medium: dict[str, Tensor], names: dict[Any, Any]
) -> None:
    path = save({"model": medium, "idx_to_class": names})
    with pytest.raises(CheckpointError, match=r"its idx_to_class does not give each number a name"):
        load_model(path)


def test_init_refuses_another_network_of_the_family(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    model = Classifier(TimmBackbone("tresnet_l"), MLDecoder(2432, 80))
    with pytest.raises(
        CheckpointError, match=r"is of another backbone: \d+ of the model's tensors"
    ):
        initialise(model, save({"model": medium}))


def test_what_cannot_be_told_is_asked_for(
    save: Callable[..., Path], medium: dict[str, Tensor]
) -> None:
    path = save({"model": medium}, "renamed.pth")
    with pytest.raises(CheckpointError, match="pass --image-size"):
        load_model(path)
    with pytest.raises(CheckpointError, match="--image-size 100 is not a multiple of 32"):
        load_model(path, image_size=100)
    with pytest.raises(CheckpointError, match="one set of weights"):
        load_model(path, "ema", image_size=224)
    assert load_model(path, image_size=96).transform.image_size == 96


def test_predict_and_evaluate_take_released_files(
    cli: Callable[..., Any],
    save: Callable[..., Path],
    medium: dict[str, Tensor],
    tmp_path: Path,
    sample_data: Path,
) -> None:
    path = save({"model": medium})
    Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / "red.png")
    status, out, err = cli(
        "predict", path, tmp_path / "red.png", "--image-size", "64", "--top", "2", "--device", "cpu"
    )
    assert status == 0, err
    assert out.startswith(f"{tmp_path / 'red.png'}: ")
    words = [
        f"data.root={sample_data / 'coco2014_mini'}",
        "train.workers=0",
        "device=cpu",
        "--image-size",
        "64",
    ]
    assert cli("evaluate", path, *words, "--json", tmp_path / "report.json")[0] == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images"] == 38
    assert 0 <= report["metrics"]["mAP"] <= 100

    # Its calibrated copy is a checkpoint of ours, of the same model.
    copy = tmp_path / "copy.pth"
    status, _, err = cli("calibrate", path, *words, "--out", copy)
    assert status == 0, err
    assert cli("evaluate", copy, *words[:3], "--json", tmp_path / "copy.json")[0] == 0
    calibrated = json.loads((tmp_path / "copy.json").read_text())
    assert calibrated["metrics"]["mAP"] == pytest.approx(report["metrics"]["mAP"])
    assert calibrated["metrics"]["CF1"] > report["metrics"]["CF1"]


def test_bad_released_files_end_in_one_line(
    cli: Callable[..., Any], save: Callable[..., Path], medium: dict[str, Tensor], tmp_path: Path
) -> None:
    good = save({"model": medium})
    Image.new("RGB", (50, 40)).save(tmp_path / "x.png")
    half, page = tmp_path / "half.pth", tmp_path / "page.pth"
    half.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    page.write_text("<!DOCTYPE html><html>no such file</html>")
    for path, words, part in [
        (half, [], "cannot be used (BadZipFile"),
        (page, [], "a web page: download it again"),
        (good, ["--image-size", "100"], "not a multiple of 32"),
        ("zoo:tresnet_l_coco_44", [], "tresnet_l_coco_448"),
    ]:
        status, out, err = cli("predict", path, tmp_path / "x.png", *words)
        assert status == 1
        assert out == ""
        one_line(err, part)


def test_a_released_open_images_file_is_evaluated_on_the_data(
    cli: Callable[..., Any], save: Callable[..., Path], tmp_path: Path
) -> None:
    mids = [f"/m/{index:05}" for index in range(9605)]
    names = {
        mid: f" 'Thing {index % 9600}'" for index, mid in enumerate(mids)
    }  # ten classes share five names
    file = "tresnet_m_open_images_200_groups_86_8.pth"
    weights = from_keys("tresnet_m_openimages_224")
    path = save({"model": weights, "idx_to_class": dict(enumerate(names.values()))}, file)
    root = tmp_path / "openimages"
    (root / "test").mkdir(parents=True)
    torch.save(names, root / "mid_to_classes.pth")
    (root / "classes.txt").write_text("\n".join(mids))
    rows = ["image_id,class_list,class_list_neg,split"]
    for number, (one, other) in enumerate((mids[:2], mids[1::-1])):
        Image.new("RGB", (20, 20), (90 * number, 30, 60)).save(root / f"test/{number}.jpg")
        rows.append(f"test/{number}.jpg,['{one}'],['{other}'],val")
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    words = [
        "data=openimages_miil",
        f"data.root={root}",
        "data.class_list=classes.txt",
        "train.workers=0",
    ]
    words += [f"data.cache_dir={tmp_path}", "device=cpu", "--json", str(tmp_path / "r.json")]
    status, _, err = cli("evaluate", path, *words)
    assert status == 0, err
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["metrics"]["classes_valid"] == 2
    assert list(found["per_class"])[4:6] == ["Thing 4 (4)", "Thing 5"]
    assert list(found["per_class"])[-1] == "Thing 4 (9604)"
