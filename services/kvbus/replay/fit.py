"""Time to first token as a sum of three parts, by least squares. Pure."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

RIDGE = 1e-9
"""Keeps the equations solvable where prompts or queues are all alike."""
FOLDS = 4


class Point(NamedTuple):
    """A request: bytes of its prompt, bytes of the prompts before it, what it took."""

    prompt_bytes: float
    queued_bytes: float
    ttft_ms: float


class Fit(NamedTuple):
    """`a` in ms, `b` and `c` in ms per byte of the prompt and of those before it; `b` and `c` are not below 0."""

    a: float
    b: float
    c: float

    def ttft_ms(self, prompt_bytes: float, queued_bytes: float) -> float:
        """Never below 0."""
        return max(0.0, self.a + self.b * prompt_bytes + self.c * queued_bytes)


def fit(points: Sequence[Point]) -> Fit:
    """The least squares. A part that would come out negative is left out: no prompt is the faster for being longer."""
    parts = [1, 2]
    while True:
        weights = dict(zip([0, *parts], _least_squares(points, [0, *parts]), strict=True))
        negative = [part for part in parts if weights[part] < 0]
        if not negative:
            return Fit(weights[0], weights.get(1, 0.0), weights.get(2, 0.0))
        parts.remove(min(negative, key=lambda part: weights[part]))


def held_out_error_ms(points: Sequence[Point]) -> float:
    """Mean distance of a request from what a fit to the others says, in FOLDS parts."""
    errors: list[float] = []
    for part in range(FOLDS):
        fitted = fit([point for number, point in enumerate(points) if number % FOLDS != part])
        errors += [
            abs(fitted.ttft_ms(point.prompt_bytes, point.queued_bytes) - point.ttft_ms) for point in points[part::FOLDS]
        ]
    return fmean(errors)


def _least_squares(points: Sequence[Point], parts: Sequence[int]) -> list[float]:
    rows = [[(1.0, point.prompt_bytes, point.queued_bytes)[part] for part in parts] for point in points]
    size = range(len(parts))
    scale = [max(abs(row[at]) for row in rows) or 1.0 for at in size]
    scaled = [[row[at] / scale[at] for at in size] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in scaled) + RIDGE * len(rows) * (i == j) for j in size] for i in size]
    right = [sum(row[i] * point.ttft_ms for row, point in zip(scaled, points, strict=True)) for i in size]
    return [value / factor for value, factor in zip(_solved(matrix, right), scale, strict=True)]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(len(rows)):
        best = max(range(at, len(rows)), key=lambda number: abs(rows[number][at]))
        rows[at], rows[best] = rows[best], rows[at]
        rows[at] = [value / rows[at][at] for value in rows[at]]
        for other in range(len(rows)):
            if other != at:
                factor = rows[other][at]
                rows[other] = [value - factor * own for value, own in zip(rows[other], rows[at], strict=True)]
    return [row[-1] for row in rows]
