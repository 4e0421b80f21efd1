"""Regular expressions in the arguments of built-in rewards."""

import re


def compile_pattern(pattern: object, *, flags: int = 0, num_groups: int | None = None) -> re.Pattern[str]:
    """Compile the argument `pattern` of a built-in reward.

    Args:
        pattern: regular expression.
        flags: flags of the `re` module.
        num_groups: required number of groups; None means any.

    Raises:
        ValueError: not a string, not a regular expression, or a different number of groups.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"pattern must be a string with a regular expression, got {pattern!r}")
    try:
        regex = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    if num_groups is not None and regex.groups != num_groups:
        raise ValueError(
            f"pattern {pattern!r} must have exactly {num_groups} group for the answer, but has {regex.groups}; "
            r"for example 'Answer: (\d+)', with (?:...) for other groups"
        )
    return regex
