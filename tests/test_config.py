"""The configuration: defaults, overrides, paths, the round trip, and what each message says."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import AlgorithmConfig, config_from_dict, docs, load_config, to_yaml
from cohort.errors import UserError

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}


def message(raw: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config_from_dict(raw, overrides)
    return str(caught.value)


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
            "trust_remote_code": False,
            "adapter": None,
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
            "engine": "local",
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
            "max_grad_norm": 1.0,
            "seed": 0,
        },
        "optim": {
            "weight_decay": 0.0,
            "groups": [],
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "name": "adamw",
        },
        "eval": None,
        "hardware": {
            "processes": 1,
            "rollout_gpus": "auto",
            "device": "auto",
            "timeout_s": 600.0,
            "max_restarts": 0,
        },
        "run": {
            "dir": str(tmp_path / "runs/run"),
            "checkpoint_every": 50,
            "keep_checkpoints": 3,
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


def test_frozen():
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
    assert config.hardware.processes == given.get("processes", 1)
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=auto"]).train.micro_batch_tokens == "auto"
    assert config_from_dict(MINIMAL, ["train.micro_batch_tokens=1"]).train.micro_batch_tokens == 1


# Messages

NUM_PROCESSES = "must be a whole number of at least 1, or auto (every GPU of this machine; 1 without GPUs)"
NUM_TOKENS = "must be a whole number of at least 1, or auto (the most that fits)"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        # unknown keys: the nearest one, here or in the section that has it
        (
            {"train": {"stepz": 5}},
            "train.stepz: unknown key; did you mean steps? train has: steps, epochs, prompts_per",
        ),
        (
            {"train": {"num_generations": 4}},
            "train.num_generations: unknown key; did you mean rollout.num_generations?",
        ),
        ({"num_generations": 4}, "num_generations: unknown key; did you mean rollout.num_generations?"),
        ({"reward": 1}, "reward: unknown key; did you mean rewards? the configuration has: model, data, rewards"),
        (
            {"zzz": 1},
            "zzz: unknown key; the configuration has: model, data, rewards, rollout, algorithm, reference, critic",
        ),
        (
            {"model": {"path": "m", "adapter": {"rnak": 4}}},
            "model.adapter.rnak: unknown key; did you mean rank? model.adapter has: kind, rank, alpha, targets",
        ),
        ({"model": {"path": "m", "rank": 4}}, "model.rank: unknown key; did you mean model.adapter.rank?"),
        ({"model": {"path": "m", "adapter": 4}}, "model.adapter: 4: a section is a mapping of keys: kind, rank, alpha"),
        ({"model": {"path": "m", "adapter": {"rank": 0}}}, "model.adapter.rank: 0: input should be greater than or"),
        (
            {"model": {"path": "m", "adapter": {"targets": "q_proj"}}},
            "model.adapter.targets: 'q_proj': must be all-linear or a list of names, such as [q_proj, v_proj]",
        ),
        (
            {"rewards": [{"use": "math", "wieght": 1}]},
            "rewards.0.wieght: unknown key; did you mean weight? rewards.0 has: use, weight, name, args, timeout_s",
        ),
        (
            {"algorithm": {"betta": 0.1}},
            "algorithm.betta: unknown key; did you mean beta? algorithm has: name, advantage, policy_loss, ",
        ),
        (
            {"algorithm": {"name": "dr_grpo", "std_epsilon": 1}},
            "algorithm: std_epsilon: 1.0 has no effect with advantage: group_mean; remove it, or use advantage: "
            "group_mean_std",
        ),
        ({"eval": {"path": "d", "everry": 1}}, "eval.everry: unknown key; did you mean every? eval has: path, split"),
        ({"train": {1: 2}}, "train.1: 1: keys should be strings"),
        (
            {"algorithm": {"name": "gspo", "delta": 3.0}},
            "algorithm: delta: 3.0 has no effect with policy_loss: gspo; remove it, or use policy_loss: clipped",
        ),
        (
            {"algorithm": {"delta": 1.2}},
            "algorithm: delta: 1.2 must be above 1 + clip_high, which is 1.2; 3 is usual",
        ),
        (
            {"algorithm": {"name": "pkpo"}, "rollout": {"num_generations": 3}},
            "rollout.num_generations: 3 is less than algorithm.at_k: 4, so that nothing would be learned; use at least "
            "4, or a smaller at_k",
        ),
        (
            {"algorithm": {"name": "luspo"}, "train": {"gradients_in_forward": True}},
            "algorithm.policy_loss: gspo needs the logprobs of whole completions before the loss of any token",
        ),
        (
            {"algorithm": {"name": "rloo"}, "rollout": {"num_generations": 1}},
            "rollout.num_generations: 1 with algorithm.name: rloo (advantage: leave_one_out): a group of one has no "
            "peers to be judged against, so its advantage is always 0 and nothing would be learned; use at least 2 (8 "
            "is usual), or algorithm.name: reinforce_pp or reinforce or ppo, which need no peers",
        ),
        # unknown algorithm
        (
            {"algorithm": {"name": "gpro"}},
            "algorithm.name: 'gpro': is not one of grpo, dr_grpo, dapo, bnpo, ",
        ),
        ({"algorithm": {"name": None}}, "algorithm.name: None: input should be a valid string"),
        ({"algorithm": "dapo"}, "algorithm: 'dapo': a section is a mapping of keys: name, advantage, "),
        # missing
        ({"model": {}}, "model.path: missing; this key is required"),
        ({"rewards": [{}]}, "rewards.0.use: missing; this key is required"),
        ({"eval": {}}, "eval.path: missing; this key is required"),
        # wrong types
        ({"model": None}, "model: None: a section is a mapping of keys: path, dtype, compute_dtype, gradient"),
        ({"train": [1]}, "train: [1]: a section is a mapping of keys: steps, epochs"),
        ({"train": {"steps": "many"}}, "train.steps: 'many': input should be a valid integer"),
        (
            {"train": {"steps": 1.5}},
            "train.steps: 1.5: input should be a valid integer, got a number with a fractional",
        ),
        ({"train": {"steps": True}}, "train: steps: True: must be a number"),
        ({"rewards": [{"use": "math", "weight": False}]}, "rewards.0: weight: False: must be a number"),
        ({"algorithm": {"beta": True}}, "algorithm: beta: True: must be a number"),
        ({"data": {"path": 5}}, "data.path: 5: input should be a valid string"),
        ({"rewards": {"use": "math"}}, "rewards: {'use': 'math'}: must be a list, such as [{use: math}]"),
        ({"rewards": ["math"]}, "rewards.0: 'math': a section is a mapping of keys: use, weight, name, args"),
        ({"rewards": []}, "rewards: []: at least one reward is needed, such as [{use: math}]"),
        ({"run": {"log": "wandb"}}, "run.log: 'wandb': must be a list, such as [tensorboard]"),
        # values out of bounds
        ({"train": {"learning_rate": 0}}, "train.learning_rate: 0: input should be greater than 0"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: nan: input should be a finite number"),
        ({"algorithm": {"clip_low": 2}}, "algorithm.clip_low: 2: input should be less than 1"),
        ({"model": {"path": "m", "dtype": "half"}}, "model.dtype: 'half': input should be 'float32', 'bfloat16' or"),
        ({"model": {"path": ""}}, "model.path: '': string should have at least 1 character"),
        ({"run": {"dir": ""}}, "run.dir: '': string should have at least 1 character"),
        ({"run": {"log": ["wand"]}}, "run.log.0: 'wand': input should be 'tensorboard', 'wandb' or 'trackio'"),
        ({"hardware": {"device": "gpu"}}, "hardware.device: 'gpu': must be auto, cpu, cuda or cuda:N"),
        ({"hardware": {"device": "mps"}}, "hardware.device: 'mps': must be auto, cpu, cuda or cuda:N"),
        ({"hardware": {"processes": 0}}, f"hardware.processes: 0: {NUM_PROCESSES}"),
        ({"hardware": {"processes": -1}}, f"hardware.processes: -1: {NUM_PROCESSES}"),
        ({"hardware": {"processes": 2.5}}, f"hardware.processes: 2.5: {NUM_PROCESSES}"),
        ({"hardware": {"processes": "many"}}, f"hardware.processes: 'many': {NUM_PROCESSES}"),
        ({"hardware": {"processes": None}}, f"hardware.processes: None: {NUM_PROCESSES}"),
        ({"hardware": {"processes": True}}, "hardware: processes: True: must be a number"),
        ({"hardware": {"timeout_s": 0}}, "hardware.timeout_s: 0: input should be greater than 0"),
        ({"hardware": {"max_restarts": -1}}, "hardware.max_restarts: -1: input should be greater than or equal to 0"),
        ({"train": {"micro_batch_tokens": 0}}, f"train.micro_batch_tokens: 0: {NUM_TOKENS}"),
        ({"train": {"micro_batch_tokens": 2.5}}, f"train.micro_batch_tokens: 2.5: {NUM_TOKENS}"),
        ({"train": {"micro_batch_tokens": "x"}}, f"train.micro_batch_tokens: 'x': {NUM_TOKENS}"),
        ({"train": {"micro_batch_tokens": True}}, "train: micro_batch_tokens: True: must be a number"),
        ({"rollout": {"num_generations": 0}}, "rollout.num_generations: 0: input should be greater than or equal to 1"),
        (
            {"rollout": {"num_generations": 1}},
            "rollout.num_generations: 1 with algorithm.name: grpo (advantage: group_mean_std): a group of one has no "
            "peers to be judged against, so its advantage is always 0 and nothing would be learned; use at least 2 (8 "
            "is usual), or algorithm.name: reinforce_pp or reinforce or ppo, which need no peers",
        ),
        # the name stands for a component that was replaced: another name would not help
        (
            {"algorithm": {"name": "ppo", "advantage": "group_mean"}, "rollout": {"num_generations": 1}},
            "rollout.num_generations: 1 with algorithm.name: ppo (advantage: group_mean): a group of one has no "
            "peers to be judged against, so its advantage is always 0 and nothing would be learned; use at least 2 (8 "
            "is usual), or algorithm.advantage: batch_mean_std or gae, which need no peers",
        ),
        (
            {"algorithm": {"name": "ppo", "advantage": "group_mean"}, "critic": {}},
            "critic has no effect with algorithm.name: ppo (advantage: group_mean), which trains none; remove the "
            "section, or use algorithm.advantage: gae",
        ),
        # two keys that do not go together
        (
            {"algorithm": {"name": "rloo"}, "train": {"updates_per_rollout": 2}},
            "train.updates_per_rollout: 2 with algorithm.policy_loss: reinforce: it has no ratio to the policy that "
            "sampled, which from the second update on is another one; use updates_per_rollout: 1, or policy_loss: "
            "clipped or cispo",
        ),
        (
            {"algorithm": {"name": "maxrl"}, "rewards": [{"use": "math"}, {"use": "format", "weight": -0.5}]},
            "rewards.1.weight: -0.5 makes rewards negative, and algorithm.advantage: max_likelihood takes rewards of "
            "at least 0",
        ),
        (
            {"algorithm": {"name": "maxrl"}, "rewards": [{"use": "overlong", "args": {"buffer_tokens": 4}}]},
            "rewards.0.use: overlong makes rewards negative, and algorithm.advantage: max_likelihood takes",
        ),
        (
            {"algorithm": {"name": "ppo"}, "rollout": {"resample": 1}},
            "rollout.resample: 1 would replace groups that teach: advantage: gae learns where the",
        ),
        (
            {"hardware": {"device": "cuda:1", "processes": 2}},
            "hardware: device: cuda:1 names one GPU, and processes: 2 would share it; use device: cuda, and "
            "CUDA_VISIBLE_DEVICES to choose among the GPUs",
        ),
        ({"hardware": {"device": "cuda:0", "processes": "auto"}}, "hardware: device: cuda:0 names one GPU, and proc"),
        ({"train": {"steps": 3, "epochs": 1}}, "train: steps and epochs say the same thing twice; remove one"),
        ({"train": {"steps": 3, "warmup_steps": 4}}, "train: warmup_steps: 4 is more than steps: 3"),
        # options of vLLM that Cohort sets
        *(
            (
                {"rollout": {"engine": "vllm", "vllm_args": {"kv_cache_dtype": "fp8", key: 1}}},
                f"rollout.vllm_args: {key} is set by Cohort; {way}",
            )
            for key, way in {
                "max-num-seqs": "use rollout.max_num_seqs",
                "tensor_parallel_size": "use rollout.tensor_parallel",
                "gpu-memory-utilization": "use rollout.gpu_memory_utilization",
                "dtype": "use rollout.dtype",
                "model": "use model.path",
                "host": "remove it (`cohort serve --host` says where",
                "no_enable_scale_out": "remove it (tokens and logprobs are read",
                "weight-transfer-config.backend": "remove it (the weights reach a server by it)",
                "worker_extension_cls": "remove it (the weights reach a server by it)",
            }.items()
        ),
        # keys without effect
        (
            {"rollout": {"engine": "vllm", "urls": ["http://a:1"], "tensor_parallel": 2}},
            "rollout: tensor_parallel has no effect with urls: the servers are someone else's, and `cohort serve` "
            "takes it on its command line; remove one of the two",
        ),
        (
            {"rollout": {"engine": "vllm", "max_staleness": 1}, "algorithm": {"sampling_correction": "none"}},
            "rollout.stale_completions: correct corrects nothing with algorithm.sampling_correction: none; use "
            "sampling_correction: token_truncate, or stale_completions: drop",
        ),
        (
            {"data": {"path": "d", "apply_chat_template": False, "system_prompt": "Be brief."}},
            "data: system_prompt has no effect with apply_chat_template: false; remove one of the two",
        ),
        (
            {"data": {"path": "d", "apply_chat_template": False, "chat_template_kwargs": {"a": 1}}},
            "data: chat_template_kwargs has no effect with apply_chat_template: false; remove one of the two",
        ),
        (
            {"run": {"checkpoint_every": 0, "keep_checkpoints": 2}},
            "run: keep_checkpoints has no effect with checkpoint_every: 0; remove one of the two",
        ),
        ({"eval": {"path": "d", "top_k": 5}}, "eval: top_k has no effect with temperature: 0 (greedy); remove one"),
        ({"eval": {"path": "d", "top_p": 0.9}}, "eval: top_p has no effect with temperature: 0 (greedy); remove one"),
        (
            {"eval": {"path": "d", "num_samples": 4}},
            "eval: num_samples: 4 with temperature: 0 gives the same completion 4 times; set a temperature above 0 "
            "(such as 0.6), or num_samples: 1",
        ),
    ],
)
def test_messages(section, expected):
    text = message({**MINIMAL, **section})
    assert text.startswith(expected)
    assert "\n" not in text


def test_every_mistake_is_listed_and_long_values_are_cut():
    hardware = {"device": "x" * 200, "processes": 0}
    text = message({**MINIMAL, "train": {"stepz": 5, "seed": -1}, "hardware": hardware})
    keys = ["train.seed", "train.stepz", "hardware.processes", "hardware.device"]
    assert [line.split(":")[0] for line in text.splitlines()] == keys
    assert text.splitlines()[3] == f"hardware.device: '{'x' * 76}...: must be auto, cpu, cuda or cuda:N"


# Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "a configuration is a mapping of sections (model, data, ...), not None"),
        ("- a\n", "a configuration is a mapping of sections (model, data, ...), not ['a']"),
        ("model: {path: m\n", "not valid YAML: line 2, column 1: expected ',' or '}'"),
        (
            "train:\n  steps: 1\n  seed: 2\n  steps: 3\n",
            "not valid YAML: line 4, column 3: the key 'steps' is there twice",
        ),
        ("train: {steps: 2024-13-45}\n", "not valid YAML: month must be in 1..12"),
        ("a: !!python/object:os.x {}\n", "not valid YAML: line 1, column 4: could not determine a constructor"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "gsm8k.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "gsm8.yaml")
    assert str(caught.value) == f"{tmp_path}/gsm8.yaml: no such configuration file; did you mean gsm8k.yaml?"
    with pytest.raises(UserError, match=r"nowhere/x\.yaml: no such configuration file$"):
        load_config(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(UserError, match=r"cannot be read: .*directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(UserError, match=r"cannot be read: .*utf-8"):
        load_config(tmp_path / "latin.yaml")


def test_paths_are_looked_up_beside_the_file_then_in_the_working_directory(tmp_path, monkeypatch):
    beside, here = tmp_path / "configs", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (here / "model").mkdir()
    (beside / "rewards.py").touch()
    (here / "held.jsonl").touch()
    raw = {
        "model": {"path": "model"},
        "data": {"path": "both.jsonl"},
        "rewards": [{"use": "rewards.py:right"}, {"use": "package.module:f"}, {"use": "missing.py:f"}],
        "eval": {"path": "held.jsonl"},
        "run": {"dir": "runs/a"},
    }
    (beside / "run.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir(here)
    config = load_config("../configs/run.yaml")
    assert config.model.path == str(here / "model")
    assert config.data.path == str(beside / "both.jsonl")
    assert [r.use for r in config.rewards] == [f"{beside}/rewards.py:right", "package.module:f", "missing.py:f"]
    assert config.eval is not None
    assert config.eval.path == str(here / "held.jsonl")
    assert config.run.dir == str(here / "runs" / "a")


def test_paths_that_do_not_exist_stay_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.jsonl").touch()
    config = config_from_dict(
        {**MINIMAL, "model": {"path": "org/name"}, "data": {"path": "~/d.jsonl"}, "eval": {"path": "x" * 300}}
    )
    assert config.model.path == "org/name"
    assert config.data.path == str(tmp_path / "d.jsonl")
    assert config.eval is not None
    assert config.eval.path == "x" * 300


@pytest.mark.parametrize("given", ["~/env/bin/python", "env/bin/python", "{home}/env/bin/python"])
def test_the_python_of_vllm_stays_a_link(tmp_path, monkeypatch, given):
    """An environment's python is a link to another one's, without whose name it would not be in its environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": "vllm"}}))
    config = load_config(tmp_path / "run.yaml", [f"rollout.vllm_python={given.format(home=tmp_path)}"])
    assert config.rollout.vllm_python == str(tmp_path / "env" / "bin" / "python")


def test_a_python_of_vllm_that_is_not_there_is_left_to_the_search_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_from_dict({**MINIMAL, "rollout": {"engine": "vllm", "vllm_python": "python3.11"}})
    assert config.rollout.vllm_python == "python3.11"


def test_keys_of_the_file_can_be_read_past(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "rollout": {"engine": "vllm", "urls": ["http://a:1"]}}))
    assert load_config(path).rollout.urls == ("http://a:1",)
    assert load_config(path, ["rollout.tensor_parallel=2"], without=["rollout.urls"]).rollout.urls == ()
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_config(path, without=["rollout.urls", "eval.path"]) == load_config(path)


# The round trip

number = st.floats(min_value=1e-9, max_value=0.9)
text = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1).map(
    lambda s: "_" + s.replace("/", "_").replace("~", "_")
)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
number_or_auto = st.just("auto") | st.integers(1, 10**6)
raw_configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": text}, optional={"dtype": st.sampled_from(["float64", "bfloat16"])}),
        "data": st.fixed_dictionaries(
            {"path": text}, optional={"system_prompt": text, "chat_template_kwargs": st.dictionaries(text, json_value)}
        ),
        "rewards": st.lists(
            st.fixed_dictionaries(
                {"use": text}, optional={"weight": number, "args": st.dictionaries(text, json_value)}
            ),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "algorithm": st.fixed_dictionaries(
            {"name": st.sampled_from(["grpo", "dr_grpo", "dapo", "luspo", "gmpo"])},
            optional={
                "beta": number,
                "clip_low": number,
                "advantage": st.sampled_from(["group_mean", "leave_one_out", "max_at_k"]),
                "loss_weight": st.sampled_from(["token_mean", "constant"]),
            },
        ),
        "train": st.fixed_dictionaries(
            {"learning_rate": number}, optional={"epochs": number, "micro_batch_tokens": number_or_auto}
        ),
        "hardware": st.fixed_dictionaries({"processes": number_or_auto, "timeout_s": number}),
        "eval": st.fixed_dictionaries({"path": text}, optional={"temperature": number}),
        "run": st.fixed_dictionaries({"checkpoint_every": st.sampled_from([0, 1, 50])}),
    },
)


@settings(max_examples=60, deadline=None)
@given(raw=raw_configs)
def test_yaml_reads_back_to_an_equal_configuration(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    config = config_from_dict(raw)
    path.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    assert to_yaml(config).startswith(
        "# Written by cohort: a run's configuration with every default.\n# Of `algorithm`"
    )


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, {"name": "grpo"}),
        ({"name": "dapo", "advantage": "group_mean_std", "clip_high": 0.28}, {"name": "dapo"}),
        ({"name": "dapo", "clip_high": 0.2}, {"name": "dapo", "clip_high": 0.2}),
        ({"policy_loss": "gspo"}, {"name": "grpo", "policy_loss": "gspo"}),
        ({"policy_loss": "reinforce"}, {"name": "grpo", "policy_loss": "reinforce"}),
        ({"beta": 0.1, "kl_estimator": "k2"}, {"name": "grpo", "beta": 0.1, "kl_estimator": "k2"}),
        ({"entropy_target": 0.2}, {"name": "grpo", "entropy_target": 0.2}),
    ],
)
def test_of_the_algorithm_only_what_its_name_does_not_say_is_written(given, written):
    config = config_from_dict({**MINIMAL, "algorithm": given})
    assert config.model_dump(mode="json")["algorithm"] == written
    assert yaml.safe_load(to_yaml(config))["algorithm"] == written
    assert config_from_dict({**MINIMAL, "algorithm": written}) == config


def test_another_name_in_a_written_file_is_another_algorithm(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config_from_dict({**MINIMAL, "algorithm": {"name": "gspo"}})))
    config = load_config(tmp_path / "config.yaml", ["algorithm.name=ppo"])
    assert config.algorithm == AlgorithmConfig(name="ppo")


# Around it


def test_the_page_of_keys_is_up_to_date():
    page = Path(__file__).parents[1] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == docs.render(), "run `make docs`"


def test_import_is_light():
    code = (
        "import sys, cohort.config, cohort.plan, cohort.records, cohort.errors, cohort.cli\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_path_of_an_adapter_decides_is_not_written_down(tmp_path):
    """Read back, a default would contradict the adapter that is at the path."""
    (tmp_path / "adapter").mkdir()
    for keys in ({"rank": 4}, {"path": "adapter"}, {"path": "adapter", "alpha": 3.0}):
        config = config_from_dict({**MINIMAL, "model": {"path": "m", "adapter": keys}}, base_dir=tmp_path)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        again = load_config(tmp_path / "config.yaml")
        assert again == config and again.model.adapter.rank == keys.get("rank", 16)
        assert again.model.adapter.path in (None, str(tmp_path / "adapter"))
        assert again.model.adapter.model_fields_set >= keys.keys()
        assert ("rank" in again.model.adapter.model_fields_set) == ("path" not in keys)
