"""Writes the keys that Open-R1's recipes have besides TRL's.

    PYTHONPATH=/path/to/open-r1/src:/path/to/trl-0.18 python bench/framework_keys/open_r1_keys.py VERSION \
        src/cohort_check/keys/open-r1.json

VERSION names Open-R1's commit. TRL is of the version that this commit's setup.py pins.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import trl
from trl_keys import Table, installed_version, key


def main(version: str, path: Path) -> None:
    """Writes the table of the importable Open-R1."""
    configs = importlib.import_module("open_r1.configs")
    own: Table = {}
    for name, base in (("GRPOScriptArguments", trl.ScriptArguments), ("GRPOConfig", trl.GRPOConfig)):
        known = {field.name for field in dataclasses.fields(base)}
        for field in dataclasses.fields(getattr(configs, name)):
            if field.name not in known:
                own[field.name] = key(field, name)
    lines = [f"   {json.dumps(name)}: {json.dumps(own[name], sort_keys=True)}" for name in sorted(own)]
    head = f'{{\n "framework": "open-r1",\n "trl": "{installed_version()}",\n "versions": {{\n  "{version}": {{\n'
    path.write_text(head + ",\n".join(lines) + "\n  }\n }\n}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
