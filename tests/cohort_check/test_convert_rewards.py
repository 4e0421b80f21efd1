"""Rewards of TRL, Open-R1 and ms-swift after conversion."""

from pathlib import Path

import yaml

from cohort.config import RewardConfig
from cohort.rewards import build_rewards
from cohort_check.convert import convert_file

COLUMNS = ["solution", "answer"]


def converted(tmp_path: Path, text: str, name: str = "recipe.yaml") -> tuple[list[dict], str]:
    (tmp_path / name).write_text(text)
    output = convert_file(tmp_path / name)
    rewards = yaml.safe_load(output)["rewards"]
    built_in = [RewardConfig(**reward) for reward in rewards if ":" not in reward["use"]]
    built_in = [reward for reward in built_in if reward.use != "code"]  # which needs a sandbox
    if built_in:
        build_rewards(built_in, columns=COLUMNS, max_completion_tokens=16)
    return rewards, output


def test_open_r1s_names_and_settings(tmp_path):
    names = [
        "accuracy",
        "format",
        "tag_count",
        "reasoning_steps",
        "length",
        "cosine",
        "repetition_penalty",
        "code_format",
        "soft_overlong_punishment",
        "code",
        "binary_code",
        "ioi_code",
    ]
    text = (
        f"reward_funcs: [{', '.join(names)}]\nmax_steps: 10\ncosine_max_len: 500\ncosine_max_value_correct: 2.0\n"
        "code_provider: e2b\nsoft_punish_cache: 100\nmax_completion_len: 1000\nrepetition_n_grams: 4\n"
    )
    rewards, output = converted(tmp_path, text)
    cosine = {"max_len": 500, "min_value_wrong": 0.0, "max_value_wrong": -0.5, "min_value_correct": 0.5}
    assert rewards == [
        {"use": "open_r1.accuracy", "weight": 1.0},
        {"use": "open_r1.format", "weight": 1.0},
        {"use": "open_r1.tag_count", "weight": 1.0},
        {"use": "open_r1.reasoning_steps", "weight": 1.0},
        {"use": "open_r1.len", "weight": 1.0},
        {"use": "open_r1.cosine", "args": {**cosine, "max_value_correct": 2.0}, "weight": 1.0},
        {"use": "open_r1.repetition_penalty", "args": {"ngram_size": 4, "max_penalty": -1.0}, "weight": 1.0},
        {"use": "open_r1.code_format", "args": {"language": "python"}, "weight": 1.0},
        {
            "use": "open_r1.soft_overlong",
            "args": {"max_completion_len": 1000, "soft_punish_cache": 100},
            "weight": 1.0,
        },
        {"use": "code", "args": {"tests_column": "verification_info", "score": "fraction"}, "weight": 1.0},
        {"use": "code", "args": {"tests_column": "verification_info"}, "weight": 1.0},
        {"use": "rewards.py:ioi_code", "weight": 1.0},
    ]
    assert "# - Cohort has its own sandbox for code: code_provider" in output
    assert "reward 'ioi_code' as the function ioi_code" in output
    assert "cosine_max_len" not in output.split("\nmodel:")[0]


def test_settings_of_a_reward_that_is_not_used_are_not_needed(tmp_path):
    rewards, output = converted(tmp_path, "reward_funcs: [format]\nmax_steps: 10\ncosine_max_len: 500\n")
    assert rewards == [{"use": "open_r1.format", "weight": 1.0}]
    assert "# - the reward that reads them is not used: cosine_max_len" in output


def test_trls_names(tmp_path):
    names = "accuracy_reward, think_format_reward, trl.rewards.reasoning_accuracy_reward, get_soft_overlong_punishment"
    text = f"reward_funcs: [{names}, my_lib.accuracy_reward]\nmax_steps: 10\n"
    rewards, _ = converted(tmp_path, text)
    assert rewards == [
        {"use": "trl.accuracy", "weight": 1.0},
        {"use": "trl.think_format", "weight": 1.0},
        {"use": "trl.reasoning_accuracy", "weight": 1.0},
        {"use": "trl.soft_overlong", "args": {"max_completion_len": 1280, "soft_punish_cache": 256}, "weight": 1.0},
        {"use": "rewards.py:accuracy_reward", "weight": 1.0},
    ]


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward
from trl.rewards import get_soft_overlong_punishment
from open_r1.rewards import tag_count_reward

def think_format_reward(completions, **kwargs):
    return [0.0 for _ in completions]

cosine = get_cosine_scaled_reward(max_len=100, max_value_correct=2.0)
GRPOTrainer(
    "org/model",
    args=GRPOConfig("out", max_steps=10),
    reward_funcs=[
        accuracy_reward, cosine, tag_count_reward, think_format_reward, get_repetition_penalty_reward(),
        get_soft_overlong_punishment(1000, 100),
    ],
)
"""


def test_functions_of_a_script_by_the_module_that_they_are_from(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    output = convert_file(tmp_path / "train.py")
    assert "# Or run the script with `from cohort.trl import GRPOConfig, GRPOTrainer`" in output
    rewards = yaml.safe_load(output)["rewards"]
    assert [(reward["use"], reward.get("args")) for reward in rewards] == [
        ("trl.accuracy", None),
        ("trl.cosine", None),
        ("open_r1.tag_count", None),
        ("rewards.py:think_format_reward", None),
        ("trl.repetition_penalty", None),
        ("trl.soft_overlong", None),
    ]
    for name in ("cosine", "soft_overlong"):
        assert f"- 'rewards: the arguments of trl.{name}" in output
    assert "get_cosine_scaled_reward(max_len=100, max_value_correct=2.0)" in output
    assert "no equivalent" not in output.split("\nmodel:")[0]


def test_ms_swifts_names(tmp_path):
    text = (
        "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model org/m --dataset org/d --learning_rate 1e-5 --beta 0.0 "
        "--reward_funcs accuracy format mine\n"
    )
    rewards, _ = converted(tmp_path, text, "swift.sh")
    assert [reward["use"] for reward in rewards] == ["math", "format", "rewards.py:mine"]
