"""Numbers in sentences, written as the page's JavaScript writes them next to these."""


def number_text(value: float, digits: int = 3) -> str:
    """Write a number with about `digits` significant digits: 0.4123 -> "0.412", 0.000002 -> "2e\u22126"."""
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e-")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"{mantissa}e-{int(exponent)}"
    elif 1000 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    elif 1e6 <= abs(value) < 1e9:
        text = f"{value / 1e6:.{digits}g}M"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\u2212")
