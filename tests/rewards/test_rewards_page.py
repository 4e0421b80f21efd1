"""docs/rewards.md: every built-in reward has a heading or a row, and a configuration that loads."""

import re
from pathlib import Path

import yaml

from cohort.config import RewardConfig, config_from_dict
from cohort.config.rewards import REWARD_SETTINGS
from cohort.rewards import build_rewards
from cohort.rewards.load_rewards import BUILTINS
from reward_arguments import with_arguments

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
    headings = re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE)
    assert {*headings, *rows} == BUILTINS.keys() == REWARD_SETTINGS.keys()
    tables = re.findall(r"^<!-- arguments of (\w+), made", PAGE, re.MULTILINE)
    assert {*tables} == {*headings, "criteria", "other_trainers"}


def test_the_tables_of_arguments_are_current():
    assert with_arguments(PAGE) == PAGE, "run `make docs`"


def test_combinations_are_valid():
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}}
    for block in BLOCKS:
        if isinstance(block, dict):
            config_from_dict({**sections, **block})
