"""Tests of curves: whether they rise or fall, and where they change."""

from dataclasses import dataclass

import numpy as np

from cohort.records import FloatArray

MIN_POINTS = 8  # below, no trend is significant
_MOST_POINTS = 256  # longer curves are averaged in blocks first
_BLOCKS = 8
_MIN_Z = 5.0  # rise between the first and the last quarter, in standard errors
_MIN_TAU = 0.6  # Kendall's tau of the means of blocks
_MIN_DRIFT = 3.0  # t statistic of the differences of neighbors
_MAX_AUTOCORRELATION = -0.25  # of the differences: -0.5 for noise around a trend, 0 for a random walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a curve changes from its first quarter to its last."""

    rise: float = 0.0  # mean of the last quarter minus mean of the first
    is_rising: bool = False  # significantly
    is_falling: bool = False


def trend(values: FloatArray) -> Trend:
    """Test whether a curve rises or falls. NaNs are left out.

    It rises if three tests agree:

    1. the means of its last and first quarters differ by `_MIN_Z` standard errors. These come from the residuals of the
       best monotone fit and grow with their autocorrelation;
    2. the means of 8 blocks are in order (Kendall's tau at least `_MIN_TAU`), so that a single jump is no trend;
    3. it is no random walk, whose ends differ by chance: either neighbors differ by noise, which the next one takes
       back, or the mean difference is itself significant.
    """
    values = _in_blocks(values[np.isfinite(values)], _MOST_POINTS)
    if len(values) < MIN_POINTS:
        return Trend()
    quarter = len(values) // 4
    rise = float(values[-quarter:].mean() - values[:quarter].mean())
    upward = values if rise >= 0 else -values
    is_significant = bool(np.ptp(values) > 0 and _rises(upward, quarter) and _is_no_walk(upward))
    return Trend(rise=rise, is_rising=is_significant and rise > 0, is_falling=is_significant and rise < 0)


def change_point(values: FloatArray) -> int:
    """Return the index that splits a curve into two parts of the most different means (least squares)."""
    num = len(values)
    sums = np.cumsum(values)[:-1]
    left = np.arange(1, num)
    gain = sums**2 / left + (values.sum() - sums) ** 2 / (num - left)
    return int(np.argmax(gain)) + 1


def _rises(values: FloatArray, quarter: int) -> bool:
    rise = values[-quarter:].mean() - values[:quarter].mean()
    residuals = values - _monotone_fit(values)
    noise = max(residuals.std(), float(np.sqrt(np.mean(np.diff(values) ** 2) / 2)))
    correlation = min(max(_autocorrelation(residuals), 0.0), 0.97)
    error = noise * np.sqrt(2 / quarter * (1 + correlation) / (1 - correlation))
    return bool(rise > _MIN_Z * error and _kendall_tau(_in_blocks(values, _BLOCKS)) >= _MIN_TAU)


def _is_no_walk(values: FloatArray) -> bool:
    differences = np.diff(values)
    drift, error = differences.mean(), differences.std(ddof=1) / np.sqrt(len(differences))
    return bool(drift > _MIN_DRIFT * error or _autocorrelation(differences) < _MAX_AUTOCORRELATION)


def _in_blocks(values: FloatArray, most: int) -> FloatArray:
    """Average neighbors so that at most `most` values are left."""
    if len(values) <= most:
        return values
    size, num_larger = divmod(len(values), most)
    sizes = np.full(most, size) + (np.arange(most) < num_larger)
    return np.add.reduceat(values, np.cumsum(sizes) - sizes) / sizes


def _monotone_fit(values: FloatArray) -> FloatArray:
    """Return the increasing sequence that is closest to the values (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2:] = [(means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size]
            sizes[-2:] = [size]
    return np.repeat(means, sizes)


def _autocorrelation(values: FloatArray) -> float:
    """Of neighbors; 0 for a constant."""
    centered = values - values.mean()
    variance = float(centered @ centered)
    return float(centered[1:] @ centered[:-1]) / variance if variance > 0 else 0.0


def _kendall_tau(values: FloatArray) -> float:
    """Share of pairs in increasing order minus share in decreasing order."""
    first, second = np.triu_indices(len(values), k=1)
    return float(np.sign(values[second] - values[first]).mean())
