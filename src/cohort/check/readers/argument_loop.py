"""Scripts that read their own arguments in a loop: `while [[ $# -gt 0 ]]; do case $1 in --model) MODEL="$2" ...`."""

import re
from collections.abc import Mapping

_LOOP = re.compile(
    r"^[ \t]*while[ \t]+\[\[?[^\n]*\$#[^\n]*?\]\]?[ \t]*;?\s*do\b.*?\besac\b.*?\bdone\b", re.DOTALL | re.MULTILINE
)
_ARM = re.compile(
    r"""^[ \t]*(-[\w-]+(?:[ \t]*\|[ \t]*-[\w-]+)*)\)\s*([A-Za-z_]\w*)=["']?\$\{?2\}?["']?""", re.MULTILINE
)


def own_arguments(text: str) -> Mapping[str, tuple[str, int]]:
    """The options of a script with such a loop: the variable that each sets, and the line where it does."""
    loop = _LOOP.search(text)
    if loop is None:
        return {}
    found: dict[str, tuple[str, int]] = {}
    for arm in _ARM.finditer(loop[0]):
        line = 1 + text.count("\n", 0, loop.start() + arm.start(2))
        names = [name.strip() for name in arm[1].split("|")]
        found[max(names, key=len)] = (arm[2], line)
    return found
