"""What the configuration says of each mistake."""

import pytest

from cohort.config import Config
from cohort.config.other_trainers import TRL_TABLES, equivalents
from cohort.config.schema import sections_in
from configs import MINIMAL, message

# Messages
NUM_PROCESSES = "must be a whole number from 1 to 100000, or auto (every GPU of this machine; 1 without GPUs)"
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
            "zzz: unknown key; the configuration has: model, data, rewards, sandbox, rollout, algorithm, reference, "
            "critic",
        ),
        (
            {"model": {"path": "m", "adapter": {"rnak": 4}}},
            "model.adapter.rnak: unknown key; did you mean rank? model.adapter has: kind, rank, alpha, targets",
        ),
        (
            {"rollout": {"tensor_parallel": 2}},
            "rollout.tensor_parallel: only rollout.engine: vllm has this key; remove it, or use rollout.engine: vllm; "
            "rollout auto has: tools, environment",
        ),
        (
            {"rollout": {"engine": "local", "max_staleness": 1}},
            "rollout.max_staleness: only rollout.engine: vllm has this key; remove it, or use rollout.engine: vllm; "
            "rollout local has: tools, environment",
        ),
        ({"model": {"path": "m", "rank": 4}}, "model.rank: unknown key; did you mean model.adapter.rank?"),
        ({"rollout": {"stop": ["a", ""]}}, "rollout.stop: ['a', '']: an empty string would end every completion at"),
        ({"rollout": {"stop": "</answer>"}}, "rollout.stop: '</answer>': must be a list of texts, such as [</answer>]"),
        ({"rollout": {"stop": [7]}}, "rollout.stop: [7]: must be a list of texts, such as [</answer>]"),
        (
            {"rollout": {"generation_kwargs": {"stop": "a"}}},
            "rollout.generation_kwargs: unknown key; generation_kwargs is TRL's: use rollout.stop for its stop strings",
        ),
        ({"model": {"path": "m", "adapter": 4}}, "model.adapter: 4: a section is a mapping of keys: kind, rank, alpha"),
        ({"model": {"path": "m", "adapter": {"rank": 0}}}, "model.adapter.rank: 0: input should be greater than or"),
        (
            {"model": {"path": "m", "adapter": {"targets": "q_proj"}}},
            "model.adapter.targets: 'q_proj': must be all-linear or a list of names, such as [q_proj, v_proj]",
        ),
        (
            {"rewards": [{"use": "math", "wieght": 1}]},
            "rewards.0.wieght: unknown key; did you mean weight? rewards.0 has: use, weight, name, args, where, "
            "scale, clip, gate, timeout_s",
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
        ({"run": {"dir": "a\0b"}}, "run.dir: 'a\\x00b': a path cannot contain a null character; remove it"),
        ({"run": {"dir": "r/" + "x" * 300}}, "run.dir: "),
        (
            {"eval": {"path": "d", "everry": 1}},
            "eval.everry: unknown key; did you mean every? eval has: path, sources, split",
        ),
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
            "rollout.num_generations: 3 is less than algorithm.at_k: 4, so nothing would be learned; use at least "
            "4, or a smaller at_k",
        ),
        (
            {"algorithm": {"name": "luspo"}, "train": {"gradients_in_forward": True}},
            "algorithm.policy_loss: gspo needs the logprobs of whole completions, but train.gradients_in_forward",
        ),
        (
            {"algorithm": {"name": "rloo"}, "rollout": {"num_generations": 1}},
            "rollout.num_generations: 1 with algorithm.name: rloo (advantage: leave_one_out): a group of one has "
            "nothing to compare with, so its advantage is always 0 and nothing would be learned; use at least 2 (8 is "
            "common), or algorithm.name: reinforce_pp or reinforce or ppo, which work with one completion per prompt",
        ),
        # a function of the user's and its arguments
        (
            {"algorithm": {"policy_loss": {"use": "clipped", "args": {"clip_low": 0.1}}}},
            "algorithm.policy_loss: {'use': 'clipped', 'args': {'clip_low': 0.1}}: must be file.py:function, or {use: "
            "file.py:function, args: {name: value}}; one of clipped, gspo, ",
        ),
        (
            {"algorithm": {"advantage": {"usee": "a.py:f"}}},
            "algorithm.advantage: {'usee': 'a.py:f'}: must be file.",
        ),
        (
            {"algorithm": {"loss_weight": {"use": "a.py:f", "args": {1: 2}}}},
            "algorithm.loss_weight: {'use': 'a.py:f', 'args': {1: 2}}: must be file.py:function, or {use: ",
        ),
        ({"algorithm": {"advantage": {"use": {"a": "b"}}}}, "algorithm.advantage: {'use': {'a': 'b'}}: must be file."),
        ({"algorithm": {"advantage": 5}}, "algorithm.advantage: 5: must be one of group_mean_std, group_mean, "),
        ({"algorithm": {"policy_loss": "clippd"}}, "algorithm.policy_loss: 'clippd': is not one of clipped, gspo, "),
        (
            {"algorithm": {"policy_loss": "a.py:f", "clip_low": 0.1}},
            "algorithm: clip_low: 0.1 has no effect with policy_loss: a.py:f; remove it, or use policy_loss: clipped "
            "or gspo or gspo_token or gmpo or {use: a.py:f, args: {clip_low: 0.1}}",
        ),
        (
            {"train": {"warmup_steps": 2, "warmup_ratio": 0.1}},
            "train: warmup_steps and warmup_ratio both set the warmup; remove one of the two",
        ),
        (
            {"train": {"min_lr_ratio": 0.1}},
            "train: min_lr_ratio: 0.1 has no effect with lr_schedule: constant; remove it, or use lr_schedule: cosine",
        ),
        ({"train": {"min_lr_ratio": 1, "lr_schedule": "linear"}}, "train.min_lr_ratio: 1: input should be less than 1"),
        # keys of TRL
        (
            {"algorithm": {"epsilon": 0.3}},
            "algorithm.epsilon: unknown key; epsilon is TRL's: use algorithm.clip_low: 0.3 and algorithm.clip_high: "
            "0.3",
        ),
        (
            {"rollout": {"max_completion_length": 300}},
            "rollout.max_completion_length: unknown key; max_completion_length is TRL's: use "
            "rollout.max_completion_tokens: 300",
        ),
        (
            {"num_train_epochs": 2},
            "num_train_epochs: unknown key; num_train_epochs is TRL's: use train.epochs: 2",
        ),
        (
            {"rollout": {"vllm_mode": "colocate"}},
            "rollout.vllm_mode: unknown key; vllm_mode is TRL's: use hardware.rollout_gpus: shared",
        ),
        (
            {"train": {"per_device_train_batch_size": 6}, "rollout": {"num_generations": 4}},
            "train.per_device_train_batch_size: unknown key; per_device_train_batch_size is TRL's: use "
            "train.prompts_per_step: 2 (6 completions x gradient_accumulation_steps 1 x 1 GPUs / num_generations 4)",
        ),
        (
            {"train": {"gradient_accumulation_steps": 8}},
            "train.gradient_accumulation_steps: unknown key; gradient_accumulation_steps is TRL's: not needed: "
            "train.prompts_per_step is the whole batch,",
        ),
        (
            {"algorithm": {"scale_rewards": False}},
            "algorithm.scale_rewards: unknown key; scale_rewards is TRL's: use algorithm.advantage: group_mean",
        ),
        ({"train": {"beta": 0.1}}, "train.beta: unknown key; did you mean algorithm.beta?"),
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
        ({"train": {"steps": True}}, "train: steps: True: must be a number"),
        ({"rewards": [{"use": "math", "weight": False}]}, "rewards.0: weight: False: must be a number"),
        ({"data": {"path": 5}}, "data.path: 5: must be a path, or rows: a list of dicts"),
        ({"rewards": {"use": "math"}}, "rewards: {'use': 'math'}: must be a list, such as [{use: math}]"),
        ({"rewards": ["math"]}, "rewards.0: 'math': a section is a mapping of keys: use, weight, name, args"),
        ({"rewards": []}, "rewards: []: at least one reward is needed, such as [{use: math}]"),
        ({"run": {"log": "wandb"}}, "run.log: 'wandb': must be a list, such as [tensorboard]"),
        # values out of bounds
        ({"train": {"learning_rate": 0}}, "train.learning_rate: 0: input should be greater than 0"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: nan: input should be a finite number"),
        ({"model": {"path": "m", "dtype": "half"}}, "model.dtype: 'half': input should be 'float32', 'bfloat16' or"),
        ({"model": {"path": ""}}, "model.path: '': string should have at least 1 character"),
        ({"run": {"log": ["wand"]}}, "run.log.0: 'wand': input should be 'tensorboard', 'wandb' or 'trackio'"),
        ({"hardware": {"device": "gpu"}}, "hardware.device: 'gpu': must be auto, cpu, cuda or cuda:N"),
        ({"hardware": {"processes": 0}}, f"hardware.processes: 0: {NUM_PROCESSES}"),
        ({"hardware": {"processes": 2.5}}, f"hardware.processes: 2.5: {NUM_PROCESSES}"),
        ({"hardware": {"processes": "many"}}, f"hardware.processes: 'many': {NUM_PROCESSES}"),
        ({"train": {"micro_batch_tokens": 0}}, f"train.micro_batch_tokens: 0: {NUM_TOKENS}"),
        # the name stands for a component that was replaced: another name would not help
        (
            {"algorithm": {"name": "ppo", "advantage": "group_mean"}, "rollout": {"num_generations": 1}},
            "rollout.num_generations: 1 with algorithm.name: ppo (advantage: group_mean): a group of one has "
            "nothing to compare with, so its advantage is always 0 and nothing would be learned; use at least 2 (8 is "
            "common), or algorithm.advantage: batch_mean_std or gae, which work with one completion per prompt",
        ),
        (
            {"algorithm": {"name": "ppo", "advantage": "group_mean"}, "critic": {}},
            "critic has no effect with algorithm.name: ppo (advantage: group_mean), which has no critic; remove the "
            "section, or use algorithm.advantage: gae",
        ),
        # two keys that do not go together
        (
            {"algorithm": {"name": "rloo"}, "train": {"updates_per_rollout": 2}},
            "train.updates_per_rollout: 2 with algorithm.policy_loss: reinforce: this loss has no importance "
            "ratio, so it is off-policy from the second update on; use updates_per_rollout: 1, or policy_loss: "
            "clipped or cispo",
        ),
        (
            {"algorithm": {"name": "maxrl"}, "rewards": [{"use": "math"}, {"use": "format", "weight": -0.5}]},
            "rewards.1.weight: -0.5 makes rewards negative, and algorithm.advantage: max_likelihood needs rewards of "
            "at least 0",
        ),
        (
            {"algorithm": {"name": "maxrl"}, "rewards": [{"use": "overlong", "args": {"buffer_tokens": 4}}]},
            "rewards.0.use: overlong makes rewards negative, and algorithm.advantage: max_likelihood needs",
        ),
        (
            {"algorithm": {"name": "ppo"}, "rollout": {"resample": 1}},
            "rollout.resample: 1 would replace useful groups: advantage: gae also learns from",
        ),
        (
            {"hardware": {"device": "cuda:1", "processes": 2}},
            "hardware: device: cuda:1 names one GPU, and processes: 2 would share it; use device: cuda, and "
            "CUDA_VISIBLE_DEVICES to choose among the GPUs",
        ),
        ({"train": {"steps": 3, "epochs": 1}}, "train: steps and epochs both set the length of the run; remove one"),
        ({"train": {"steps": 3, "warmup_steps": 4}}, "train: warmup_steps: 4 is more than steps: 3"),
        # options of vLLM that Cohort sets
        *(
            (
                {"rollout": {"engine": "vllm", "vllm_args": {"kv_cache_dtype": "fp8", key: 1}}},
                f"rollout.vllm_args: {key} is set by Cohort; {instead}",
            )
            for key, instead in {
                "max-num-seqs": "use rollout.max_num_seqs",
                "tensor_parallel_size": "use rollout.tensor_parallel",
                "gpu-memory-utilization": "use rollout.gpu_memory_utilization",
                "dtype": "use rollout.dtype",
                "model": "use model.path",
                "host": "remove it (for a server that other machines reach, use `cohort serve --host`",
                "no_enable_scale_out": "remove it (Cohort relies on its own setting",
                "weight-transfer-config.backend": "remove it (Cohort needs it to send weights",
                "worker_extension_cls": "remove it (Cohort needs it to send weights",
            }.items()
        ),
        # keys without effect
        (
            {"rollout": {"engine": "vllm", "urls": ["http://a:1"], "tensor_parallel": 2}},
            "rollout: tensor_parallel: 2 has no effect with urls, whose servers are already running (set it "
            "with `cohort serve`); remove one of the two",
        ),
        (
            {"rollout": {"engine": "vllm", "max_staleness": 1}, "algorithm": {"sampling_correction": "none"}},
            "rollout.stale_completions: correct has no effect with algorithm.sampling_correction: none; use "
            "sampling_correction: token_truncate, or stale_completions: drop",
        ),
        (
            {"data": {"path": "d", "apply_chat_template": False, "system_prompt": "Be brief."}},
            "data: system_prompt: Be brief. has no effect with apply_chat_template: false; remove one of the two",
        ),
        (
            {"data": {"path": "d", "apply_chat_template": False, "chat_template_kwargs": {"a": 1}}},
            "data: chat_template_kwargs: {'a': 1} has no effect with apply_chat_template: false; remove one of the two",
        ),
        (
            {"run": {"checkpoint_every": 0, "keep_checkpoints": 2}},
            "run: keep_checkpoints: 2 has no effect with checkpoint_every: 0; remove one of the two",
        ),
        ({"rollout": {"min_p": 1.5}}, "rollout.min_p: 1.5: input should be less than or equal to 1"),
        ({"rollout": {"min_p": -0.1}}, "rollout.min_p: -0.1: input should be greater than or equal to 0"),
        ({"rollout": {"repetition_penalty": 0}}, "rollout.repetition_penalty: 0: input should be greater than 0"),
        (
            {"rollout": {"engine": "vllm", "min_p": 0.1, "vllm_args": {"speculative-config": {"method": "ngram"}}}},
            "rollout: min_p: 0.1: vLLM does not support it with speculative decoding; use top_p or top_k, or remove "
            "vllm_args.speculative_config",
        ),
        ({"eval": {"path": "d", "min_p": 0.1}}, "eval: min_p: 0.1 has no effect with temperature: 0 (greedy)"),
        ({"eval": {"path": "d", "top_k": 5}}, "eval: top_k: 5 has no effect with temperature: 0 (greedy)"),
        (
            {"eval": {"path": "d", "top_p": 0.9}},
            "eval: top_p: 0.9 has no effect with temperature: 0 (greedy)",
        ),
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
    assert text.splitlines()[3] == f"hardware.device: '{'x' * 36} ... {'x' * 36}': must be auto, cpu, cuda or cuda:N"


def test_of_very_many_mistakes_some_are_told_and_all_counted():
    lines = message({**MINIMAL, **{f"key{n}": 1 for n in range(1000)}}).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 980 more mistakes"
    assert sum("the configuration has: model, data" in line for line in lines) == 1


def test_the_keys_of_a_section_are_listed_once():
    assert message({**MINIMAL, "train": {"stepz": 1, "sed": 2}}).startswith(
        "train.stepz: unknown key; did you mean steps?\n"
        "train.sed: unknown key; did you mean seed? train has: steps, epochs"
    )


def test_batches_of_trl_count_accumulation():
    train = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 8}
    text = message({**MINIMAL, "train": train, "hardware": {"processes": 2}})
    assert "use train.prompts_per_step: 6 (3 completions x gradient_accumulation_steps 8 x 2 GPUs" in text


def test_what_is_proposed_for_keys_of_trl_are_keys():
    proposed = [ours for table in TRL_TABLES for ours in equivalents()["trl"][table]]
    assert len(proposed) > 60
    for ours in proposed:
        section, *path = ours.split(".")
        found = sections_in(Config.model_fields[section].annotation)
        for name in path:
            fields = [part.model_fields[name] for part in found if name in part.model_fields]
            assert fields, ours
            found = [inner for field in fields for inner in sections_in(field.annotation)]
