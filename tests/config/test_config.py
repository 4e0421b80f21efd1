"""The configuration: defaults, overrides, paths, the round trip, and what each message says."""

import pydantic
import pytest

from cohort.config import AlgorithmConfig, config_from_dict
from configs import MINIMAL, message

# Defaults


def test_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_from_dict(MINIMAL).model_dump(mode="json") == {
        "model": {
            "path": "m",
            "dtype": "float32",
            "compute_dtype": "auto",
            "gradient_checkpointing": False,
            "activation_offload": False,
            "parameter_offload": False,
            "freeze": [],
            "trust_remote_code": False,
            "adapter": None,
            "quantization": None,
        },
        "data": {
            "path": "d.jsonl",
            "split": "train",
            "name": None,
            "prompt": "prompt",
            "system_prompt": None,
            "apply_chat_template": True,
            "chat_template_kwargs": {},
            "shuffle": True,
            "overlong_prompts": "drop",
        },
        "rewards": [{"use": "math", "weight": 1.0, "name": None, "args": {}, "timeout_s": 300.0}],
        "rollout": {
            "engine": "auto",
            "num_generations": 8,
            "max_prompt_tokens": 512,
            "max_completion_tokens": 256,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_num_seqs": 256,
            "resample": 0,
        },
        "algorithm": {"name": "grpo"},
        "reference": None,
        "critic": None,
        "train": {
            "steps": None,
            "epochs": None,
            "prompts_per_step": 16,
            "micro_batch_tokens": 8192,
            "gradients_in_forward": False,
            "updates_per_rollout": 1,
            "learning_rate": 1e-6,
            "lr_schedule": "constant",
            "warmup_steps": 0,
            "router_aux_loss_coef": 0.0,
            "max_grad_norm": 1.0,
            "seed": 0,
        },
        "optim": {
            "weight_decay": 0.0,
            "groups": [],
            "offload": False,
            "stochastic_rounding": False,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "name": "adamw",
        },
        "eval": None,
        "hardware": {
            "processes": "auto",
            "rollout_gpus": "auto",
            "device": "auto",
            "reshard_after_forward": "auto",
            "timeout_s": 600.0,
            "grace_s": 60.0,
            "max_restarts": 0,
        },
        "run": {
            "dir": str(tmp_path / "runs/run"),
            "checkpoint_every": 50,
            "keep_checkpoints": 3,
            "max_shard_size": "5GB",
            "completions_every": 1,
            "show_completions_every": 0,
            "ignore_plan": False,
            "log": [],
        },
    }


def test_eval_defaults():
    config = config_from_dict({**MINIMAL, "eval": {"path": "held.jsonl"}})
    assert config.eval is not None
    assert config.eval.model_dump() == {
        "path": "held.jsonl",
        "split": "test",
        "name": None,
        "prompt": None,
        "every": 20,
        "before_training": True,
        "max_prompts": None,
        "num_samples": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_completion_tokens": None,
        "success_reward": None,
        "success_threshold": 1.0,
    }


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, AlgorithmConfig(clip_low=0.2, clip_high=0.2, std_epsilon=1e-4)),
        ({"beta": 0.1}, AlgorithmConfig(beta=0.1)),
        ({"name": "dapo"}, AlgorithmConfig(name="dapo", clip_low=0.2, clip_high=0.28)),
        ({"name": "dr_grpo"}, AlgorithmConfig(name="dr_grpo", clip_low=0.2, clip_high=0.2)),
        # the numbers of an algorithm are for its own components
        ({"name": "dapo", "policy_loss": "gspo"}, AlgorithmConfig(name="dapo", policy_loss="gspo", clip_high=4e-4)),
        (
            {"name": "dapo", "loss_weight": "constant"},
            AlgorithmConfig(loss_weight="constant", name="dapo", clip_high=0.28),
        ),
    ],
)
def test_the_algorithm_is_grpo_unless_named(algorithm, expected):
    config = config_from_dict({**MINIMAL, "algorithm": algorithm})
    assert config.algorithm == expected
    assert type(config.algorithm) is type(expected)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce"])
def test_one_completion_is_enough_for_what_needs_no_peers(name: str):
    config = config_from_dict({**MINIMAL, "algorithm": {"name": name}, "rollout": {"num_generations": 1}})
    assert config.rollout.num_generations == 1


def test_freeze():
    config = config_from_dict(MINIMAL)
    for section, key in ((config, "model"), (config.train, "seed"), (config.rewards[0], "weight")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, 1)


# Overrides


def test_overrides_change_sections_lists_and_the_algorithm():
    config = config_from_dict(
        MINIMAL,
        [
            "train.steps=7",
            "train.learning_rate=1e-5",  # YAML 1.1 reads this as text
            "rewards.0.weight=0.5",
            "rewards.0.args.pattern='#### (.*)'",
            "algorithm.name=dapo",
            "eval.path=held.jsonl",
            "run.log=[tensorboard, wandb]",
            "data.system_prompt=a=b",
            "data.chat_template_kwargs={enable_thinking: false}",
        ],
    )
    assert config.train.steps == 7
    assert config.train.learning_rate == 1e-5
    assert config.rewards[0].weight == 0.5
    assert config.rewards[0].args == {"pattern": "#### (.*)"}
    assert config.algorithm == AlgorithmConfig(name="dapo")
    assert config.eval is not None
    assert config.eval.path == "held.jsonl"
    assert config.run.log == ("tensorboard", "wandb")
    assert config.data.system_prompt == "a=b"
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


def test_overrides_leave_the_mapping_as_it_is():
    raw = {**MINIMAL, "train": {"steps": 3}, "rewards": [{"use": "math"}]}
    config_from_dict(raw, ["train.steps=4", "rewards.0.weight=2"])
    assert raw == {**MINIMAL, "train": {"steps": 3}, "rewards": [{"use": "math"}]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "override 'train.steps': must look like key.sub=value, such as train.steps=100"),
        ("=5", "override '=5': must look like key.sub=value, such as train.steps=100"),
        ("train.steps=[1", "override 'train.steps=[1': the value is not valid YAML: line 1, column 3: expected ','"),
        ("model.path.x=1", "override 'model.path.x=1': model.path is 'm', which has no keys"),
        ("rewards.1.use=x", "override 'rewards.1.use=x': '1': must be a list position from 0 to 0"),
        ("rewards.x=1", "override 'rewards.x=1': 'x': must be a list position from 0 to 0"),
        ("rewards.²=1", "override 'rewards.²=1': '²': must be a list position from 0 to 0"),
    ],
)
def test_overrides_that_cannot_work(override, expected):
    assert message(MINIMAL, override).startswith(expected)


@pytest.mark.parametrize("given", [{}, {"processes": 1}, {"processes": 8}, {"processes": "auto"}])
def test_numbers_that_may_be_left_to_the_program(given):
    config = config_from_dict({**MINIMAL, "hardware": given})
    assert config.hardware.processes == given.get("processes", "auto")
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=auto"]).train.micro_batch_tokens == "auto"
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=1"]).train.micro_batch_tokens == 1
