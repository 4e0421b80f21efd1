"""docs/rewards.md: every built-in reward has a heading or a row, and a configuration that loads."""

import re
from pathlib import Path

import yaml

from cohort.config import RewardConfig, config_from_dict
from cohort.rewards import build_rewards
from cohort.rewards.load_rewards import BUILTINS

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
# need a sandbox, a server, a model, or packages that may not be installed
OPTIONAL = ("code", "json_schema", "judge", "model", "reasoning_gym")
COLUMNS = ["answer", "solution", "source"]


def test_every_reward_has_a_configuration_that_loads():
    shown = [RewardConfig(**entry) for block in BLOCKS if isinstance(block, list) for entry in block]
    assert {config.use for config in shown} == BUILTINS.keys()
    installed = [config for config in shown if config.use not in OPTIONAL]
    assert len(build_rewards(installed, columns=COLUMNS, max_completion_tokens=4096)) == len(installed)


def test_every_reward_is_described():
    headings = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE)
    assert {*re.findall(r"`([\w.]+)`", " ".join(headings)), *rows} == BUILTINS.keys()


def test_combinations_are_valid():
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}}
    for block in BLOCKS:
        if isinstance(block, dict):
            config_from_dict({**sections, **block})
