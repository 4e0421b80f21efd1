"""Write the table of TRL's fields into docs/trl-fields.md: `python tools/docs/trl_fields.py docs/trl-fields.md`."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from cohort.config.other_trainers import equivalents, grpo_config_fields
from cohort.trl.config import GRPOConfig

_MARKED = re.compile(r"(<!-- fields, made by `make docs` -->\n).*?(<!-- end of fields -->)", re.DOTALL)
_OWN = ("save_steps", "save_total_limit", "eval_on_start", "output_dir")  # done by the trainer, not by their keys
_TABLES = ("transformers", "reference", "evaluation", "trl", "trl_vllm")


def with_fields(page: str) -> str:
    """Return the page with the table between its markers regenerated."""
    table = "\n".join(["| field | status | here |", "| --- | --- | --- |", *_rows()])
    return _MARKED.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def _rows() -> Iterator[str]:
    notes, ours = grpo_config_fields(), _equivalents()
    for name in sorted(field.name for field in fields(GRPOConfig)):
        keys = ", ".join(f"`{key}`" for key in ours[name] if name not in _OWN)
        if name in notes["refused"]:
            yield f"| `{name}` | refused | {notes['refused'][name]} |"
        elif name in notes["dropped"]:
            status = "no effect" if name in notes["no_effect"] else "works"
            yield f"| `{name}` | {status}, with a warning | {notes['dropped'][name]} |"
        elif name in notes["read"]:
            yield f"| `{name}` | works | {keys or 'as in TRL'} |"
        elif name in notes["no_effect"]:
            yield f"| `{name}` | no effect | {notes['no_effect'][name]} |"
        else:
            yield f"| `{name}` | works | {keys or 'as in TRL'} |"


def _equivalents() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for table in _TABLES:
        for ours, row in equivalents()["trl"][table].items():
            for theirs in (row if isinstance(row, str) else row["from"]).split():
                name = theirs.partition(".")[0]
                found[name] += [ours] if ours not in found[name] else []
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_fields(path.read_text(encoding="utf-8")), encoding="utf-8")
