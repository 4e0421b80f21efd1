"""The metrics of a run as a table, with curves for notebooks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from cohort.records import FloatArray
from cohort.run.files import read_metrics

_SHOWN = ("reward", "completions/mean_length", "entropy", "grad_norm")
_WIDTH, _HEIGHT, _MARGIN = 320, 140, 8  # of a curve, in pixels


class History(Sequence[Mapping[str, float]]):
    """Metrics of a run: one row per step, as its folder has them when this is created.

    `history["reward"]` is a column, with NaN where a step has no value; `history[-1]` is the last row. Evaluations have
    rows of their own, in `evaluations`. A notebook shows the most important curves.
    """

    def __init__(self, run_dir: Path):
        """Read the metrics of the run in a folder; none if it has not begun."""
        rows, _ = read_metrics(run_dir / "metrics.jsonl")
        self._rows = [_numbers(row) for row in rows if row.get("kind") != "eval"]
        self.evaluations = [_numbers(row) for row in rows if row.get("kind") == "eval"]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return iter(self._rows)

    def __getitem__(self, key: Any) -> Any:
        """Return a row by its position, rows by a slice, or a column [steps] by the name of a metric.

        Raises:
            KeyError: no step has this metric.
        """
        if not isinstance(key, str):
            return self._rows[key]
        rows = self.evaluations if key.startswith("eval/") else self._rows
        if not any(key in row for row in rows):
            raise KeyError(f"{key!r}; the metrics are {', '.join(self.names)}")
        return np.array([row.get(key, math.nan) for row in rows])

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        every = [*self._rows, *self.evaluations]
        return list(dict.fromkeys(name for row in every for name in row if name != "step"))

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per step."""
        import pandas

        return pandas.DataFrame(self._rows).set_index("step")

    def plot(self, *names: str) -> "Curves":
        """Return curves of metrics, which a notebook draws; by default of the most important ones.

        Raises:
            KeyError: no step has a metric of this name.
        """
        chosen = names or [name for name in ("eval/accuracy", *_SHOWN) if name in self.names]
        return Curves({name: (self._steps(name), self[name]) for name in chosen})

    def _steps(self, name: str) -> FloatArray:
        rows = self.evaluations if name.startswith("eval/") else self._rows
        return np.array([row["step"] for row in rows], float)

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {self[name][-1]:.4g}" for name in _SHOWN if name in self.names)
        return f"History of {len(self)} steps: {last}" if self._rows else "History of 0 steps"

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()


class Curves:
    """Curves as an SVG picture, which notebooks draw by themselves."""

    def __init__(self, curves: Mapping[str, tuple[FloatArray, FloatArray]]):
        """Create curves from their x and y values, by title."""
        self._curves = curves

    def save(self, path: str | Path) -> None:
        """Write the picture as an HTML file."""
        Path(path).write_text(f"<!doctype html><meta charset=utf-8>{self._repr_html_()}", encoding="utf-8")

    def _repr_html_(self) -> str:
        pictures = "".join(_svg(title, x, y) for title, (x, y) in self._curves.items())
        return f"<div style='display:flex;flex-wrap:wrap;gap:16px'>{pictures}</div>"


def _svg(title: str, x: FloatArray, y: FloatArray) -> str:
    """Return a curve with its title, its last value, and its range. Gaps are left where a value is missing."""
    known = np.isfinite(y)
    label = f"{escape(title)}: no values"
    if known.any():
        low, high = float(y[known].min()), float(y[known].max())
        label = f"{escape(title)}: {y[known][-1]:.4g} at step {x[known][-1]:.0f}, from {low:.4g} to {high:.4g}"
        width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
        x = _MARGIN + (x - x.min()) / max(float(np.ptp(x)), 1e-12) * width
        y = _MARGIN + (high - y) / max(high - low, 1e-12) * height
    points = "".join(
        f"{'L' if i and known[i - 1] else 'M'}{x[i]:.1f} {y[i]:.1f}" for i in np.flatnonzero(known).tolist()
    )
    return (
        f"<figure style='margin:0'><figcaption style='font:12px sans-serif'>{label}</figcaption>"
        f"<svg width={_WIDTH} height={_HEIGHT} role=img aria-label='{label}' style='border:1px solid #8884'>"
        f"<path d='{points}' fill=none stroke='#3b82f6' stroke-width=1.5 stroke-linecap=round /></svg></figure>"
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float) and name != "timestamp"}
