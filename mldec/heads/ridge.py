"""Ridge regression on blocks of pooled features: a head that is fitted in closed form.

`least_squares` has the linear algebra. This module selects features, kernel and regularization by
the leave-one-out error, and converts the predictions to calibrated logits.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from mldec.errors import ConfigError, DataError
from mldec.evaluators.calibration import fit_scores, temperature
from mldec.heads.layers import as_tokens, reject_word_vectors, without_autocast
from mldec.heads.least_squares import (
    ROWS,
    SMALLEST,
    Groups,
    Solver,
    dual,
    group_members,
    masked,
    primal,
)

# Transforms of a block of features, before it is divided by its norm. The buffer `layout` stores
# these numbers, so they must not change.
UNUSED = 0  # the block is omitted
UNIT = 1  # no transform
ROOT = 2  # signed square root, which reduces the weight of a few large features
STANDARD = 3  # standardized with the statistics of the training images

# Candidate sets of blocks, from small to large; see `TimmBackbone` for the names. These sets and
# `MARGIN` were selected on several sets of photos, and tested on three others.
RICH = {"mean": ROOT, "s1": STANDARD, "s2": STANDARD, "prob": ROOT, "top": STANDARD}
RECIPES = ({"mean": UNIT}, RICH, RICH | {"s3": STANDARD})

# Candidates of the regularization. The scale of the features has no effect, see `kernel_of`, so the
# same values suit all data.
ALPHAS = tuple(np.geomspace(0.01, 100, 9).tolist())
TIE = 0.001  # a larger set of blocks is preferred if its error is larger by at most this fraction
MARGIN = 0.03  # minimum relative gain of a kernel, because it stores features of the images

MAX_CHOICE = 1_500  # maximum number of images for the selection of blocks and kernel
# Maximum number of images of a kernel: memory grows with their square, time with their cube.
MAX_KERNEL = 5_000
MAX_MASKED = 100_000  # maximum number of labels (N times K) of an exact fit with unknown labels
ROUNDS = 10  # iterations that fill unknown labels with leave-one-out predictions

SERIES = 20  # number of neighboring images that are left out together to detect series
# There are series if leaving out the neighbors reduces the explained variance to less than this
# fraction. It is 0.66 on Corel5k, which has series, and 0.83 to 1 on playing cards and VOC.
SERIES_LOSS = 0.75
MIN_EXPLAINED = 0.05  # fractions of the variance below this value are noise

# Predicted labels are about 0 to 1. With this factor, typical temperatures of a softmax are near 1.
SHARPNESS = 10.0

Kernel = Literal["auto", "linear", "rbf"]
Recipe = Mapping[str, int]  # transforms by the name of the block


class RidgeHead(nn.Module):
    """Ridge regression of the labels (0 or 1) on blocks of features, with calibrated logits.

    Each block is transformed and divided by its norm. The regression is linear in the blocks, or in
    the RBF kernel between an image and the training images, whose features are then stored. Blocks,
    kernel and regularization are selected by the leave-one-out error: the squared error of a class,
    divided by the variance of its labels and averaged over the classes. Leave-one-out predictions
    are computed without further fits, see `least_squares`. The logits are calibrated on them: by
    Platt scaling per class, or by a temperature for single-label data.

    The head has no parameters, only buffers. Their shapes depend on the training data.

    Args:
        in_features: Number of features D.
        num_classes: Number of classes K.
        kernel: "linear", "rbf" or "auto", which selects "rbf" if there are at most 5,000 images and
            its error is more than 3 % below the error of "linear". A checkpoint with an RBF kernel
            contains features of the training images.
        blocks: Widths of the blocks of features by name, in the order of the features. None for one
            block with all features, as for backbones without blocks.
    """

    features = "blocks"  # requests blocks of features from the backbone instead of tokens

    # D is the width of all blocks, E the width of the selected blocks, N the number of images.
    layout: Tensor  # int64 [number of blocks, 2]: width and transform of each block
    center: Tensor  # [D], 0 for blocks that are not standardized
    scale: Tensor  # [D], 1 for blocks that are not standardized
    support: Tensor  # float16 [N, E]: normalized features of the training images; linear: [0, E]
    gamma: Tensor  # []: the kernel is exp(-gamma |x - y|^2); unused if linear
    weight: Tensor  # [K, E], or [K, N] with a kernel
    bias: Tensor  # [K]

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        kernel: Kernel = "auto",
        blocks: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.blocks = dict(blocks or {"mean": in_features})

        # Results of `fit`, which are not stored in checkpoints.
        self.left_out = np.zeros((0, num_classes), np.float32)  # leave-one-out logits [N, K]
        # Normalized features float16 [N, E] and coefficients [N, K] of the training images, for
        # `contributions`. They are only set for at most `MAX_KERNEL` images.
        self.examples: Tensor | None = None
        self.coefficients: Tensor | None = None
        self.summary = ""  # the selected settings, for the log
        self.has_series = False  # whether neighboring images resemble each other

        # The shapes of the largest recipe are a placeholder until `fit` or `allocate`.
        zeros = torch.zeros(sum(self.blocks.values()))
        self.register_buffer("gamma", torch.zeros(()))
        self.register_buffer(
            "weight", torch.zeros(num_classes, self._use(RECIPES[-1], zeros, zeros))
        )
        self.register_buffer("bias", torch.zeros(num_classes))
        self.register_buffer("support", torch.zeros(0, self.weight.shape[1], dtype=torch.float16))

    def _use(self, recipe: Recipe, means: Tensor, deviations: Tensor) -> int:
        """Set the transforms of the blocks of a recipe, and return the width E of these blocks.

        `means` and `deviations` [D] are statistics of the training images.
        """
        layout = [(width, recipe.get(name, UNUSED)) for name, width in self.blocks.items()]
        self.register_buffer("layout", torch.tensor(layout))
        self._read_layout()
        widths, transforms = self.layout.T
        is_standard = (transforms == STANDARD).repeat_interleave(widths)
        self.register_buffer("center", torch.where(is_standard, means, 0).float())
        self.register_buffer("scale", torch.where(is_standard, deviations, 1).float())
        return int(widths[transforms != UNUSED].sum())

    def _read_layout(self) -> None:
        # Copy the sizes to Python numbers, because an exported graph cannot split by a tensor.
        self._widths, self._transforms = self.layout.T.tolist()
        self.in_features = sum(self._widths)

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate buffers with the shapes of the tensors in a state dict.

        Raises:
            ValueError: If the shapes do not fit each other or the number of classes.
        """
        # `load_state_dict` reports missing tensors.
        if not tensors.keys() >= dict(self.named_buffers()).keys():
            return
        widths, transforms = tensors["layout"].T
        inputs = int(widths[transforms != UNUSED].sum())
        stored = len(tensors["support"])
        expected = {
            "center": (int(widths.sum()),),
            "scale": (int(widths.sum()),),
            "support": (stored, inputs),
            "weight": (len(self.bias), stored or inputs),
        }
        for name, shape in expected.items():
            if tensors[name].shape != shape or min(widths.tolist()) < 1:
                raise ValueError(f"head.{name} has the shape {list(tensors[name].shape)}")
            setattr(self, name, torch.zeros_like(tensors[name], device=self.bias.device))
        self.layout = tensors["layout"].to(self.bias.device)
        self._read_layout()

    def normalize(self, features: Tensor) -> Tensor:
        """Transform features [B, D] to the selected blocks [B, E], each with the norm 1."""
        # The buffers have float32, so that half precision is promoted to it.
        blocks = ((features - self.center) / self.scale).split(self._widths, 1)
        parts = []
        for block, transform in zip(blocks, self._transforms, strict=True):
            if transform == ROOT:
                # Heat maps need the gradient. The small number limits it at 0.
                block = block.sign() * (block.abs() + 1e-12).sqrt()
            if transform != UNUSED:
                parts.append(block / block.norm(dim=1, keepdim=True).clamp_min(1e-12))
        return torch.cat(parts, 1)

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`. Several tokens are averaged."""
        reject_word_vectors(word_vectors, self)
        tokens = as_tokens(tokens, self.in_features)
        with without_autocast(tokens.device):
            # The kernel subtracts nearly equal numbers, which half precision would round to 0.
            inputs = self.normalize(tokens.float().mean(1))
            if len(self.support):
                inputs = self._similarity(inputs, self.support.float())
            return inputs @ self.weight.float().T + self.bias.float()

    def _similarity(self, inputs: Tensor, examples: Tensor) -> Tensor:
        """Return the kernel [B, N] between normalized features [B, E] and [N, E]."""
        if not len(self.support):
            return inputs @ examples.T
        distances = inputs.square().sum(1, keepdim=True) + examples.square().sum(1)
        distances = distances - 2 * inputs @ examples.T
        return torch.exp(-self.gamma.float() * distances.clamp_min(0))

    @torch.no_grad()
    def contributions(self, tokens: Tensor, examples: Tensor, coefficients: Tensor) -> Tensor:
        """Return the contribution of each training image to the logits of B images, [B, N, K].

        Their sum over the training images, plus `bias`, gives the logits. A contribution is the
        coefficient of the training image, multiplied by its similarity to the image relative to the
        mean similarity. A coefficient is proportional to the residual of the fit, so with few
        exceptions it is positive for images with the class and negative for others.

        Args:
            tokens: Output of the backbone for the images, [B, 1, D].
            examples: `examples` of the head after `fit`, [N, E].
            coefficients: `coefficients` of the head after `fit`, [N, K], or some of the columns.

        Source: the representer theorem, Kimeldorf and Wahba 1971; Yeh et al. 2018, Representer
        Point Selection for Explaining Deep Neural Networks.
        """
        tokens = as_tokens(tokens, self.in_features)
        with without_autocast(tokens.device):
            inputs = self.normalize(tokens.float().mean(1))
            similarity = self._similarity(inputs, examples.to(inputs))
            # The coefficients of a class sum to 0, so a constant does not change the logits.
            # Without its subtraction, all similarities are positive, and the same few images with
            # large coefficients contribute most to every prediction.
            similarity = similarity - similarity.mean(1, keepdim=True)
            return similarity[:, :, None] * coefficients.to(inputs)

    @torch.no_grad()
    def fit(
        self, features: Any, labels: Any, groups: Any = None, *, exclusive: bool = False
    ) -> Self:
        """Fit the head to N images, and set `left_out`.

        Args:
            features: Floating point [N, D] or [N, 1, D]; float16 saves memory. Images of a series
                should be neighbors, for example sorted by name, so that they are detected.
            labels: [N, K] of 1, 0 or -1 (unknown). Each class is fitted on its known labels if N is
                at most 5,000 and N x K at most 100,000. Otherwise unknown labels are filled with
                leave-one-out predictions.
            groups: Group of each image, [N], such as its series. The images of a group are left out
                together. None leaves out single images.
            exclusive: Whether the logits are calibrated for a softmax instead of per class.

        Raises:
            ConfigError: If there are more than 5,000 images for kernel="rbf".
            DataError: If there are fewer than two images or groups, or a feature is not finite.
        """
        rows = torch.as_tensor(features).flatten(1)
        labels = np.asarray(labels)
        members = None if groups is None else group_members(np.asarray(groups))
        if len(rows if members is None else members) < 2:
            raise DataError("head: it needs at least two images or groups; add images")
        if self.kernel == "rbf" and len(rows) > MAX_KERNEL:
            fault = f"{len(rows):,} images, and a kernel supports at most {MAX_KERNEL:,}"
            raise ConfigError(f"head.kernel=rbf: {fault}; pass head.kernel=linear")
        if not rows.isfinite().all():
            fix = "pass train.precision=fp32, or check the weights of the backbone"
            raise DataError(f"head: the features of an image are not finite; {fix}")

        # Unknown labels have the frequency of their class as the initial target. `_solve` excludes
        # them, or replaces the targets by predictions.
        known = torch.from_numpy(labels >= 0)
        frequencies = (labels == 1).sum(0) / np.maximum((labels >= 0).sum(0), 1)
        targets = torch.from_numpy(np.where(labels >= 0, labels == 1, frequencies))

        means, deviations = statistics(rows)
        recipe, is_kernel = self._choose(rows, targets, known, groups, means, deviations)
        width = self._use(recipe, means, deviations)
        self.support = torch.zeros(0, width, dtype=torch.float16)
        # Given groups are the series, so they need not be detected.
        if groups is None:
            some = slice(MAX_CHOICE)
            inputs = self.normalize(rows[some])
            self.has_series = has_series(inputs, targets[some], known[some])
        weight, coefficients, bias, left_out = self._solve(
            rows, targets, known, members, is_kernel=is_kernel
        )

        # The calibration is linear, so it becomes a part of the weights.
        slopes, offsets = calibrate(left_out.numpy(), labels, exclusive=exclusive)
        self.examples = None
        self.coefficients = None
        if len(rows) <= MAX_KERNEL:
            self.examples = self.normalize(rows).half()
            self.coefficients = (coefficients * slopes).float()
        self.weight = (weight * slopes).T.float().contiguous()
        self.bias = (bias * slopes + offsets).float()
        self.left_out = (left_out * slopes + offsets).float().numpy()
        kind = "RBF kernel" if is_kernel else "linear map"
        blocks = ", ".join(name for name in self.blocks if name in recipe)
        self.summary = f"{kind} of the blocks {blocks}, {self.summary}"
        return self

    def _solve(
        self, rows: Tensor, targets: Tensor, known: Tensor, members: Groups, *, is_kernel: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solve the regression for the selected blocks, and set `support`, `gamma` and `summary`.

        `targets` are float64 [N, K] in [0, 1], with the frequency of the class if not `known`.

        Returns:
            The weights [E, K], or [N, K] with a kernel, the coefficients of the images [N, K]
            (empty for a primal solution with more than `MAX_KERNEL` images), the biases [K], and
            the leave-one-out predictions [N, K].
        """
        width = self.support.shape[1]
        is_complete = bool(known.all())
        is_masked = not is_complete and known.numel() <= MAX_MASKED and len(rows) <= MAX_KERNEL

        def normalized(index: Tensor) -> Tensor:
            return self.normalize(rows[index])

        # 1. Decompose the problem once for all alphas. The primal form has a matrix [E, E], the
        # dual form a matrix [N, N]. Use the smaller one, except for a kernel and for an exact fit
        # with unknown labels, which need the dual form.
        means = scale = torch.zeros(())
        kernel = inputs = coefficients = torch.zeros(0)
        is_dual = is_kernel or len(rows) <= width or is_masked
        if is_dual:
            inputs = torch.cat([normalized(index) for index in torch.arange(len(rows)).split(ROWS)])
            kernel, scale = kernel_of(inputs @ inputs.T, rbf=is_kernel)
            solver = dual(kernel, members)
        else:
            solver, means, scale = primal(normalized, len(rows), members)

        # 2. Select alpha.
        alpha, error, left_out = best(solver, targets, known)
        self.summary = f"alpha {alpha:.3g}, left-out error {error:.3f}"
        if is_kernel:
            self.support = inputs.half()
            self.gamma = scale.float()

        # 3. Compute the coefficients of the images, and in the primal form the weights.
        if is_masked:
            self.summary += ", each class on its known labels"
            coefficients, bias, left_out = masked(kernel, targets, known, alpha, members)
        else:
            if not is_complete:
                self.summary += ", unknown labels filled with left-out predictions"
                # The leave-one-out prediction of an image does not depend on its own target. An
                # in-sample prediction would confirm the value that was filled in.
                for _ in range(ROUNDS):
                    targets = torch.where(known, targets, left_out.clamp(0, 1))
                    _, left_out = next(solver.left_out(targets, [alpha]))
            [weight] = solver.weights(targets, [alpha])
            # The coefficients of the images are the in-sample residuals divided by alpha. For many
            # images, a linear map does not need them.
            if is_dual or len(rows) <= MAX_KERNEL:
                fitted = solver.inputs(torch.arange(len(rows))).to(weight.dtype) @ weight
                coefficients = (targets - targets.mean(0) - fitted) / alpha
            if is_dual:
                bias = targets.mean(0) - kernel.mean(0) @ coefficients
            else:
                weight = weight / scale.sqrt()
                bias = targets.mean(0) - means @ weight

        # 4. Convert the coefficients of a linear kernel to weights of the features. The kernel was
        # divided by its scale, see `kernel_of`.
        if is_kernel:
            return coefficients, coefficients, bias, left_out
        if is_dual:
            weight = inputs.T.double() @ coefficients / scale
        return weight, coefficients / scale, bias, left_out

    def _choose(
        self,
        rows: Tensor,
        targets: Tensor,
        known: Tensor,
        groups: Any,
        means: Tensor,
        deviations: Tensor,
    ) -> tuple[Recipe, bool]:
        """Select blocks and whether to use a kernel by the error on at most `MAX_CHOICE` images."""
        some = torch.from_numpy(np.random.default_rng(0).permutation(len(rows))[:MAX_CHOICE])
        members = None
        if groups is not None:
            members = group_members(np.asarray(groups)[some.numpy()])
            # At least two groups are needed for an error. All sampled images may be in one group.
            if len(members) < 2:
                members = None

        def error_of(recipe: Recipe, *, rbf: bool) -> float:
            self._use(recipe, means, deviations)
            inputs = self.normalize(rows[some])
            kernel, _ = kernel_of(inputs @ inputs.T, rbf=rbf)
            # float32 is sufficient to compare errors.
            solver = dual(kernel.float(), members)
            return best(solver, targets[some].float(), known[some])[1]

        # A backbone may lack some blocks, which makes recipes equal. They are ordered by size, so
        # `last` is the largest recipe with about the lowest error.
        recipes: list[Recipe] = []
        for recipe in RECIPES:
            present = {name: kind for name, kind in recipe.items() if name in self.blocks}
            if present not in recipes:
                recipes.append(present)
        only_kernel = self.kernel == "rbf"
        errors = [error_of(recipe, rbf=only_kernel) for recipe in recipes]
        last = max(n for n, error in enumerate(errors) if error <= (1 + TIE) * min(errors))
        if self.kernel != "auto" or len(rows) > MAX_KERNEL:
            return recipes[last], only_kernel
        return recipes[last], error_of(recipes[last], rbf=True) < (1 - MARGIN) * errors[last]


def has_series(inputs: Tensor, targets: Tensor, known: Tensor) -> bool:
    """Return True if neighboring images resemble each other, as in bursts and videos.

    Leave-one-out metrics are too high then, because the neighbors of each image are in the fit. Two
    predictions are compared: without blocks of `SERIES` neighbors, and without blocks of random
    images. For the second one, images are only exchanged with images of the same labels if there
    are at least `SERIES` of these, so that images sorted by class are not taken for series. The
    arguments are those of `best`, with normalized features [N, E].
    """
    # A few blocks give no reliable estimate.
    if len(inputs) < 4 * SERIES:
        return False

    # The kind of an image is the number of its combination of labels. All rare combinations have
    # the kind -1. Images are exchanged within their kind.
    _, kind, counts = torch.unique(targets, dim=0, return_inverse=True, return_counts=True)
    kind[counts[kind] < SERIES] = -1
    order = torch.arange(len(inputs))
    shuffled = order.clone()
    generator = torch.Generator().manual_seed(0)
    for value in kind.unique():
        own = order[kind == value]
        shuffled[own] = own[torch.randperm(len(own), generator=generator)]

    kernel, _ = kernel_of(inputs @ inputs.T, rbf=False)
    solver = dual(kernel.float())
    targets = targets.float()
    alpha, _, _ = best(solver, targets, known)
    explained = []
    for images in (order, shuffled):
        # Only the groups differ, so that one eigendecomposition serves both predictions.
        solver.members = images.split(SERIES)
        _, left_out = next(solver.left_out(targets, [alpha]))
        explained.append(1 - relative_error(targets, known, left_out))
    return explained[1] > MIN_EXPLAINED and explained[0] < SERIES_LOSS * explained[1]


def statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and the standard deviations of features [N, D], each float64 [D]."""
    sums = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for part in rows.split(ROWS):
        sums += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    means, squares = sums / len(rows)
    # The small number limits the scale of constant features.
    return means, (squares - means.square()).clamp_min(0).sqrt() + 1e-4


def kernel_of(products: Tensor, *, rbf: bool) -> tuple[Tensor, Tensor]:
    """Return the kernel of N inputs, float64 [N, N], and its scale.

    A linear kernel is divided by its scale, the mean squared norm of the centered inputs. The scale
    of an RBF kernel is `gamma`, the inverse of the median squared distance between the inputs.
    `products` [N, N] are the inner products of the inputs.
    """
    products = products.double()
    squares = products.diagonal()
    if not rbf:
        scale = (squares.mean() - products.mean()).clamp_min(SMALLEST)
        return products / scale, scale
    distances = (squares[:, None] + squares - 2 * products).clamp_min(0)
    gamma = 1 / distances.median().clamp_min(SMALLEST)
    return torch.exp(-gamma * distances), gamma


def best(solver: Solver, targets: Tensor, known: Tensor) -> tuple[float, float, Tensor]:
    """Return the alpha with the lowest leave-one-out error, the error, and predictions [N, K].

    Targets are [N, K] in [0, 1], of which `known` ones, bool [N, K], count.
    """
    solutions = []
    for alpha, left_out in solver.left_out(targets, ALPHAS):
        solutions.append((alpha, relative_error(targets, known, left_out), left_out))
    return min(solutions, key=itemgetter(1))


def relative_error(targets: Tensor, known: Tensor, predictions: Tensor) -> float:
    """Return the squared error relative to the variance of a class, averaged over the classes."""
    errors = torch.where(known, (targets - predictions).square(), 0).sum(0)
    variances = torch.where(known, (targets - targets.mean(0)).square(), 0).sum(0)
    # Constant labels have no variance.
    varies = variances > SMALLEST
    if not varies.any():
        return 0.0
    return float((errors[varies] / variances[varies]).mean())


def calibrate(
    left_out: np.ndarray, labels: np.ndarray, *, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """Return slopes and offsets, float64 [K], that convert predictions to calibrated logits.

    The predictions [N, K] are leave-one-out, so that the calibration is not optimistic. Exclusive
    labels [N, K] have one temperature for a softmax.
    """
    every = np.ones(len(labels), bool)
    if exclusive:
        # The temperature is 1 if the search finds no optimum.
        slope = SHARPNESS / (temperature(SHARPNESS * left_out, labels, every) or 1.0)
        slopes = torch.full((labels.shape[1],), slope, dtype=torch.float64)
        return slopes, torch.zeros_like(slopes)
    fitted = fit_scores(left_out, labels, every)
    return torch.from_numpy(fitted.slopes), torch.from_numpy(fitted.offsets)
