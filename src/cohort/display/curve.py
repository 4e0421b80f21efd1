"""A curve in text: the shape of a run at a glance, without a plotting library."""

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def render_curve(
    xs: Sequence[float], ys: Sequence[float], *, height: int = 8, y_min: float = 0.0, y_max: float = 1.0
) -> str:
    """Columns of block characters, one per point, with the y axis on the left and the first and last x below.

    Args:
        xs: positions, shown at both ends only.
        ys: values; those outside the axis are clipped to it.
        height: lines of the plot.
        y_min: bottom of the axis.
        y_max: top of the axis.
    """
    width = 3  # characters per point
    filled = [(min(max(y, y_min), y_max) - y_min) / (y_max - y_min) * height for y in ys]
    lines = []
    for level in reversed(range(height)):
        cells = "".join(_EIGHTHS[round(8 * min(max(f - level, 0.0), 1.0))] * (width - 1) + " " for f in filled)
        label = y_min + (y_max - y_min) * (level + 1) / height
        lines.append(f"{label:6.0%} ┤{cells}".rstrip())
    axis = len(xs) * width
    lines.append(f"{y_min:6.0%} └{'─' * axis}")
    first, last = f"{xs[0]:g}", f"{xs[-1]:g}"
    lines.append(f"{'step':>6}  {first}{last.rjust(max(1, axis - len(first)))}")
    return "\n".join(lines)
