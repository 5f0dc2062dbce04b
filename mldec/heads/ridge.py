"""Ridge regression on blocks of features: a head that is fitted in closed form."""

from collections.abc import Mapping
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

# Transforms of a block, before it is divided by its norm.
UNUSED = 0
UNIT = 1
ROOT = 2  # signed square root
STANDARD = 3  # standardized with the statistics of the training images

# Candidate sets of blocks, from small to large; see `TimmBackbone` for the names. They and `MARGIN`
# were chosen on several sets of photos, and confirmed on three others.
RICH = {"mean": ROOT, "s1": STANDARD, "s2": STANDARD, "prob": ROOT, "top": STANDARD}
RECIPES = ({"mean": UNIT}, RICH, RICH | {"s3": STANDARD})
ALPHAS = tuple(np.geomspace(0.01, 100, 9).tolist())
TIE = 0.001  # a larger set of blocks is preferred if its error is larger by at most this share
MARGIN = 0.03  # relative gain that a kernel must have, because it stores features of the images

MAX_CHOICE = 1_500  # images on which blocks and kernel are chosen
MAX_KERNEL = 5_000  # images of a kernel: the memory grows with their square, the time with the cube
MAX_MASKED = 100_000  # images times classes of an exact fit with unknown labels
ROUNDS = 10  # of filling unknown labels with left-out predictions

SERIES = 20  # neighboring images that are left out together, to detect series
# Share of the explained variance that is left without neighbors: 0.66 on the series of Corel5k, and
# 0.83 to 1 on playing cards and VOC.
SERIES_LOSS = 0.75
MIN_EXPLAINED = 0.05  # a smaller share is noise

# Predicted labels are about 0 to 1. With this factor, usual temperatures of a softmax are near 1.
SHARPNESS = 10.0

Kernel = Literal["auto", "linear", "rbf"]
Recipe = Mapping[str, int]  # transforms by the name of the block


class RidgeHead(nn.Module):
    """Ridge regression of the labels (0 or 1) on blocks of features, with calibrated logits.

    Each block is transformed and divided by its norm. The map is linear, or an RBF kernel over the
    stored features of the training images. Blocks, kernel and regularization are selected by the
    squared error of the leave-one-out predictions, relative to the variance of the class and
    averaged over the classes. These predictions need no further fits, see `least_squares`. The
    logits are calibrated on them: by Platt scaling per class, or for single-label data by a
    temperature.

    The head has buffers, whose shapes depend on the training data, and no parameters.

    Args:
        in_features: Number of features D.
        num_classes: Number of classes K.
        kernel: "linear", "rbf", or "auto" for "rbf" if its error is at least 3 % lower than that of
            "linear". A kernel contains features of the training images, at most 5,000.
        blocks: Names and widths of the blocks of features, in order. None for a single block, such
            as the features of any other network.
    """

    features = "blocks"  # the output of the backbone that the head needs; other heads need tokens

    layout: Tensor  # int64 [number of blocks, 2]: width and transform of each block
    center: Tensor  # [D], 0 for blocks that are not standardized
    scale: Tensor  # [D], 1 for blocks that are not standardized
    support: Tensor  # float16 [N, E]: normalized features of the training images; [0, E]: linear
    gamma: Tensor  # []: the kernel is exp(-gamma |x - y|^2)
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
        self.left_out = np.zeros((0, num_classes), np.float32)  # left-out logits [N, K]
        self.summary = ""  # the choices, for the log
        self.has_series = False  # whether neighboring images resemble each other

        zeros = torch.zeros(sum(self.blocks.values()))
        self.register_buffer("gamma", torch.zeros(()))
        self.register_buffer(
            "weight", torch.zeros(num_classes, self._use(RECIPES[-1], zeros, zeros))
        )
        self.register_buffer("bias", torch.zeros(num_classes))
        self.register_buffer("support", torch.zeros(0, self.weight.shape[1], dtype=torch.float16))

    def _use(self, recipe: Recipe, means: Tensor, deviations: Tensor) -> int:
        """Set the transforms of the blocks from statistics [D]. Returns the width E."""
        layout = [(width, recipe.get(name, UNUSED)) for name, width in self.blocks.items()]
        self.register_buffer("layout", torch.tensor(layout))
        self._read_layout()
        widths, transforms = self.layout.T
        is_standard = (transforms == STANDARD).repeat_interleave(widths)
        self.register_buffer("center", torch.where(is_standard, means, 0).float())
        self.register_buffer("scale", torch.where(is_standard, deviations, 1).float())
        return int(widths[transforms != UNUSED].sum())

    def _read_layout(self) -> None:
        # Python numbers, because a graph cannot be traced with sizes from a tensor.
        self._widths, self._transforms = self.layout.T.tolist()
        self.in_features = sum(self._widths)

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Prepare the buffers for the tensors of another fit, whose shapes differ.

        Raises ValueError if the shapes do not fit each other or the classes.
        """
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
        """Map features [B, D] to the selected blocks [B, E], a unit vector per block."""
        blocks = ((features - self.center) / self.scale).split(self._widths, 1)
        parts = []
        for block, transform in zip(blocks, self._transforms, strict=True):
            if transform == ROOT:
                # The small number limits the gradient at 0.
                block = block.sign() * (block.abs() + 1e-12).sqrt()
            if transform != UNUSED:
                parts.append(block / block.norm(dim=1, keepdim=True).clamp_min(1e-12))
        return torch.cat(parts, 1)

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`. Several tokens are averaged."""
        tokens = as_tokens(tokens, self.in_features)
        reject_word_vectors(word_vectors, self)
        with without_autocast(tokens.device):
            # The differences of a kernel are too small for half precision.
            inputs = self.normalize(tokens.float().mean(1))
            if len(self.support):
                support = self.support.float()
                distances = inputs.square().sum(1, keepdim=True) + support.square().sum(1)
                distances = distances - 2 * inputs @ support.T
                inputs = torch.exp(-self.gamma.float() * distances.clamp_min(0))
            return inputs @ self.weight.float().T + self.bias.float()

    @torch.no_grad()
    def fit(
        self, features: Any, labels: Any, groups: Any = None, *, exclusive: bool = False
    ) -> Self:
        """Fit the head, and set `left_out`.

        Args:
            features: Features of N images, floating point [N, D] or [N, 1, D]. Half precision is
                converted in blocks of images, so that float16 saves memory. The order of the images
                shows series, such as the order of their names.
            labels: Labels [N, K]: 1, 0 or -1 (unknown). A class is fitted on its known labels. If N
                x K is above 100,000, unknown labels are filled with left-out predictions instead.
            groups: Group of each image, [N], such as its series. The images of a group are left out
                together. None leaves out single images.
            exclusive: Whether each image has exactly one label, for the calibration.

        Raises:
            ConfigError: If there are more than 5,000 images for kernel="rbf".
            DataError: If there are fewer than two images or groups.
        """
        rows = torch.as_tensor(features).flatten(1)
        labels = np.asarray(labels)
        members = None if groups is None else group_members(np.asarray(groups))
        if len(rows if members is None else members) < 2:
            raise DataError("head: it needs at least two images or groups; add images")
        if self.kernel == "rbf" and len(rows) > MAX_KERNEL:
            fault = f"{len(rows):,} images, and a kernel supports at most {MAX_KERNEL:,}"
            raise ConfigError(f"head.kernel=rbf: {fault}; pass head.kernel=linear")

        # Unknown labels count as the frequency of their class, until they are left out below.
        known = torch.from_numpy(labels >= 0)
        frequencies = (labels == 1).sum(0) / np.maximum((labels >= 0).sum(0), 1)
        targets = torch.from_numpy(np.where(labels >= 0, labels == 1, frequencies))

        means, deviations = statistics(rows)
        recipe, is_kernel = self._choose(rows, targets, known, groups, means, deviations)
        width = self._use(recipe, means, deviations)
        self.support = torch.zeros(0, width, dtype=torch.float16)
        if groups is None:
            some = slice(MAX_CHOICE)
            inputs = self.normalize(precise(rows[some]))
            self.has_series = has_series(inputs, targets[some], known[some])
        weight, bias, left_out = self._solve(rows, targets, known, members, is_kernel=is_kernel)

        slopes, offsets = calibrate(left_out.numpy(), labels, exclusive=exclusive)
        self.weight = (weight * slopes).T.float().contiguous()
        self.bias = (bias * slopes + offsets).float()
        self.left_out = (left_out * slopes + offsets).float().numpy()
        kind = "RBF kernel" if is_kernel else "linear map"
        blocks = ", ".join(name for name in self.blocks if name in recipe)
        self.summary = f"{kind} of the blocks {blocks}, {self.summary}"
        return self

    def _solve(
        self, rows: Tensor, targets: Tensor, known: Tensor, members: Groups, *, is_kernel: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, biases and left-out predictions; set `support`, `gamma` and `summary`."""
        width = self.support.shape[1]
        is_complete = bool(known.all())
        fits_masks = known.numel() <= MAX_MASKED and len(rows) <= MAX_KERNEL

        def normalized(index: Tensor) -> Tensor:
            return self.normalize(precise(rows[index]))

        means = scale = torch.zeros(())
        kernel = inputs = torch.zeros(0)
        is_dual = is_kernel or len(rows) <= width or (fits_masks and not is_complete)
        if is_dual:
            inputs = torch.cat([normalized(index) for index in torch.arange(len(rows)).split(ROWS)])
            kernel, scale = kernel_of(inputs @ inputs.T, rbf=is_kernel)
            solver = dual(kernel, members)
        else:
            solver, means, scale = primal(normalized, len(rows), members)
        alpha, error, left_out = best(solver, targets, known)
        self.summary = f"alpha {alpha:.3g}, left-out error {error:.3f}"
        if is_kernel:
            self.support = inputs.half()
            self.gamma = scale.float()

        if not is_complete and fits_masks:
            self.summary += ", each class on its known labels"
            weight, bias, left_out = masked(kernel, targets, known, alpha, members)
        else:
            if not is_complete:
                self.summary += ", unknown labels filled with left-out predictions"
                for _ in range(ROUNDS):
                    targets = torch.where(known, targets, left_out.clamp(0, 1))
                    _, left_out = next(solver.left_out(targets, [alpha]))
            [weight] = solver.weights(targets, [alpha])
            if is_dual:
                fitted = solver.inputs(torch.arange(len(rows))) @ weight
                weight = (targets - targets.mean(0) - fitted) / alpha
                bias = targets.mean(0) - kernel.mean(0) @ weight
            else:
                weight = weight / scale.sqrt()
                bias = targets.mean(0) - means @ weight
        if is_dual and not is_kernel:
            weight = inputs.T.double() @ weight / scale
        return weight, bias, left_out

    def _choose(
        self,
        rows: Tensor,
        targets: Tensor,
        known: Tensor,
        groups: Any,
        means: Tensor,
        deviations: Tensor,
    ) -> tuple[Recipe, bool]:
        """Choose blocks, and whether to use a kernel, on at most `MAX_CHOICE` images."""
        some = torch.from_numpy(np.random.default_rng(0).permutation(len(rows))[:MAX_CHOICE])
        members = None if groups is None else group_members(np.asarray(groups)[some.numpy()])
        if members is not None and len(members) < 2:
            members = None

        raw = precise(rows[some])
        some_targets = targets[some].float()  # a choice needs no double precision

        def error_of(recipe: Recipe, *, rbf: bool) -> float:
            self._use(recipe, means, deviations)
            inputs = self.normalize(raw)
            kernel, _ = kernel_of(inputs @ inputs.T, rbf=rbf)
            return best(dual(kernel.float(), members), some_targets, known[some])[1]

        recipes: list[Recipe] = []
        for recipe in RECIPES:
            present = {name: kind for name, kind in recipe.items() if name in self.blocks}
            if present not in recipes:
                recipes.append(present)
        only_kernel = self.kernel == "rbf"
        errors = [error_of(recipe, rbf=only_kernel) for recipe in recipes]
        accepted = [n for n, error in enumerate(errors) if error <= (1 + TIE) * min(errors)]
        chosen = recipes[accepted[-1]]
        if self.kernel != "auto" or len(rows) > MAX_KERNEL:
            return chosen, only_kernel
        return chosen, error_of(chosen, rbf=True) < (1 - MARGIN) * errors[accepted[-1]]


def has_series(inputs: Tensor, targets: Tensor, known: Tensor) -> bool:
    """Return True if images are predicted much better with their neighbors in the given order.

    The predictions without blocks of `SERIES` neighbors are compared with those without blocks of
    random images. Images with frequent labels are exchanged with others of the same labels only,
    because images that are sorted by class are no series.
    """
    if len(inputs) < 4 * SERIES:
        return False
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
        solver.members = images.split(SERIES)
        _, left_out = next(solver.left_out(targets, [alpha]))
        explained.append(1 - relative_error(targets, known, left_out))
    return explained[1] > MIN_EXPLAINED and explained[0] < SERIES_LOSS * explained[1]


def precise(features: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and the standard deviations of features [N, D], float64 [D]."""
    sums = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for part in rows.split(ROWS):
        sums += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    means, squares = sums / len(rows)
    # Constant features have a deviation near 0.
    return means, (squares - means.square()).clamp_min(0).sqrt() + 1e-4


def kernel_of(products: Tensor, *, rbf: bool) -> tuple[Tensor, Tensor]:
    """Return the kernel float64 [N, N] of inner products [N, N], and its scale.

    The scale is the mean squared norm of the centered inputs, by which a linear kernel is divided,
    or `gamma` of an RBF kernel, the inverse of the median squared distance.
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
    """Return the alpha with the lowest error, this error, and the left-out predictions [N, K]."""
    lowest: tuple[float, float, Tensor] | None = None
    for alpha, left_out in solver.left_out(targets, ALPHAS):
        error = relative_error(targets, known, left_out)
        if lowest is None or error < lowest[1]:
            lowest = (alpha, error, left_out)
    assert lowest is not None
    return lowest


def relative_error(targets: Tensor, known: Tensor, predictions: Tensor) -> float:
    """Return the squared error divided by the variance of the class, averaged over the classes."""
    errors = torch.where(known, (targets - predictions).square(), 0).sum(0)
    variances = torch.where(known, (targets - targets.mean(0)).square(), 0).sum(0)
    # Classes that all or no images show have no variance.
    varies = variances > SMALLEST
    if not varies.any():
        return 0.0
    return float((errors[varies] / variances[varies]).mean())


def calibrate(
    left_out: np.ndarray, labels: np.ndarray, *, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """Fit slopes and offsets [K] of left-out predictions [N, K], which become logits."""
    every = np.ones(len(labels), bool)
    if exclusive:
        slope = SHARPNESS / (temperature(SHARPNESS * left_out, labels, every) or 1.0)
        slopes = torch.full((labels.shape[1],), slope, dtype=torch.float64)
        return slopes, torch.zeros_like(slopes)
    fitted = fit_scores(left_out, labels, every)
    return torch.from_numpy(fitted.slopes), torch.from_numpy(fitted.offsets)
