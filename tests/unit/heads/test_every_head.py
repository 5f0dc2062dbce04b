"""Properties of all heads, and of a classifier with a head."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
from random_weights import noise, randomize
from support import read_option
from torchvision.transforms.v2.functional import resize

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError, UserError
from mldec.heads import (
    CSRA,
    GAP,
    RAM,
    Cosine,
    MLDecoder,
    Query2Label,
    WordGAP,
    WordGroupDecoder,
)
from mldec.model import Classifier, Viewed

WIDTH, CLASSES, WORD = 16, 7, 5
SIZES = {"embed_dim": 16, "mlp_dim": 20, "num_heads": 4}
FULL = {"num_groups": None, **SIZES}

HEADS = {
    "gap": lambda **own: GAP(WIDTH, CLASSES, **own),
    "bottleneck": lambda **own: GAP(WIDTH, CLASSES, bottleneck=3, **own),
    "csra": lambda **own: CSRA(WIDTH, CLASSES, num_heads=3, **own),
    "csra_normalized": lambda **own: CSRA(WIDTH, CLASSES, num_heads=3, normalize=True, **own),
    "full": lambda **own: MLDecoder(WIDTH, CLASSES, num_layers=2, **FULL, **own),
    "groups": lambda **own: MLDecoder(WIDTH, CLASSES, num_groups=3, **SIZES, **own),
    "plain": lambda **own: MLDecoder(
        WIDTH, CLASSES, init_queries="learned", doubled_query=False, **SIZES, **own
    ),
    "transformer": lambda **own: MLDecoder(
        WIDTH, CLASSES, init_queries="learned", self_attention=True, **SIZES, **own
    ),
    "query2label": lambda **own: Query2Label(WIDTH, CLASSES, **SIZES, **own),
    "query2label_self": lambda **own: Query2Label(
        WIDTH, CLASSES, input_proj=True, self_attention=True, **SIZES, **own
    ),
    "ram": lambda **own: RAM(WIDTH, CLASSES, word_dim=WORD, **SIZES, **own),
    "ram_plus": lambda **own: RAM(WIDTH, CLASSES, descriptions=3, word_dim=WORD, **SIZES, **own),
    "zero_shot": lambda **own: MLDecoder(WIDTH, 0, word_dim=WORD, **FULL, **own),
    "zero_shot_wide": lambda **own: MLDecoder(WIDTH, 0, word_dim=16, **FULL, **own),
    "word_gap": lambda **own: WordGAP(WIDTH, 0, word_dim=WORD, **own),
    "word_groups": lambda **own: WordGroupDecoder(
        WIDTH, 0, word_dim=WORD, group_size=2, **SIZES, **own
    ),
    "cosine": lambda: Cosine(WIDTH, 0, bias=True),
}
ZERO_SHOT = ("zero_shot", "zero_shot_wide", "word_gap", "word_groups", "cosine")


def vectors(head):
    """Return the word vectors as a list of arguments, which is empty for fixed classes."""
    width = getattr(head, "word_dim", None)
    return [] if width is None else [noise(CLASSES, width, seed=2)]


@pytest.fixture(params=HEADS)
def name(request):
    return request.param


@torch.no_grad()
def test_logits_do_not_depend_on_layout_and_batch(name):
    head = randomize(HEADS[name]())
    features = noise(3, WIDTH, 3, 3)
    tokens = torch.stack([features[:, :, y, x] for y in range(3) for x in range(3)], dim=1)
    logits = head(tokens, *vectors(head))
    alone = torch.cat([head(image, *vectors(head)) for image in tokens.split(1)])
    assert logits.shape == (3, CLASSES)
    torch.testing.assert_close(head(features, *vectors(head)), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone, logits, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_prior_shifts_the_logits(name):
    head = randomize(HEADS[name]())
    if not hasattr(head, "set_bias_from_prior") or name == "csra_normalized":
        pytest.skip("no bias per class")
    priors = noise(2, CLASSES, seed=1)
    logits = []
    for prior in priors:
        head.set_bias_from_prior(prior)
        logits.append(head(noise(3, 9, WIDTH), *vectors(head)))

    change = priors[1] - priors[0]
    if name in ZERO_SHOT:  # one bias for all classes
        change = change.mean().expand(CLASSES)
    torch.testing.assert_close(logits[1] - logits[0], change.expand(3, CLASSES))


def test_all_parameters_are_trained_and_dropout_is_only_active_in_training(name):
    if name == "cosine":
        pytest.skip("not trained")
    tokens = noise(3, 9, WIDTH)
    head = randomize(HEADS[name](dropout=0.0)).train()
    head(tokens, *vectors(head)).square().sum().backward()
    gradients = {key: value.grad for key, value in head.named_parameters()}
    assert [key for key, value in gradients.items() if value is None or not value.any()] == []

    with torch.no_grad():
        trained = head(tokens, *vectors(head))
        if name != "word_groups":  # its groups are random in training
            evaluated = head.eval()(tokens, *vectors(head))
            torch.testing.assert_close(trained, evaluated, rtol=1e-12, atol=1e-12)

        dropping = randomize(HEADS[name](dropout=0.5))
        same = dropping(tokens, *vectors(head))
        assert torch.equal(dropping(tokens, *vectors(head)), same)
        assert not torch.allclose(dropping.train()(tokens, *vectors(head)), same)


@torch.no_grad()
def test_float32_and_bfloat16_are_close_to_float64(name):
    torch.manual_seed(0)
    head = HEADS[name]().eval()
    tokens = noise(4, 9, WIDTH)
    exact = copy.deepcopy(head).double()(tokens, *vectors(head))
    single = head(tokens.float(), *vectors(head))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head(tokens.float(), *(words.float() for words in vectors(head)))
    assert half.isfinite().all()
    assert (half.double() - exact).abs().max() < 0.1 * exact.std()
    # Logits are float32 under autocast, because ties would change the mAP.
    assert half.dtype == torch.float32


def test_wrong_shapes_raise_an_error(name):
    head = HEADS[name]()
    for shape in ((4, WIDTH), (2, 4, 9), (2, 9, 2, 2)):
        with pytest.raises(ValueError, match="tokens"):
            head(torch.zeros(shape), *vectors(head))

    wrong = [None, torch.zeros(3, 4)] if name in ZERO_SHOT else [torch.zeros(CLASSES, WORD)]
    for word_vectors in wrong:
        with pytest.raises(ConfigError, match=r"head\.word_dim"):
            head(torch.zeros(2, 9, WIDTH), word_vectors)


# take_classes


def copy_shared(old, new):
    """Copy the tensors that do not belong to classes to a new head."""
    state = {key: value for key, value in old.state_dict().items() if key not in old.class_tensors}
    new.load_state_dict(state, strict=False)


COPIED = ["gap", "bottleneck", "csra", "csra_normalized", "full", "query2label", "ram", "ram_plus"]


@pytest.mark.parametrize("name", COPIED)
@torch.no_grad()
def test_copied_classes_keep_their_logits(name):
    sources = [3, None, 0, 6, None, 3, 5]
    old = randomize(HEADS[name]())
    new = randomize(HEADS[name](), seed=1)
    copy_shared(old, new)
    tokens = noise(2, 9, WIDTH)
    before = new(tokens)
    taken = new.take_classes(old.state_dict(), sources, CLASSES)
    assert taken == [0, 2, 3, 5, 6]
    torch.testing.assert_close(new(tokens)[:, taken], old(tokens)[:, [3, 0, 6, 3, 5]])
    torch.testing.assert_close(new(tokens)[:, [1, 4]], before[:, [1, 4]])


@pytest.mark.parametrize(
    ("old_groups", "new_groups", "taken"),
    [
        (None, None, [0, 2, 3, 5, 6]),
        (3, None, [0, 2, 3, 5, 6]),
        (None, 4, [0, 2, 5, 6]),  # 2 and 3 had one query each; the first is kept
        (3, 3, [0, 3, 5, 6]),  # 0 and 2 had different queries, 3 and 5 the same
        (2, 2, [2, 3, 5]),  # the query of 0 differs from that of 2 and 3; 6 comes after 5
    ],
)
@torch.no_grad()
def test_group_takes_its_most_frequent_query(old_groups, new_groups, taken):
    sources = [6, None, 0, 3, None, 4, 5]
    old = randomize(MLDecoder(WIDTH, 9, num_groups=old_groups, **SIZES))
    new = randomize(MLDecoder(WIDTH, CLASSES, num_groups=new_groups, **SIZES), seed=1)
    new.queries.normal_()
    copy_shared(old, new)
    tokens = noise(2, 9, WIDTH)
    assert new.take_classes(old.state_dict(), sources, 9) == taken
    copied = [sources[number] for number in taken]
    torch.testing.assert_close(new(tokens)[:, taken], old(tokens)[:, copied])


# Option files

OPTIONS = sorted((Path(__file__).parents[3] / "configs" / "head").glob("*.yaml"))


@pytest.mark.parametrize("num_classes", [1, 80])
@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_option_has_finite_logits_and_trains_all_parameters(path, num_classes):
    assert path.read_text(encoding="utf-8").startswith("# ")
    target, node = read_option(path)
    known = inspect.signature(target).parameters
    narrow = {"embed_dim": 64, "mlp_dim": 128, "bottleneck": 8}
    node |= {key: value for key, value in narrow.items() if key in known}

    torch.manual_seed(0)
    head = target(64, num_classes, **node)
    word_dim = getattr(head, "word_dim", None)
    words = [] if word_dim is None else [torch.randn(num_classes, word_dim)]
    logits = head(torch.randn(2, 49, 64), *words)
    assert logits.shape == (2, num_classes)
    assert logits.isfinite().all()
    if hasattr(head, "fit"):
        assert not list(head.parameters())
        return
    logits.square().sum().backward()
    assert [key for key, p in head.named_parameters() if p.requires_grad and p.grad is None] == []


# Classifiers


@pytest.fixture(scope="module")
def backbone():
    return TimmBackbone("test_resnet", model_args={"channels": [8, 8, 8, WIDTH]}).eval()


def build(target, **settings):
    return target(**{"in_features": WIDTH, "num_classes": CLASSES, **SIZES, **settings})


IMAGES = torch.zeros(2, 3, 64, 64)
ERRORS = [
    (lambda _: build(MLDecoder, embed_dim=18), ConfigError, r"head\.num_heads"),
    (lambda _: build(Query2Label)(torch.zeros(2, 50, WIDTH)), ConfigError, "Query2Label"),
    (lambda _: build(WordGroupDecoder, group_size=5), ConfigError, r"head\.group_size"),
    (
        lambda _: HEADS["csra_normalized"]().set_bias_from_prior(torch.zeros(CLASSES)),
        ConfigError,
        r"head\.normalize",
    ),
    (lambda model: model(IMAGES[0]), ValueError, "images"),
    (lambda model: Viewed(model, "flip", 64)(IMAGES, attention=True), ValueError, "attention"),
    (
        lambda model: Classifier(model.backbone, HEADS["gap"]())(IMAGES, attention=True),
        ConfigError,
        "attention: GAP",
    ),
]


@pytest.mark.parametrize(("call", "error", "name"), ERRORS)
def test_errors_name_the_argument(backbone, call, error, name):
    model = Classifier(backbone, HEADS["groups"]())
    with pytest.raises(error, match=name) as caught:
        call(model)
    assert isinstance(caught.value, UserError) == (error is ConfigError)


@pytest.mark.parametrize(("side", "larger"), [(64, 96), (160, 224), (224, 288), (448, 576)])
def test_larger_scale_is_a_multiple_of_32(side, larger):
    assert Viewed.larger(side) == larger


@torch.no_grad()
def test_logits_of_views_are_averaged(backbone):
    model = Classifier(backbone, HEADS["groups"]()).eval()
    images = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    mirrored = torch.from_numpy(images.numpy()[..., ::-1].copy())
    smaller = resize(images.float() / 255, [64, 64], antialias=True)
    for views, other in (("flip", mirrored), ("scales", smaller)):
        viewed = Viewed(model, views, 64)
        expected = (model(images) + model(other)) / 2
        torch.testing.assert_close(viewed(images), expected)
        torch.testing.assert_close(viewed.classify(viewed.backbone(images)), model(images))


def test_attention_and_logits_of_tokens(backbone):
    images = torch.rand(2, 3, 64, 64)
    model = Classifier(backbone, HEADS["groups"]()).eval()
    logits, attention = model(images, attention=True)
    assert attention.shape[:2] == (2, 3)
    assert torch.equal(model(backbone(images)), logits)
