"""Softmax regressions with an L2 penalty, many at once on the same features: as cross-validation needs them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError

Array = NDArray[np.float64]

TOLERANCE = 1e-10                                              # of the objective above its minimum, in nats
NEWTON_STEPS = 50
CG_STEPS = 200
STALE = 12                                                     # CG steps after which a new preconditioner pays
BACKTRACKS = 40


def with_constant(features: NDArray[Any]) -> Array:
    """(n, D) features of any precision -> (n, D+1) with a column of ones for the bias."""
    return np.column_stack([features, np.ones(len(features))]).astype(np.float64, copy=False)


def objective(features: Array, labels: NDArray[np.int64], parameters: Array, reg: float) -> float:
    """What a regression minimises: mean cross-entropy in nats + reg/2 times the sum of all squared parameters.

    That is the function whose gradient SentEval's classifier follows with Adam and weight decay ``reg``; the bias is
    penalised as well. In two classes its optimum is that of a logistic regression on w, the difference of the two rows
    of parameters, with reg/4 |w|^2: scikit-learn's C is 2/(n reg) there, and 1/(n reg) in more classes.

    Args:
        features: (n, D) with the constant column.
        labels: (n,) from 0.
        parameters: (C, D) one row a class.
        reg: strength of the penalty.
    """
    loss, _ = _loss(parameters @ features.T, labels)
    return float(loss.mean() + reg / 2 * (parameters**2).sum())


def predictions(features: Array, parameters: Array) -> NDArray[np.int64]:
    """(n,) the likeliest class of (n, D) features under (C, D) parameters; of equal ones, the first."""
    likeliest: NDArray[np.int64] = (features @ parameters.T).argmax(axis=1)
    return likeliest


def regression_path(
    features: Array, labels: NDArray[np.int64], weights: Array, classes: int, regs: Sequence[float]
) -> Iterator[Array]:
    """Fit K regressions that differ in the rows they are trained on, for one reg after the other.

    Newton's method in float64, started for each reg from the solution for the one before. All K Newton systems are
    solved together by conjugate gradients, so that each pass over the features serves all. The preconditioner is the
    Cholesky factor of the K regressions' mean Hessian: they share most of their rows, so few passes are needed. The
    parameters are sought in an orthonormal basis of those that sum to 0 over the classes, where the optimum lies.

    Args:
        features: (n, D) with the constant column.
        labels: (n,) from 0.
        weights: (n, K) that sum to 1 over the rows; 0 leaves a row out.
        classes: their number C.
        regs: strengths of the penalty, best from strong to weak.

    Yields:
        (K, C, D) parameters that minimise ``objective`` to within 1e-10, for each reg.

    Raises:
        InputError: a regression does not converge.
    """
    from scipy.linalg import helmert  # with sklearn's, a second that planning and cached runs do without

    basis: Array = np.ascontiguousarray(helmert(classes).T)    # (C, C-1)
    start = np.zeros((classes - 1, features.shape[1], weights.shape[1]))
    for reg in regs:
        start = _minimise(_Problem(features, labels, weights, basis, reg), start)
        yield np.moveaxis(np.tensordot(basis, start, axes=1), 2, 0)


def _loss(logits: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """(C, n, ...) logits -> (n, ...) cross-entropies and (C, n, ...) probabilities."""
    logits = logits - logits.max(axis=0)
    probabilities = np.exp(logits)
    total = probabilities.sum(axis=0)
    return np.log(total) - logits[labels, np.arange(len(labels))], probabilities / total


def _dot(first: Array, second: Array) -> Array:
    """(K,) inner products of (C-1, D, K) parameters."""
    products: Array = np.einsum("cdk,cdk->k", first, second)
    return products


@dataclass(frozen=True)
class _Point:
    """Where K regressions are: (C-1, D, K) parameters, (K,) objectives, their gradient, (C, n, K) probabilities."""

    at: Array
    value: Array
    gradient: Array
    probabilities: Array


@dataclass(frozen=True)
class _Problem:
    """K regressions in the basis of parameters that sum to 0: see ``regression_path``."""

    features: Array                                            # (n, D)
    labels: NDArray[np.int64]                                  # (n,)
    weights: Array                                             # (n, K)
    basis: Array                                               # (C, C-1)
    reg: float

    def look(self, at: Array) -> _Point:
        """Objective and gradient."""
        loss, probabilities = _loss(self._logits(at), self.labels)
        value = (self.weights * loss).sum(axis=0) + self.reg / 2 * _dot(at, at)
        residual = probabilities.copy()
        residual[self.labels, np.arange(len(self.labels))] -= 1
        return _Point(at, value, self._back(residual * self.weights) + self.reg * at, probabilities)

    def hessian_times(self, direction: Array, probabilities: Array) -> Array:
        """(C-1, D, K) product of each regression's Hessian with its own direction."""
        logits = self._logits(direction)
        change = probabilities * (logits - (probabilities * logits).sum(axis=0))
        return self._back(change * self.weights) + self.reg * direction

    def preconditioner(self, probabilities: Array) -> Callable[[Array], Array]:
        """The inverse of the mean Hessian, taken at the mean of the probabilities."""
        from scipy.linalg import cho_factor, cho_solve

        mean, weights = probabilities.mean(axis=2), self.weights.mean(axis=1)
        projected = self.basis.T @ mean                        # (C-1, n)
        size, width = self.basis.shape[1], self.features.shape[1]
        blocks = np.empty((size, width, size, width))
        for row in range(size):
            for column in range(row + 1):
                curvature = (self.basis[:, row] * self.basis[:, column]) @ mean - projected[row] * projected[column]
                block = (self.features * (curvature * weights)[:, None]).T @ self.features
                blocks[row, :, column], blocks[column, :, row] = block, block.T
        hessian = blocks.reshape(size * width, size * width)
        hessian[np.diag_indices_from(hessian)] += self.reg + 1e-12 * hessian.diagonal().max()
        factor = cho_factor(hessian, lower=True, overwrite_a=True)

        def solve(gradient: Array) -> Array:
            solved: Array = cho_solve(factor, gradient.reshape(size * width, -1)).reshape(gradient.shape)
            return solved

        return solve

    def _logits(self, parameters: Array) -> Array:
        return np.tensordot(self.basis, self.features @ parameters, axes=1)

    def _back(self, logits: Array) -> Array:
        return self.features.T @ np.tensordot(self.basis.T, logits, axes=1)


def _minimise(problem: _Problem, start: Array) -> Array:
    """(C-1, D, K) parameters of least objective."""
    point = problem.look(start)
    solve = problem.preconditioner(point.probabilities)
    for _ in range(NEWTON_STEPS):
        direction, decrement, passes = _newton_direction(problem, point, solve)
        if (decrement <= 2 * TOLERANCE).all():
            return point.at
        point = _step(problem, point, direction)
        if passes > STALE:
            solve = problem.preconditioner(point.probabilities)
    raise _no_convergence(problem)


def _newton_direction(
    problem: _Problem, point: _Point, solve: Callable[[Array], Array]
) -> tuple[Array, Array, int]:
    """Solve all Newton systems by preconditioned conjugate gradients, the more exactly the nearer the optimum.

    Returns:
        (C-1, D, K) directions; (K,) squared gradient in the preconditioner's norm, which is twice what the objective
        can still fall; the passes over the features.
    """
    direction = np.zeros_like(point.at)
    residual = -point.gradient
    solved = solve(residual)
    decrement = square = _dot(residual, solved)
    goal = np.maximum(decrement * np.minimum(1e-2, decrement), TOLERANCE / 10)
    search = solved
    passes = 0
    while (square > goal).any() and passes < CG_STEPS:
        curved = problem.hessian_times(search, point.probabilities)
        length = _ratio(square, _dot(search, curved))
        direction = direction + length * search
        residual = residual - length * curved
        solved = solve(residual)
        square, before = _dot(residual, solved), square
        search = solved + _ratio(square, before) * search
        passes += 1
    return direction, decrement, passes


def _ratio(above: Array, below: Array) -> Array:
    """Quotients; 0 where a regression has arrived and both are 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _step(problem: _Problem, point: _Point, direction: Array) -> _Point:
    """Go along the directions, each regression as far as its objective falls (Armijo)."""
    slope = _dot(point.gradient, direction)
    length = np.ones_like(slope)
    rounding = 1e-13 * np.maximum(1, np.abs(point.value))
    for _ in range(BACKTRACKS):
        new = problem.look(point.at + length * direction)
        fell = new.value <= point.value + 1e-4 * length * slope + rounding
        if fell.all():
            return new
        length = np.where(fell, length, length / 2)
    raise _no_convergence(problem)


def _no_convergence(problem: _Problem) -> InputError:
    return InputError(
        f"the classifier does not converge with regularisation {problem.reg:g} on embeddings whose numbers reach "
        f"{np.abs(problem.features).max():.3g}; those of usable encoders are of the order of 1, so check its weights"
    )
