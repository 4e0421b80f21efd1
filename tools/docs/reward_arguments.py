"""Write the tables of arguments into docs/rewards.md: `python tools/docs/reward_arguments.py docs/rewards.md`."""

import re
import sys
from pathlib import Path

from pydantic import BaseModel

from cohort.config.rewards import REWARD_SETTINGS, CriterionSettings, NoSettings
from config_page import key_rows

_MARKED = re.compile(
    r"(<!-- arguments of ([\w.]+), made by `make docs` -->\n).*?(<!-- end of arguments -->)", re.DOTALL
)
_PEERS = "other_trainers"  # the name of the table of all rewards with a dot in their name


def with_arguments(page: str) -> str:
    """Return the page with the tables between its markers regenerated."""
    return _MARKED.sub(lambda found: "".join([found[1], *(f"{line}\n" for line in _table(found[2])), found[3]]), page)


def _table(name: str) -> list[str]:
    head, line = "| argument | type | default | meaning |", "| --- | --- | --- | --- |"
    if name == _PEERS:
        return [f"| `use` {head}", f"| --- {line}", *_rows_of_peers()]
    settings = CriterionSettings if name == "criteria" else REWARD_SETTINGS[name]
    return [head, line, *_rows(settings)]


def _rows(settings: type[BaseModel]) -> list[str]:
    """Return the row of each argument, with its own before inherited ones."""
    rows = zip(settings.model_fields, key_rows(settings), strict=True)
    return [row for _, row in sorted(rows, key=lambda of_key: of_key[0] not in settings.__annotations__)]


def _rows_of_peers() -> list[str]:
    """Return the rows of each class of settings, with the rewards that have it."""
    names: dict[type[BaseModel], list[str]] = {}
    for name, settings in REWARD_SETTINGS.items():
        if "." in name and settings is not NoSettings:
            names.setdefault(settings, []).append(f"`{name}`")
    return [f"| {', '.join(of_one)} {row}" for settings, of_one in names.items() for row in _rows(settings)]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_arguments(path.read_text(encoding="utf-8")), encoding="utf-8")
