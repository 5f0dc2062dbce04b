"""Ridge regression with leave-one-out and leave-a-group-out predictions in closed form.

Targets [N, K] are predicted by a linear function of N inputs, or by a function in the space of a
kernel. The intercept is not regularized. Let P be the matrix that maps targets to residuals,
divided by alpha. The prediction of an image without itself, and of a group of images B without the
group, have the residuals

    (P y)_i / P_ii                      (P_BB)^-1 (P y)_B

Sources: Allen 1974 (PRESS); Rifkin and Lippert 2007, Notes on Regularized Least Squares.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

ROWS = 4_096  # images per block of a pass over all images
SMALLEST = 1e-12  # of a diagonal element of P: the only known label of a class has 0
JITTER = 1e-13  # relative: P_BB is singular if a group contains all known labels of a class


def group_members(groups: np.ndarray) -> list[Tensor]:
    """Return the indices of the images of each group. `groups` are N values of any type."""
    _, numbers = np.unique(groups, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))[:-1]
    return list(map(torch.from_numpy, np.split(order, ends)))


def without_group(block: Tensor, values: Tensor) -> Tensor:
    """Solve P_BB x = (P y)_B. The arguments are [b, b] and [b, K]."""
    jitter = JITTER * block.diagonal().mean().clamp_min(SMALLEST)
    return torch.linalg.solve(block + jitter * torch.eye(len(block), dtype=block.dtype), values)


class Dual:
    """Ridge regression in the space of a kernel; one eigendecomposition serves every alpha.

    It minimizes |y - K c - b|^2 + alpha c' K c.

    Args:
        kernel: Kernel K of the training images, float64 or float32 [N, N].
        members: Indices of the images of each group; None leaves out single images.
    """

    def __init__(self, kernel: Tensor, members: Sequence[Tensor] | None = None) -> None:
        self.kernel = kernel
        self.members = members
        # The intercept projects onto the complement of the constant vector.
        means = kernel.mean(0)
        values, self.vectors = torch.linalg.eigh(kernel - means - means[:, None] + means.mean())
        self.values = values.clamp_min(0)

    def left_out(self, targets: Tensor, alphas: Sequence[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield each alpha with the left-out predictions [N, K]."""
        rotated = self.vectors.T @ (targets - targets.mean(0))
        for alpha in alphas:
            shift = 1 / (len(targets) * alpha)
            inverse = 1 / (self.values + alpha)
            coefficients = self.vectors @ (rotated * inverse[:, None])
            if self.members is None:
                diagonal = self.vectors.square() @ inverse - shift
                residuals = coefficients / diagonal.clamp_min(SMALLEST)[:, None]
            else:
                residuals = torch.empty_like(coefficients)
                for rows in self.members:
                    vectors = self.vectors[rows]
                    block = (vectors * inverse) @ vectors.T - shift
                    residuals[rows] = without_group(block, coefficients[rows])
            yield alpha, targets - residuals

    def solve(self, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients c [N, K] and the intercepts [K]."""
        means = targets.mean(0)
        rotated = self.vectors.T @ (targets - means)
        coefficients = self.vectors @ (rotated / (self.values + alpha)[:, None])
        return coefficients, means - self.kernel.mean(0) @ coefficients


class Primal:
    """Ridge regression from moments of the inputs, for more images than features.

    It minimizes |y - X w - b|^2 + alpha u w'w, where u is the mean squared norm of the centered
    inputs. The memory does not grow with N, except for the predictions.

    Args:
        inputs: Returns the inputs [B, E] of images, given as indices.
        count: Number of images N.
        members: Indices of the images of each group; None leaves out single images.
    """

    def __init__(
        self,
        inputs: Callable[[Tensor], Tensor],
        count: int,
        members: Sequence[Tensor] | None = None,
    ) -> None:
        self.inputs = inputs
        self.count = count
        self.members = members
        self.leverages: dict[float, Tensor] = {}  # float64 [N] by alpha, without groups

        total: Tensor | float = 0.0
        moments: Tensor | float = 0.0
        for rows, _ in self._blocks():
            part = inputs(rows)
            total = total + part.sum(0, dtype=torch.float64)
            moments = moments + (part.T @ part).double()
        assert isinstance(total, Tensor)
        self.means = total / count
        centered = moments - count * self.means[:, None] * self.means
        self.unit = centered.diagonal().sum().clamp_min(SMALLEST) / count
        values, self.vectors = torch.linalg.eigh(centered / self.unit)
        self.values = values.clamp_min(0)

    def _blocks(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield blocks of about `ROWS` images, and the positions of each group in its block."""
        if self.members is None:
            for rows in torch.arange(self.count).split(ROWS):
                yield rows, []
            return
        block: list[Tensor] = []
        for number, rows in enumerate(self.members, 1):
            block.append(rows)
            if sum(map(len, block)) >= ROWS or number == len(self.members):
                sizes = [len(group) for group in block]
                yield torch.cat(block), list(torch.arange(sum(sizes)).split(sizes))
                block = []

    def left_out(self, targets: Tensor, alphas: Sequence[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield each alpha with the left-out predictions [N, K]."""
        solutions = [self.solve(targets, alpha) for alpha in alphas]
        residuals = [torch.empty_like(targets) for _ in alphas]
        is_known = all(alpha in self.leverages for alpha in alphas)
        for alpha in alphas:
            self.leverages.setdefault(alpha, torch.empty(self.count, dtype=torch.float64))

        for rows, groups in self._blocks():
            part = self.inputs(rows)
            if groups or not is_known:
                # One product gives the leverages of every alpha.
                rotated = (part - self.means.to(part.dtype)) @ self.vectors.to(part.dtype)
                rotated = rotated / self.unit.sqrt().to(part.dtype)
            for number, alpha in enumerate(alphas):
                weight, bias = solutions[number]
                errors = targets[rows] - (part.double() @ weight + bias)
                inverse = 1 / (self.values + alpha)
                for group in groups:
                    own = rotated[group].double()
                    block = torch.eye(len(group), dtype=torch.float64) - (own * inverse) @ own.T
                    block -= 1 / self.count
                    residuals[number][rows[group]] = without_group(block, errors[group])
                if groups:
                    continue
                if not is_known:
                    leverages = rotated.double().square() @ inverse + 1 / self.count
                    self.leverages[alpha][rows] = leverages
                shares = (1 - self.leverages[alpha][rows]).clamp_min(SMALLEST)
                residuals[number][rows] = errors / shares[:, None]

        for alpha, residual in zip(alphas, residuals, strict=True):
            yield alpha, targets - residual

    def solve(self, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """Return the weights w [E, K] and the intercepts [K]."""
        means = targets.mean(0)
        product: Tensor | float = 0.0
        for rows, _ in self._blocks():
            part = self.inputs(rows)
            product = product + (part.T @ (targets[rows] - means).to(part.dtype)).double()
        # Centered inputs are not needed, because the sum of the centered targets is 0.
        rotated = self.vectors.T @ product
        weight = self.vectors @ (rotated / (self.values + alpha)[:, None]) / self.unit
        return weight, means - self.means @ weight


def masked(
    kernel: Tensor,
    targets: Tensor,
    known: Tensor,
    alpha: float,
    members: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit each class on its known targets only; see `Dual`.

    The inverse of all images is computed once. For a class with few unknown targets, it is updated
    by a Schur complement. Classes with the same unknown targets share their inverse.

    Args:
        kernel: Kernel of all images, float64 [N, N].
        targets: Targets, float64 [N, K].
        known: Whether a target is known, bool [N, K].
        alpha: Regularization.
        members: Indices of the images of each group; None leaves out single images.

    Returns:
        The coefficients [N, K], which are 0 for unknown targets, the intercepts [K], and the
        left-out predictions [N, K]. Those of unknown targets are ordinary predictions.
    """
    count = len(kernel)
    regularized = kernel + alpha * torch.eye(count, dtype=kernel.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regularized))
    coefficients = torch.zeros_like(targets)
    bias = torch.zeros(targets.shape[1], dtype=targets.dtype)

    residuals = torch.zeros_like(targets)
    patterns, pattern_of = torch.unique(known.T, dim=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        columns = (pattern_of == number).nonzero()[:, 0]
        rows = pattern.nonzero()[:, 0]
        others = (~pattern).nonzero()[:, 0]
        if not len(rows):
            continue
        if len(others) <= len(rows):
            cross = inverse[rows][:, others]
            factor = torch.linalg.cholesky(inverse[others][:, others])
            own = torch.linalg.solve_triangular(factor, cross.T, upper=False)
            own = inverse[rows][:, rows] - own.T @ own
        else:
            own = torch.cholesky_inverse(torch.linalg.cholesky(regularized[rows][:, rows]))

        # Project onto the complement of the intercept.
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
        place = torch.full((count,), -1)
        place[rows] = torch.arange(len(rows))
        for group in members:
            inside = place[group][place[group] >= 0]
            if len(inside):
                left = without_group(own[inside][:, inside], fitted[inside])
                residuals[rows[inside][:, None], columns] = left

    predictions = kernel @ coefficients + bias
    return coefficients, bias, torch.where(known, targets - residuals, predictions)
