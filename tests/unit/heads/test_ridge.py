"""The closed-form head, compared with brute-force refits in float64."""

import numpy as np
import pytest
import torch

from mldec.errors import ConfigError, DataError
from mldec.heads import RidgeHead, least_squares, ridge
from mldec.heads.least_squares import dual, group_members, masked, primal

BLOCKS = {"mean": 12, "s1": 8, "s2": 6, "s3": 4, "prob": 9, "top": 9}
WIDTH = sum(BLOCKS.values())


def features_and_labels(images=40, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.random((images, WIDTH))
    scores = features @ rng.normal(size=(WIDTH, classes))
    labels = (scores > np.median(scores, axis=0)).astype(np.int8)
    return torch.from_numpy(features), labels


def problem(images=30, classes=3, unknown=0.0, seed=0):
    """Return inputs [N, 7], a kernel [N, N], targets [N, K] and the mask of known targets."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(images, 7)))
    targets = torch.from_numpy((rng.random((images, classes)) < 0.4).astype(float))
    known = torch.from_numpy(rng.random((images, classes)) >= unknown)
    return inputs, inputs @ inputs.T, targets, known


def refit(kernel, targets, alpha, rows):
    """Solve the equations of kernel ridge regression on some images, and predict all images."""
    count = len(rows)
    system = torch.ones(count + 1, count + 1, dtype=kernel.dtype)
    system[:count, :count] = kernel[rows][:, rows] + alpha * torch.eye(count)
    system[count, count] = 0
    wanted = torch.cat([targets[rows], torch.zeros(1, targets.shape[1])])
    solution = torch.linalg.solve(system, wanted)
    return kernel[:, rows] @ solution[:count] + solution[count]


def brute_force(kernel, targets, alpha, members, known=None):
    """Return predictions without the image, or without its group, from one fit per group."""
    left_out = torch.empty_like(targets)
    for rows in members:
        others = torch.ones(len(kernel), dtype=torch.bool)
        others[rows] = False
        for column in range(targets.shape[1]):
            used = others if known is None else others & known[:, column]
            fitted = refit(kernel, targets[:, [column]], alpha, used.nonzero()[:, 0])
            left_out[rows, column] = fitted[rows, 0]
    return left_out


GROUPS = {"single": None, "groups": np.arange(30) % 9, "unequal": np.minimum(np.arange(30), 17)}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", ["dual", "primal", "rbf"])
def test_left_out_predictions_equal_refits(kind, groups, monkeypatch):
    monkeypatch.setattr(least_squares, "ROWS", 8)
    inputs, kernel, targets, _ = problem()
    own = GROUPS[groups]
    members = None if own is None else group_members(own)
    alpha = 0.7
    if kind == "rbf":
        kernel, _ = ridge.kernel_of(kernel, rbf=True)
    solver = dual(kernel, members)
    if kind == "primal":
        solver, _, unit = primal(lambda rows: inputs[rows], len(inputs), members)
        alpha = 0.7 / float(unit)

    [(_, left_out)] = solver.left_out(targets, [alpha])
    every = [torch.tensor([index]) for index in range(30)] if members is None else members
    torch.testing.assert_close(
        left_out, brute_force(kernel, targets, 0.7, every), rtol=1e-8, atol=1e-8
    )

    [weight] = solver.weights(targets, [alpha])
    predictions = targets.mean(0) + solver.inputs(torch.arange(30)) @ weight
    expected = refit(kernel, targets, 0.7, torch.arange(30))
    torch.testing.assert_close(predictions, expected, rtol=1e-8, atol=1e-8)
    # The second call uses stored leverages.
    [(_, again)] = solver.left_out(targets, [alpha])
    torch.testing.assert_close(again, left_out)


@pytest.mark.parametrize("unknown", [0.2, 0.7])
@pytest.mark.parametrize("groups", GROUPS)
def test_masked_fit_equals_fits_without_the_unknown_labels(unknown, groups):
    _, kernel, targets, known = problem(unknown=unknown)
    known[:, 1] = known[:, 0]  # two classes share their factorization
    own = GROUPS[groups]
    members = None if own is None else group_members(own)
    coefficients, bias, left_out = masked(kernel, targets, known, 0.7, members)

    for column in range(3):
        rows = known[:, column].nonzero()[:, 0]
        expected = refit(kernel, targets[:, [column]], 0.7, rows)[:, 0]
        predictions = kernel @ coefficients[:, column] + bias[column]
        torch.testing.assert_close(predictions, expected, rtol=1e-8, atol=1e-8)
    every = [torch.tensor([index]) for index in range(30)] if members is None else members
    expected = brute_force(kernel, targets, 0.7, every, known)
    torch.testing.assert_close(left_out[known], expected[known], rtol=1e-8, atol=1e-8)
    assert not coefficients[~known].any()


@pytest.mark.parametrize(("kernel", "images"), [("linear", 40), ("linear", 70), ("rbf", 40)])
def test_head_equals_an_independent_implementation(kernel, images):
    features, labels = features_and_labels(images)
    head = RidgeHead(WIDTH, 3, kernel=kernel, blocks=BLOCKS).fit(features, labels)

    # The blocks are unit vectors of the chosen transforms.
    parts = []
    start = 0
    for name, width in BLOCKS.items():
        block = features[:, start : start + width]
        start += width
        transform = dict(zip(BLOCKS, head.layout[:, 1].tolist(), strict=True))[name]
        if transform == ridge.ROOT:
            block = block.sqrt()
        if transform == ridge.STANDARD:
            block = (block - block.mean(0)) / (block.std(0, correction=0) + 1e-4)
        if transform != ridge.UNUSED:
            parts.append(block / block.norm(dim=1, keepdim=True))
    inputs = torch.cat(parts, 1)
    torch.testing.assert_close(head.normalize(features), inputs, rtol=1e-5, atol=1e-6)

    # Logits are a linear function of the predictions of the chosen alpha.
    gram, _ = ridge.kernel_of(inputs @ inputs.T, rbf=kernel == "rbf")
    alpha = float(head.summary.partition("alpha ")[2].partition(",")[0])
    alpha = min(ridge.ALPHAS, key=lambda value: abs(value - alpha))
    targets = torch.from_numpy(labels.astype(float))
    left_out = brute_force(gram, targets, alpha, [torch.tensor([row]) for row in range(images)])
    fitted = refit(gram, targets, alpha, torch.arange(images))
    logits = head(features.float()[:, None]).double()
    for column in range(3):
        slope, offset = np.polyfit(left_out[:, column], head.left_out[:, column], 1)
        assert slope > 0
        torch.testing.assert_close(
            logits[:, column], slope * fitted[:, column] + offset, rtol=1e-2, atol=2e-2
        )


def test_alpha_has_the_lowest_left_out_error():
    features, labels = features_and_labels()
    head = RidgeHead(WIDTH, 3, kernel="linear", blocks=BLOCKS).fit(features, labels)
    inputs = head.normalize(features)
    gram, _ = ridge.kernel_of(inputs @ inputs.T, rbf=False)
    targets = torch.from_numpy(labels.astype(float))
    errors = {}
    for alpha, left_out in dual(gram).left_out(targets, ridge.ALPHAS):
        share = ((targets - left_out) ** 2).mean(0) / targets.var(0, correction=0)
        errors[f"{alpha:.3g}"] = share.mean()
    alpha = head.summary.partition("alpha ")[2].partition(",")[0]
    assert min(errors, key=errors.get) == alpha


def test_unknown_labels_are_filled_for_many_images(monkeypatch):
    features, labels = features_and_labels(images=120)
    labels[np.random.default_rng(1).random(labels.shape) < 0.5] = -1
    exact = RidgeHead(WIDTH, 3, kernel="linear", blocks=BLOCKS).fit(features, labels)
    monkeypatch.setattr(ridge, "MAX_MASKED", 10)
    filled = RidgeHead(WIDTH, 3, kernel="linear", blocks=BLOCKS).fit(features, labels)
    assert "filled" in filled.summary
    assert "filled" not in exact.summary
    known = labels >= 0
    assert np.corrcoef(exact.left_out[known], filled.left_out[known])[0, 1] > 0.95


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("unknown", [False, True])
def test_degenerate_classes_have_finite_logits(kernel, unknown):
    features, labels = features_and_labels(classes=6)
    labels[:, 0] = 0
    labels[:, 1] = 1
    labels[:, 2] = 0
    labels[5, 2] = 1
    if unknown:
        labels[:, 3] = -1
        labels[1:, 4] = -1
        labels[::2, 5] = -1
    head = RidgeHead(WIDTH, 6, kernel=kernel, blocks=BLOCKS).fit(features, labels)
    logits = head(features.float()[:, None]).numpy()
    assert np.isfinite(logits).all()
    assert np.isfinite(head.left_out).all()
    assert (logits[:, 0] < -2).all()
    assert (logits[:, 1] > 2).all()


def test_single_labels_are_calibrated_by_a_temperature():
    features, _ = features_and_labels(images=90)
    classes = (3 * features[:, :3]).argmax(1).numpy()
    labels = np.eye(3, dtype=np.int8)[classes]
    head = RidgeHead(WIDTH, 3, kernel="linear").fit(features, labels, exclusive=True)
    left_out = torch.from_numpy(head.left_out)
    accuracy = (left_out.argmax(1).numpy() == classes).mean()
    assert accuracy > 0.6
    assert left_out.softmax(1).amax(1).mean().item() == pytest.approx(accuracy, abs=0.1)


def test_groups_choose_by_predictions_of_other_groups():
    rng = np.random.default_rng(0)
    groups = np.arange(60) // 6
    # The features identify the series, and the labels are those of the series.
    features = np.repeat(rng.normal(size=(10, 20)), 6, axis=0) + 0.01 * rng.normal(size=(60, 20))
    labels = (rng.random((10, 2)) < 0.5).repeat(6, axis=0).astype(np.int8)
    alone = RidgeHead(20, 2, kernel="linear").fit(features, labels)
    together = RidgeHead(20, 2, kernel="linear").fit(features, labels, groups)
    right = [((head.left_out > 0) == labels).mean() for head in (alone, together)]
    assert right[0] > 0.95
    assert right[1] < 0.8


@pytest.mark.parametrize("kind", ["series", "sorted by class", "random"])
def test_series_are_detected(kind):
    rng = np.random.default_rng(0)
    if kind == "series":
        # The features show the series, and its labels.
        centers = rng.normal(size=(8, 20))
        series = np.arange(160) // 20
        labels = (centers @ rng.normal(size=(20, 3)) > 0)[series].astype(np.int8)
        features = centers[series] + 0.3 * rng.normal(size=(160, 20))
    else:
        classes = rng.integers(3, size=160)
        if kind == "sorted by class":
            classes.sort()
        labels = np.eye(3, dtype=np.int8)[classes]
        features = labels @ rng.normal(size=(3, 20)) + rng.normal(size=(160, 20))
    head = RidgeHead(20, 3).fit(features, labels)
    assert head.has_series == (kind == "series")


def test_state_dict_of_another_fit_is_loaded():
    features, labels = features_and_labels()
    head = RidgeHead(WIDTH, 3, kernel="rbf", blocks=BLOCKS).fit(features, labels)
    fresh = RidgeHead(WIDTH, 3)
    fresh.allocate(head.state_dict())
    fresh.load_state_dict(head.state_dict())
    tokens = features.float()[:, None]
    assert torch.equal(fresh(tokens), head(tokens))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_named(value):
    features, labels = features_and_labels()
    features[3, 5] = value
    with pytest.raises(DataError, match=r"^head: .*train\.precision"):
        RidgeHead(WIDTH, 3, blocks=BLOCKS).fit(features, labels)


def test_gradient_is_finite_for_features_of_zero():
    features, labels = features_and_labels()
    features[:, 0] = 0
    head = RidgeHead(WIDTH, 3, blocks=BLOCKS).fit(features, labels)
    tokens = features.float()[:2, None].requires_grad_()
    head(tokens).sum().backward()
    assert tokens.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "images", "error", "name"),
    [
        ({"kernel": "rbf"}, 41, ConfigError, "head.kernel"),
        ({}, 1, DataError, "head"),
    ],
)
def test_unsupported_numbers_of_images_are_named(settings, images, error, name, monkeypatch):
    monkeypatch.setattr(ridge, "MAX_KERNEL", 40)
    features, labels = features_and_labels(images=images)
    with pytest.raises(error, match=name):
        RidgeHead(WIDTH, 3, **settings).fit(features, labels)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda tensor: tensor[:2]),
        ("center", lambda tensor: tensor[1:]),
        ("support", lambda tensor: tensor[:, 1:]),
        ("center", lambda tensor: tensor[None]),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_named(name, change):
    features, labels = features_and_labels()
    tensors = RidgeHead(WIDTH, 3, kernel="rbf", blocks=BLOCKS).fit(features, labels).state_dict()
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=name):
        RidgeHead(WIDTH, 3).allocate(tensors)


@pytest.mark.parametrize("unknown", [0.0, 0.3])
@pytest.mark.parametrize(("kernel", "images"), [("linear", 40), ("linear", 70), ("rbf", 40)])
def test_contributions_of_training_images_add_up_to_the_logits(kernel, images, unknown):
    features, labels = features_and_labels(images)
    labels[np.random.default_rng(1).random(labels.shape) < unknown] = -1
    head = RidgeHead(WIDTH, 3, kernel=kernel, blocks=BLOCKS).fit(features, labels)
    tokens = features_and_labels(5, seed=1)[0].float()[:, None]
    shares = head.contributions(tokens, head.examples, head.coefficients)
    assert shares.shape == (5, images, 3)
    torch.testing.assert_close(shares.sum(1) + head.bias, head(tokens), rtol=1e-2, atol=1e-2)
    # An image without a label of a class contributes nothing to this class.
    assert not head.coefficients.numpy()[labels < 0].any()


def test_large_fits_keep_no_training_images(monkeypatch):
    features, labels = features_and_labels(images=70)
    monkeypatch.setattr(ridge, "MAX_KERNEL", 60)
    head = RidgeHead(WIDTH, 3, blocks=BLOCKS).fit(features, labels)
    assert (head.examples, head.coefficients) == (None, None)
