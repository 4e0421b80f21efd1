"""Plot a curve as text."""

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def render_curve(xs: Sequence[float], ys: Sequence[float], *, height: int = 8) -> str:
    """Plot fractions as one column of block characters per point, with a y axis and the first and last x.

    Args:
        xs: Positions; the first and last are shown.
        ys: values from 0 to 1.
        height: height of the plot in lines.
    """
    width = 3  # characters per point
    lines = []
    for level in reversed(range(height)):
        filled = [min(max(y * height - level, 0.0), 1.0) for y in ys]  # fraction of this line, by point
        cells = "".join(_EIGHTHS[round(8 * f)] * (width - 1) + " " for f in filled)
        lines.append(f"{(level + 1) / height:6.0%} ┤{cells}".rstrip())
    axis = len(xs) * width
    lines.append(f"{0:6.0%} └{'─' * axis}")
    first, last = f"{xs[0]:g}", f"{xs[-1]:g}"
    lines.append(f"{'step':>6}  {first}{last.rjust(max(1, axis - len(first)))}")
    return "\n".join(lines)
