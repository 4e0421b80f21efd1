"""Plot a curve as text."""

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def render_curve(
    xs: Sequence[float], ys: Sequence[float], *, height: int = 8, y_min: float = 0.0, y_max: float = 1.0
) -> str:
    """Plot one column of block characters per point, with a y axis and the first and last x.

    Args:
        xs: Positions; the first and last are shown.
        ys: Values, clipped to the y axis.
        height: Height of the plot in lines.
        y_min: Bottom of the y axis.
        y_max: Top of the y axis.
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
