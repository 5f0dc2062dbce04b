"""What holds for every head, and for a classifier with one."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
from random_weights import noise, randomise
from support import read_option
from torchvision.transforms.v2.functional import resize

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError
from mldec.heads import CSRA, GAP, RAM, Cosine, MLDecoder, Query2Label, WordGAP, WordGroupDecoder
from mldec.model import Classifier, TokenClassifier, Viewed

WIDTH, CLASSES, WORD = 16, 7, 5
SIZES = {"embed_dim": 16, "mlp_dim": 20, "num_heads": 4}
FULL = {"num_groups": None, **SIZES}

HEADS = {
    "gap": lambda **own: GAP(WIDTH, CLASSES, **own),
    "bottleneck": lambda **own: GAP(WIDTH, CLASSES, bottleneck=3, **own),
    "csra": lambda **own: CSRA(WIDTH, CLASSES, num_heads=3, **own),
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
OF_WORDS = ("zero_shot", "zero_shot_wide", "word_gap", "word_groups", "cosine")


def words(head):
    """Return what a head takes beside tokens."""
    width = getattr(head, "word_dim", None)
    return () if width is None else (noise(CLASSES, width, seed=2),)


@pytest.fixture(params=HEADS)
def name(request):
    return request.param


def test_tokens_and_maps_in_any_batch_have_one_logit_per_class(name):
    head = randomise(HEADS[name]())
    features = noise(3, WIDTH, 3, 3)
    tokens = torch.stack([features[:, :, y, x] for y in range(3) for x in range(3)], dim=1)
    with torch.no_grad():
        logits = head(tokens, *words(head))
        alone = torch.cat([head(image, *words(head)) for image in tokens.split(1)])
        assert logits.shape == (3, CLASSES)
        torch.testing.assert_close(head(features, *words(head)), logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone, logits, rtol=1e-12, atol=1e-12)


def test_the_part_of_the_logits_that_no_image_changes_can_be_set(name):
    head = randomise(HEADS[name]())
    if not hasattr(head, "set_bias_from_prior"):
        pytest.skip("it has no bias per class")
    tokens, levels = noise(3, 9, WIDTH), noise(2, CLASSES, seed=1)
    logits = []
    for level in levels:
        head.set_bias_from_prior(level)
        with torch.no_grad():
            logits.append(head(tokens, *words(head)))
    change = levels[1] - levels[0]
    if name in OF_WORDS:  # one bias for all classes
        change = change.mean().expand(CLASSES)
    torch.testing.assert_close(logits[1] - logits[0], change.expand(3, CLASSES))


def test_every_parameter_is_trained_and_dropout_acts_in_training_only(name):
    if name == "cosine":
        pytest.skip("it is not trained")
    head = randomise(HEADS[name](dropout=0.0)).train()
    head(noise(3, 9, WIDTH), *words(head)).square().sum().backward()
    gradients = {key: value.grad for key, value in head.named_parameters()}
    without = [key for key, value in gradients.items() if value is None or not value.any()]
    assert without == []

    tokens = noise(3, 9, WIDTH)
    with torch.no_grad():
        trained = head(tokens, *words(head))
        # In training the classes of a group are drawn anew.
        if name != "word_groups":
            evaluated = head.eval()(tokens, *words(head))
            torch.testing.assert_close(trained, evaluated, rtol=1e-12, atol=1e-12)

        dropping = randomise(HEADS[name](dropout=0.5))
        same = dropping(tokens, *words(head))
        assert torch.equal(dropping(tokens, *words(head)), same)
        assert not torch.allclose(dropping.train()(tokens, *words(head)), same)


@torch.no_grad()
def test_float32_and_bfloat16_autocast_stay_near_float64(name):
    torch.manual_seed(0)
    head = HEADS[name]().eval()
    tokens, queries = noise(4, 9, WIDTH), words(head)
    exact = copy.deepcopy(head).double()(tokens, *queries)
    single = head(tokens.float(), *queries)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head(tokens.float(), *(query.float() for query in queries))
    assert half.isfinite().all()
    assert (half.double() - exact).abs().max() < 0.1 * exact.std()
    # The last product is in float32, since ties would change the mAP.
    assert half.dtype == torch.float32


@pytest.mark.parametrize("shape", [(4, WIDTH), (2, 4, 9), (2, 9, 2, 2)])
def test_features_of_another_shape_are_named(name, shape):
    head = HEADS[name]()
    with pytest.raises(ValueError, match=r"tokens have the shape .*: give \[B, N, 16\] or"):
        head(torch.zeros(shape), *words(head))


def test_words_are_for_heads_of_words(name):
    head, tokens = HEADS[name](), torch.zeros(2, 9, WIDTH)
    if name not in OF_WORDS:
        with pytest.raises(ConfigError, match=r"head\.word_dim"):
            head(tokens, torch.zeros(CLASSES, WORD))
        return

    for wrong, given in ((None, "none"), (torch.zeros(3, 4), r"the shape \[3, 4\]")):
        with pytest.raises(ConfigError, match=f"needs word queries .*got {given}"):
            head(tokens, wrong)


# Rows of classes


def shared(old, new):
    """Give a new head what does not belong to classes in an old one."""
    state = {key: value for key, value in old.state_dict().items() if key not in old.class_tensors}
    new.load_state_dict(state, strict=False)


@pytest.mark.parametrize(
    "name", ["gap", "bottleneck", "csra", "full", "query2label", "ram", "ram_plus"]
)
@torch.no_grad()
def test_a_class_that_is_carried_over_keeps_its_logit(name):
    # Drawn classes of seven, one twice; the new head has seven classes too.
    sources = [3, None, 0, 6, None, 3, 5]
    old, new = randomise(HEADS[name]()), randomise(HEADS[name](), seed=1)
    shared(old, new)
    tokens = noise(2, 9, WIDTH)
    fresh = new(tokens)
    taken = new.take_classes(old.state_dict(), sources, CLASSES)
    assert taken == [0, 2, 3, 5, 6]
    torch.testing.assert_close(new(tokens)[:, taken], old(tokens)[:, [3, 0, 6, 3, 5]])
    torch.testing.assert_close(new(tokens)[:, [1, 4]], fresh[:, [1, 4]])


@pytest.mark.parametrize(
    ("old_groups", "new_groups", "taken"),
    [
        (None, None, [0, 2, 3, 5, 6]),
        (3, None, [0, 2, 3, 5, 6]),
        (None, 4, [0, 2, 5, 6]),  # 2 and 3 had a query each, the first is kept
        (3, 3, [0, 3, 5, 6]),  # 0 and 2 had two queries, 3 and 5 the same
        (2, 2, [2, 3, 5]),  # the query of 0 was another than that of 2 and 3; 6 comes after 5
    ],
)
@torch.no_grad()
def test_a_group_takes_the_query_of_most_of_its_classes(old_groups, new_groups, taken):
    sources = [6, None, 0, 3, None, 4, 5]
    old = randomise(MLDecoder(WIDTH, 9, num_groups=old_groups, **SIZES))
    new = randomise(MLDecoder(WIDTH, CLASSES, num_groups=new_groups, **SIZES), seed=1)
    new.queries.normal_()
    shared(old, new)
    tokens = noise(2, 9, WIDTH)
    assert new.take_classes(old.state_dict(), sources, 9) == taken
    carried = [sources[number] for number in taken]
    torch.testing.assert_close(new(tokens)[:, taken], old(tokens)[:, carried])


# The option files

OPTIONS = sorted((Path(__file__).parents[3] / "configs" / "head").glob("*.yaml"))


@pytest.mark.parametrize("num_classes", [1, 80])
@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_an_option_gives_finite_logits_and_uses_all_its_parameters(path, num_classes):
    assert path.read_text(encoding="utf-8").startswith("# ")
    target, node = read_option(path)
    known = inspect.signature(target).parameters
    narrow = {"embed_dim": 64, "mlp_dim": 128, "bottleneck": 8}
    node |= {key: value for key, value in narrow.items() if key in known}

    torch.manual_seed(0)
    head = target(64, num_classes, **node)
    word_dim = getattr(head, "word_dim", None)
    queries = () if word_dim is None else (torch.randn(num_classes, word_dim),)
    logits = head(torch.randn(2, 49, 64), *queries)
    assert logits.shape == (2, num_classes)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert [key for key, p in head.named_parameters() if p.requires_grad and p.grad is None] == []


# Settings

WRONG = [
    (MLDecoder, {"embed_dim": 18}, "head.embed_dim 18 is not a multiple of head.num_heads 4"),
    (MLDecoder, {"num_groups": 0}, "head.num_groups is 0: it must be at least 1"),
    (MLDecoder, {"num_classes": 0}, "head.num_classes is 0"),
    (Query2Label, {"in_features": 10}, "from the backbone's width 10: set head.input_proj=true"),
    (WordGroupDecoder, {"group_size": 5}, "head.group_size 5 does not divide head.embed_dim 16"),
    (WordGroupDecoder, {"word_dim": 0}, "head.word_dim is 0"),
]


@pytest.mark.parametrize(("target", "settings", "fault"), WRONG)
def test_a_wrong_setting_is_one_line_with_its_name_and_value(target, settings, fault):
    with pytest.raises(ConfigError) as caught:
        target(**{"in_features": WIDTH, "num_classes": CLASSES, **SIZES, **settings})
    assert fault in str(caught.value)


# Classifiers


@pytest.fixture(scope="module")
def backbone():
    return TimmBackbone("test_resnet", model_args={"channels": [8, 8, 8, WIDTH]}).eval()


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        (torch.zeros(3, 64, 64), r"images have the shape \[3, 64, 64\]: give a batch"),
        (torch.zeros(2, 64, 64, 3), r"images have the shape \[2, 64, 64, 3\]"),
        (torch.zeros(2, 3, 64, 64, dtype=torch.bool), "images are torch.bool; give uint8"),
    ],
)
def test_images_that_are_none_are_named(backbone, images, fault):
    with pytest.raises(ValueError, match=fault):
        Classifier(backbone, HEADS["groups"]())(images)


@pytest.mark.parametrize(("side", "larger"), [(64, 96), (160, 224), (224, 288), (448, 576)])
def test_the_larger_scale_is_a_quarter_more_in_steps_of_32(side, larger):
    assert Viewed.larger(side) == larger


@torch.no_grad()
def test_views_have_the_mean_of_their_logits(backbone):
    model = Classifier(backbone, HEADS["groups"]()).eval()
    images = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    mirrored = torch.from_numpy(images.numpy()[..., ::-1].copy())
    smaller = resize(images.float() / 255, [64, 64], antialias=True)
    for views, other in (("flip", mirrored), ("scales", smaller)):
        viewed = Viewed(model, views, 64)
        expected = (model(images) + model(other)) / 2
        torch.testing.assert_close(viewed(images), expected)
        torch.testing.assert_close(viewed.classify(viewed.backbone(images)), model(images))
        with pytest.raises(ValueError, match="no attention of several views"):
            viewed(images, attention=True)


def test_attention_of_a_head_without_it_is_refused(backbone):
    images = torch.rand(2, 3, 64, 64)
    with pytest.raises(ConfigError, match="attention: GAP"):
        Classifier(backbone, HEADS["gap"]())(images, attention=True)
    model = Classifier(backbone, HEADS["groups"]()).eval()
    logits, attention = model(images, attention=True)
    assert attention.shape[:2] == (2, 3)
    tokens = backbone(images)
    assert torch.equal(TokenClassifier(backbone, model.head)(tokens), logits)
