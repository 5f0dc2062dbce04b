"""Ridge regression with leave-one-out and leave-one-group-out predictions in closed form.

Targets [N, K] of N images are predicted by a linear function of the inputs (primal form) or of a
kernel between the images (dual form), with an intercept that is not regularized. "Left-out" below
means predicted by a model that was fitted without the image, or without the group of the image.

Let H [N, N] be the hat matrix, which maps the targets to the in-sample predictions, and r the
in-sample residuals. The left-out residuals of image i, and of the images of a group B, are

    r_i / (1 - H_ii)        and        (I - H_BB)^-1 r_B

so that no further fits are needed.

Source: Allen 1974 (PRESS); Rifkin and Lippert 2007, Notes on Regularized Least Squares.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

ROWS = 4_096  # images per block, which limits the memory
SMALLEST = 1e-12  # minimum of 1 - H_ii, which is 0 for the only known label of a class
# Relative addition to the diagonal of I - H_BB. This matrix is singular if a group has all known
# labels of a class.
JITTER = 1e-13

Groups = Sequence[Tensor] | None  # indices of the images of each group; None: single images


def group_members(groups: np.ndarray) -> list[Tensor]:
    """Return the indices of the images of each group. `groups` are N values of any type."""
    _, numbers = np.unique(groups, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))[:-1]
    return list(map(torch.from_numpy, np.split(order, ends)))


def without_group(block: Tensor, residuals: Tensor) -> Tensor:
    """Return the left-out residuals of a group of b images.

    `block` is the matrix I - H_BB [b, b] and `residuals` are the in-sample residuals [b, K], or the
    same multiple of both.
    """
    jitter = JITTER * block.diagonal().mean().clamp_min(SMALLEST)
    return torch.linalg.solve(block + jitter * torch.eye(len(block), dtype=block.dtype), residuals)


class Solver:
    """Solver for several regularizations (alpha) and targets with a single eigendecomposition.

    Args:
        inputs: Function that returns the centered inputs [B, E] of images, given as indices [B]. It
            is called for blocks of images, so that only the predictions need memory for N images.
        count: Number of images N.
        values: Eigenvalues [R] of the inner products of the inputs. Rounding may make some of them
            negative; they are set to 0.
        rotation: Matrix [E, R] of the eigenvectors, or None if the inputs are rotated already.
        members: Groups of images that are left out together; None for single images.
    """

    def __init__(
        self,
        inputs: Callable[[Tensor], Tensor],
        count: int,
        values: Tensor,
        rotation: Tensor | None,
        members: Groups,
    ) -> None:
        self.inputs = inputs
        self.count = count
        self.values = values.clamp_min(0)
        self.rotation = rotation
        self.members = members
        self.shares: dict[float, Tensor] = {}  # 1 - H_ii of all images by alpha

    def _blocks(self) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Yield blocks of about `ROWS` images, and the positions of each whole group in it."""
        if self.members is None:
            for rows in torch.arange(self.count).split(ROWS):
                yield rows, ()
            return
        block: list[Tensor] = []
        for number, rows in enumerate(self.members, 1):
            block.append(rows)
            if sum(map(len, block)) >= ROWS or number == len(self.members):
                sizes = [len(group) for group in block]
                yield torch.cat(block), torch.arange(sum(sizes)).split(sizes)
                block = []

    def weights(self, targets: Tensor, alphas: Sequence[float]) -> list[Tensor]:
        """Return the weights [E, K] of the centered inputs for targets [N, K] and each alpha."""
        centered = targets - targets.mean(0)
        product = torch.zeros((), dtype=targets.dtype)
        for rows, _ in self._blocks():
            inputs = self.inputs(rows)
            product = product + (inputs.T @ centered[rows].to(inputs.dtype)).to(targets.dtype)
        if self.rotation is None:
            return [product / (self.values + alpha)[:, None] for alpha in alphas]
        rotated = self.rotation.T @ product
        return [self.rotation @ (rotated / (self.values + alpha)[:, None]) for alpha in alphas]

    def left_out(self, targets: Tensor, alphas: Sequence[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield each alpha with the left-out predictions [N, K] for targets [N, K]."""
        weights = self.weights(targets, alphas)
        # 1 - H_ii does not depend on the targets, so it is computed once per alpha.
        has_shares = set(alphas) <= self.shares.keys()
        left_out = [torch.empty_like(targets) for _ in alphas]
        for rows, groups in self._blocks():
            inputs = self.inputs(rows)
            # The eigenbasis makes the hat matrix of every alpha a product with a diagonal matrix.
            rotated = inputs
            if self.rotation is not None and (groups or not has_shares):
                rotated = inputs @ self.rotation.to(inputs.dtype)
            inputs = inputs.to(targets.dtype)
            rotated = rotated.to(targets.dtype)

            for alpha, weight, result in zip(alphas, weights, left_out, strict=True):
                # The in-sample residuals become left-out residuals, see the top of the module. The
                # intercept adds 1 / N to each entry of the hat matrix.
                residuals = targets[rows] - targets.mean(0) - inputs @ weight
                inverse = 1 / (self.values + alpha)
                if groups:
                    for group in groups:
                        own = rotated[group]
                        block = torch.eye(len(group), dtype=own.dtype) - (own * inverse) @ own.T
                        residuals[group] = without_group(block - 1 / self.count, residuals[group])
                else:
                    if not has_shares:
                        shares = self.shares.setdefault(alpha, torch.empty_like(targets[:, 0]))
                        shares[rows] = 1 - 1 / self.count - rotated.square() @ inverse
                    residuals /= self.shares[alpha][rows].clamp_min(SMALLEST)[:, None]
                result[rows] = targets[rows] - residuals
        yield from zip(alphas, left_out, strict=True)


def dual(kernel: Tensor, members: Groups = None) -> Solver:
    """Return the solver that minimizes |y - K c - b|^2 + alpha c' K c for a kernel K [N, N].

    The coefficients c are the in-sample residuals divided by alpha. Inputs of the solver are the
    coordinates of the images in the eigenbasis of the centered kernel.
    """
    # Centering the kernel removes the intercept from the problem.
    means = kernel.mean(0)
    values, vectors = torch.linalg.eigh(kernel - means - means[:, None] + means.mean())
    rotated = vectors * values.clamp_min(0).sqrt()
    return Solver(lambda rows: rotated[rows], len(kernel), values, None, members)


def primal(
    inputs: Callable[[Tensor], Tensor], count: int, members: Groups = None
) -> tuple[Solver, Tensor, Tensor]:
    """Return the solver that minimizes |y - X w - b|^2 + alpha u |w|^2 for inputs X [N, E].

    u is the mean squared norm of the centered inputs, as for a linear kernel. The memory does not
    grow with N, so this form is used if there are more images than features. The arguments are
    those of `Solver`, but the inputs are not centered.

    Returns:
        The solver, whose inputs are centered and divided by the root of u, the means of the inputs
        float64 [E], and u, float64 [].
    """
    total = torch.zeros((), dtype=torch.float64)
    moments = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(count).split(ROWS):
        part = inputs(rows)
        total = total + part.double().sum(0)
        moments = moments + (part.T @ part).double()
    means = total / count
    centered = moments - count * means[:, None] * means
    unit = (centered.trace() / count).clamp_min(SMALLEST)
    values, vectors = torch.linalg.eigh(centered / unit)

    def scaled(rows: Tensor) -> Tensor:
        part = inputs(rows)
        return (part - means.to(part.dtype)) / unit.sqrt().to(part.dtype)

    return Solver(scaled, count, values, vectors, members), means, unit


def masked(
    kernel: Tensor, targets: Tensor, known: Tensor, alpha: float, members: Groups = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit each class to the images with a known target; see `dual`.

    The inverse of the regularized kernel of all images is computed once. For a class with unknown
    targets, the inverse of the remaining images follows from a Schur complement, unless most
    targets are unknown. Classes with the same unknown targets share the inverse.

    Args:
        kernel: Kernel of all images, float64 [N, N].
        targets: Targets, float64 [N, K].
        known: Whether a target is known, bool [N, K].
        alpha: Regularization, > 0.
        members: Groups of images that are left out together.

    Returns:
        The coefficients [N, K], which are 0 for unknown targets, the intercepts [K], and the
        left-out predictions [N, K]. For an unknown target, this is the prediction of the
        fitted model, which may contain other images of the group.
    """
    count = len(kernel)
    regularized = kernel + alpha * torch.eye(count, dtype=kernel.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regularized))
    coefficients = torch.zeros_like(targets)
    bias = torch.zeros(targets.shape[1], dtype=targets.dtype)

    residuals = torch.zeros_like(targets)  # left-out ones
    patterns, pattern_of = torch.unique(known.T, dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        columns = (pattern_of == number).nonzero()[:, 0]
        rows = pattern.nonzero()[:, 0]
        others = (~pattern).nonzero()[:, 0]
        if not len(rows):
            continue
        # Invert the smaller matrix: the images without a target, or the images with one.
        if len(others) <= len(rows):
            cross = inverse[rows][:, others]
            factor = torch.linalg.cholesky(inverse[others][:, others])
            own = torch.linalg.solve_triangular(factor, cross.T, upper=False)
            own = inverse[rows][:, rows] - own.T @ own
        else:
            own = torch.cholesky_inverse(torch.linalg.cholesky(regularized[rows][:, rows]))

        # `own` is the inverse of the regularized kernel of the images with a target. Project it
        # onto the complement of the intercept, which gives (I - H) / alpha. Its product with the
        # targets gives the coefficients, which are the in-sample residuals divided by alpha. The
        # factor is the same in both, so it cancels in the left-out residuals.
        sums = own.sum(1)
        wanted = targets[rows][:, columns]
        bias[columns] = sums @ wanted / sums.sum()
        own = own - sums[:, None] * sums / sums.sum()
        fitted = own @ wanted
        coefficients[rows[:, None], columns] = fitted
        if members is None:
            left = fitted / own.diagonal().clamp_min(SMALLEST)[:, None]
            residuals[rows[:, None], columns] = left
            continue
        # Groups have indices of all images, and `own` has only the rows of images with a target.
        position = torch.full((count,), -1)
        position[rows] = torch.arange(len(rows))
        for group in members:
            inside = position[group][position[group] >= 0]
            if len(inside):
                left = without_group(own[inside][:, inside], fitted[inside])
                residuals[rows[inside][:, None], columns] = left

    predictions = kernel @ coefficients + bias
    return coefficients, bias, torch.where(known, targets - residuals, predictions)
