"""`cohort convert`: losses, estimators and bounds of TRL, ms-swift and verl as algorithms of Cohort."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.config import AlgorithmConfig, load_config
from cohort_check import convert_file

SWIFT = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model org/m --dataset org/d --learning_rate 1e-5 --beta 0.0 "
VERL = (
    "python -m verl.trainer.main_ppo data.train_batch_size=256 data.train_files=t.parquet trainer.total_epochs=2 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.model.path=org/m trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm "
)
TRL = "reward_funcs: [accuracy]\nmax_steps: 10\n"


def converted(tmp_path: Path, name: str, text: str) -> tuple[AlgorithmConfig, str]:
    """The algorithm, and the notes, of a file's conversion; what it says has to be a valid configuration."""
    (tmp_path / name).write_text(text)
    output = convert_file(tmp_path / name)
    (tmp_path / "out.yaml").write_text(output)
    notes = [line for line in output.splitlines() if line[:1] == "#"]
    return load_config(tmp_path / "out.yaml").algorithm, " ".join([*notes, *yaml.safe_load(output)["decide_first"]])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"name": "dapo", "clip_high": 0.2}),
        ({"loss_type": "grpo"}, {}),
        ({"loss_type": "bnpo", "epsilon_high": 0.3}, {"name": "bnpo", "clip_high": 0.3}),
        ({"loss_type": "grpo", "delta": 4.0}, {"delta": 4.0}),
        ({"loss_type": "dr_grpo", "scale_rewards": "false"}, {"name": "dr_grpo"}),
        ({"loss_type": "dr_grpo"}, {"advantage": "group_mean_std", "name": "dr_grpo"}),
        ({"loss_type": "grpo", "scale_rewards": "none"}, {"advantage": "group_mean"}),
        ({"loss_type": "grpo", "scale_rewards": "batch"}, {"advantage": "group_mean_batch_std"}),
        ({"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"}, {"name": "gdpo"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"name": "gspo"},
        ),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.1},
            {"name": "luspo", "clip_low": 0.1, "clip_high": 0.1},
        ),
        ({"loss_type": "luspo"}, {"name": "luspo", "policy_loss": "clipped"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo", "clip_high": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.5}, {"name": "sapo", "tau_negative": 1.5}),
        ({"loss_type": "vespo", "vespo_k_pos": 1.0}, {"name": "vespo", "vespo_k_positive": 1.0}),
        ({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": "true"}, {"beta": 0.1, "kl_unbiased": True}),
        ({"loss_type": "grpo", "top_entropy_quantile": 0.2}, {"top_entropy_quantile": 0.2}),
        ({"loss_type": "grpo", "off_policy_mask_threshold": 0.5}, {"off_policy_mask_threshold": 0.5}),
        (
            {"loss_type": "grpo", "entropy_coef": 0.01, "use_adaptive_entropy": "true", "entropy_coef_max": 0.5},
            {"entropy_coef": 0.01, "entropy_target": 0.2, "entropy_coef_max": 0.5},
        ),
    ],
)
def test_trl(tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]):
    text = TRL + "".join(f"{key}: {value}\n" for key, value in said.items())
    algorithm, notes = converted(tmp_path, "trl.yaml", text)
    assert algorithm == AlgorithmConfig.model_validate(expected)
    assert not any(f"no equivalent: {key}" in notes for key in said)


def test_what_trl_has_of_its_own_is_told(tmp_path: Path):
    algorithm, notes = converted(tmp_path, "trl.yaml", TRL + "loss_type: cispo\n")
    assert algorithm == AlgorithmConfig(name="cispo")
    assert "a cap of 0.2 on CISPO's weights multiplies what is on-policy by 0.2 there; here such a weight is 1" in notes
    _, notes = converted(tmp_path, "trl.yaml", TRL + "loss_type: grpo\ndelta: 1.1\n")
    assert "no equivalent: delta 1.1; it bounds policy_loss: clipped, from above 1 + clip_high" in notes
    _, notes = converted(tmp_path, "trl.yaml", TRL + "loss_type: sapo\nimportance_sampling_level: sequence\n")
    assert "no equivalent: importance_sampling_level sequence with loss_type sapo" in notes


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("--loss_type grpo --importance_sampling_level sequence_token --epsilon 0.1", ("gspo_token", "group_mean_std")),
        ("--advantage_estimator rloo", ("grpo", "leave_one_out")),
        ("--advantage_estimator reinforce_plus_plus", ("reinforce_pp_baseline", "group_mean_whitened")),
        ("--scale_rewards gdpo", ("gdpo", "per_reward_mean_std")),
        ("--scale_rewards none", ("grpo", "group_mean")),
        ("--loss_type cispo --epsilon_high 3", ("cispo", "group_mean_std")),
    ],
)
def test_swift(tmp_path: Path, said: str, expected: tuple[str, str]):
    algorithm, notes = converted(tmp_path, "swift.sh", SWIFT + said + "\n")
    assert (algorithm.name, algorithm.advantage) == expected
    assert "no equivalent: advantage" not in notes and "no equivalent: loss" not in notes


def test_swift_takes_the_kl_from_the_reward(tmp_path: Path):
    text = SWIFT.replace("--beta 0.0", "--beta 0.05") + "--kl_in_reward true --top_entropy_quantile 0.2\n"
    algorithm, _ = converted(tmp_path, "swift.sh", text)
    assert (algorithm.beta, algorithm.kl_in, algorithm.kl_estimator) == (0.05, "reward", "k1")
    assert algorithm.top_entropy_quantile == 0.2


def test_a_loss_that_nobody_here_has(tmp_path: Path):
    algorithm, notes = converted(tmp_path, "swift.sh", SWIFT + "--loss_type fipo\n")
    assert algorithm == AlgorithmConfig() and "no equivalent: loss_type fipo; grpo stands in its place" in notes


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("algorithm.adv_estimator=grpo", {"name": "dapo", "clip_high": 0.2, "delta": 3.0}),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.clip_ratio_c=5",
            {"name": "dr_grpo", "delta": 5.0},
        ),
        (
            "algorithm.adv_estimator=reinforce_plus_plus",
            {"name": "reinforce_pp", "loss_weight": "token_mean", "delta": 3.0},
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean "
            "actor_rollout_ref.actor.clip_ratio_low=0.4 actor_rollout_ref.actor.clip_ratio_high=0.4",
            {"name": "gmpo"},
        ),
        (
            "algorithm.adv_estimator=rloo actor_rollout_ref.actor.policy_loss.loss_mode=gpg "
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            {"name": "rloo"},
        ),
        (
            "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 "
            "algorithm.kl_ctrl.type=adaptive",
            {
                "name": "dapo",
                "clip_high": 0.2,
                "delta": 3.0,
                "beta": 0.01,
                "kl_in": "reward",
                "kl_estimator": "k1",
                "kl_target": 0.1,
            },
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
            "actor_rollout_ref.actor.kl_loss_type=mse actor_rollout_ref.actor.entropy_coeff=0.001",
            {
                "name": "dapo",
                "clip_high": 0.2,
                "delta": 3.0,
                "beta": 0.001,
                "kl_estimator": "k2",
                "entropy_coef": 0.001,
            },
        ),
    ],
)
def test_verl(tmp_path: Path, said: str, expected: dict[str, Any]):
    algorithm, notes = converted(tmp_path, "verl.sh", VERL + said + "\n")
    assert algorithm == AlgorithmConfig.model_validate({"sampling_correction": "none", **expected})
    assert "no equivalent: algorithm" not in notes and "no equivalent: actor" not in notes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trl.yaml", TRL + "min_p: 0.1\nrepetition_penalty: 1.05\n"),
        ("swift.sh", SWIFT + "--min_p 0.1 --repetition_penalty 1.05\n"),
        (
            "verl.sh",
            VERL + "+actor_rollout_ref.rollout.min_p=0.1 +actor_rollout_ref.rollout.repetition_penalty=1.05\n",
        ),
    ],
)
def test_sampling_parameters(tmp_path: Path, name: str, text: str):
    _, notes = converted(tmp_path, name, text)
    rollout = load_config(tmp_path / "out.yaml").rollout
    assert (rollout.min_p, rollout.repetition_penalty) == (0.1, 1.05)
    assert "min_p" not in notes and "repetition_penalty" not in notes


# --- adapters and optimizers


def whole(tmp_path: Path, name: str, text: str) -> tuple[dict[str, Any], str]:
    (tmp_path / name).write_text(text)
    said = convert_file(tmp_path / name)
    return yaml.safe_load(said), said


PEFT_SCRIPT = (
    "TARGETS = ['q_proj', 'o_proj']\n{before}\n"
    "GRPOTrainer(model='m', reward_funcs=[f], peft_config={given},\n"
    "    args=GRPOConfig('o', num_generations=8, per_device_train_batch_size=8))\n"
)


@pytest.mark.parametrize(
    ("name", "text", "adapter"),
    [
        (
            "t.yaml",
            "reward_funcs: [r]\nuse_peft: true\nlora_r: 4\nlora_alpha: 8\nlora_target_modules: [q_proj, k_proj]\n"
            "use_rslora: true\n",
            {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "k_proj"], "dropout": 0.05, "rslora": True},
        ),
        (
            "t.sh",
            "trl grpo --model_name_or_path m --num_generations 8 --use_peft --lora_dropout 0 --use_dora true\n",
            {"rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"], "dora": True},
        ),
        (
            "a.py",
            PEFT_SCRIPT.format(before="", given="LoraConfig(r=2 * 4, target_modules='all-linear')"),
            {"rank": 8, "alpha": 8.0, "targets": "all-linear"},
        ),
        (
            "b.py",
            PEFT_SCRIPT.format(
                before="c = LoraConfig(task_type='CAUSAL_LM', lora_alpha=3, target_modules=TARGETS)", given="c"
            ),
            {"rank": 8, "alpha": 3.0, "targets": ["q_proj", "o_proj"]},
        ),
        (
            "s.sh",
            SWIFT.strip() + " --tuner_type lora --lora_rank 64 --lora_alpha 128 --target_modules q_proj v_proj\n",
            {"rank": 64, "alpha": 128.0, "targets": ["q_proj", "v_proj"], "dropout": 0.05},
        ),
        ("d.sh", SWIFT, {"rank": 8, "alpha": 32.0, "targets": "all-linear", "dropout": 0.05}),
        (
            "v.sh",
            VERL.strip() + " actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64\n",
            {"rank": 32, "alpha": 64.0, "targets": "all-linear"},
        ),
        ("f.sh", SWIFT.strip() + " --train_type full\n", None),
        ("w.sh", VERL.strip() + " actor_rollout_ref.model.lora_rank=0\n", None),
        ("n.yaml", "reward_funcs: [r]\nuse_peft: false\n", None),
    ],
)
def test_adapters(tmp_path: Path, name: str, text: str, adapter: dict[str, Any] | None):
    config, notes = whole(tmp_path, name, text)
    assert config["model"].get("adapter") == adapter
    assert "no equivalent: LoRA" not in notes and "lora_r" not in notes.partition("model:")[0].replace("lora_rank", "")


@pytest.mark.parametrize("given", ["get_peft_config(args)", "c", "LoraConfig(r=RANK)"])
def test_an_adapter_that_cannot_be_read_is_always_told(tmp_path: Path, given: str):
    _, notes = whole(tmp_path, "a.py", PEFT_SCRIPT.format(before="", given=given))
    assert any("peft_config" in decision for decision in yaml.safe_load(notes)["decide_first"])


def test_a_pattern_of_layers_is_told(tmp_path: Path):
    text = "reward_funcs: [r]\nuse_peft: true\nlora_target_modules: '.*(q_proj|v_proj)'\n"
    config, notes = whole(tmp_path, "t.yaml", text)
    assert config["model"]["adapter"]["targets"] == "all-linear" and "is a pattern" in notes


@pytest.mark.parametrize(
    ("said", "name", "note"),
    [
        ("adamw_torch_fused", "adamw", None),
        ("adamw_bnb_8bit", "adamw_8bit", None),
        ("paged_adamw_8bit", "adamw_8bit", None),
        ("adafactor", "adafactor", "relative to the size"),
        ("sgd", "sgd", "no effect with optim sgd: adam_beta2"),
        ("lion_8bit", "adamw", "no equivalent: optim lion_8bit"),
    ],
)
def test_optimizers(tmp_path: Path, said: str, name: str, note: str | None):
    text = f"reward_funcs: [r]\noptim: {said}\nadam_beta2: 0.9\nweight_decay: 0.1\n"
    config, notes = whole(tmp_path, "t.yaml", text)
    assert config["optim"]["name"] == name and config["optim"]["weight_decay"] == 0.1
    assert ("beta2" in config["optim"]) == name.startswith("adamw")
    assert note in notes if note else "optim" not in notes.partition("\nmodel:")[0]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("s.sh", SWIFT.replace("org/d", "'org/d#1000'"), {"path": "org/d", "rows": 1000}),
        (
            "s.sh",
            SWIFT.replace("org/d", "'HF::org/d:main#100' org/e"),
            [{"path": "org/d", "name": "main", "rows": 100}, {"path": "org/e"}],
        ),
        (
            "v.sh",
            VERL.strip() + """ data.train_files="['gsm8k/train.parquet', 'math/train.parquet']" """,
            [
                {"path": "gsm8k/train.parquet", "source": "gsm8k_train"},
                {"path": "math/train.parquet", "source": "math_train"},
            ],
        ),
        (
            "t.yaml",
            "reward_funcs: [r]\ndataset_mixture:\n  datasets:\n"
            "  - {id: org/d, config: main, weight: 0.5, columns: [prompt]}\n  - {id: org/d, split: test, weight: 1.0}\n"
            "  test_split_size: 0.1\neval_strategy: steps\n",
            [
                {"path": "org/d", "name": "main", "rows": 0.5, "source": "d_1"},
                {"path": "org/d", "split": "test", "source": "d_2"},
            ],
        ),
    ],
)
def test_several_data_sets_and_samples_of_them(tmp_path: Path, file: str, text: str, expected: object):
    config, notes = whole(tmp_path, file, text + "\n")
    if isinstance(expected, list):
        assert config["data"]["sources"] == expected and "path" not in config["data"]
    else:
        assert config["data"].items() >= expected.items()
    assert config.get("eval", {}).get("rows") == (0.1 if file == "t.yaml" else None)
    assert "dataset" not in notes.partition("To do")[2].partition("Differences")[0] and "not valid here" not in notes


def test_several_files_of_held_out_rows(tmp_path: Path):
    files = """ data.val_files="['a/test.parquet', 'b/test.parquet']" """
    config, _ = whole(tmp_path, "v.sh", VERL.strip() + files + "\n")
    assert config["eval"]["sources"] == [
        {"path": "a/test.parquet", "source": "a_test"},
        {"path": "b/test.parquet", "source": "b_test"},
    ]
    assert "path" not in config["eval"]


def test_a_sample_of_held_out_rows_of_ms_swift(tmp_path: Path):
    config, notes = whole(tmp_path, "s.sh", SWIFT + "--val_dataset 'org/e#100' --eval_steps 5\n")
    assert config["eval"]["sources"] == [{"path": "org/e", "rows": 100}] and "not valid here" not in notes


def test_batches_of_verl_do_not_depend_on_whether_it_starts(tmp_path: Path):
    """It lacks log_prob_micro_batch_size_per_gpu, and does not start."""
    config, notes = whole(tmp_path, "v.sh", VERL.strip() + " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4\n")
    assert config["train"]["prompts_per_step"] == 64 and "could not be worked out" not in notes


def test_defaults_of_ms_swift_are_kept(tmp_path: Path):
    start = (
        "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model org/m --dataset org/d --val_dataset org/v --eval_steps 50"
    )
    config, notes = whole(tmp_path, "s.sh", f"{start} --enable_thinking false --overlong_filter true\n")
    train, optim = config["train"], config["optim"]
    assert (train["learning_rate"], train["lr_schedule"], optim["weight_decay"]) == (1e-4, "cosine", 0.1)
    assert config["eval"].items() >= {"path": "org/v", "every": 50, "num_samples": 8, "temperature": 0.9}.items()
    assert config["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert config["algorithm"]["mask_truncated_completions"] is True and "has no equivalent" not in notes


def test_defaults_of_trl_are_kept(tmp_path: Path) -> None:
    config, _ = whole(tmp_path, "t.yaml", "reward_funcs: [r]\nepsilon: 0.1\nepsilon_high: null\n")
    assert config["model"]["gradient_checkpointing"] is True and config["run"]["checkpoint_every"] == 500
    assert (config["train"]["seed"], config["train"]["epochs"], config["train"]["lr_schedule"]) == (42, 3.0, "linear")
    assert (config["algorithm"]["clip_low"], config["algorithm"]["clip_high"]) == (0.1, 0.1)


def test_keyword_arguments_of_the_model_are_settings_of_their_own(tmp_path: Path) -> None:
    text = "reward_funcs: [r]\nmodel_init_kwargs: {dtype: bfloat16, use_cache: false, revision: main}\n"
    config, notes = whole(tmp_path, "t.yaml", text)
    assert config["model"]["dtype"] == "bfloat16" and "model_init_kwargs.dtype" not in notes
    assert "model_init_kwargs.revision: 'main' (t.yaml:2) has no equivalent" in config["decide_first"]


def test_stop_strings(tmp_path: Path) -> None:
    text = "reward_funcs: [r]\ngeneration_kwargs: {stop: '</answer>', seed: 3}\n"
    config, notes = whole(tmp_path, "t.yaml", text)
    assert config["rollout"]["stop"] == ["</answer>"] and "generation_kwargs.stop" not in notes
    assert "generation_kwargs.seed: 3 (t.yaml:2) has no equivalent" in config["decide_first"]
    text = "reward_funcs: [r]\ngeneration_kwargs: {stop_strings: [a, 'b c']}\n"
    assert whole(tmp_path, "u.yaml", text)[0]["rollout"]["stop"] == ["a", "b c"]
    config, _ = whole(tmp_path, "s.sh", SWIFT + '--stop_words "Observation:" "Final Answer" --num_generations 8')
    assert config["rollout"]["stop"] == ["Observation:", "Final Answer"]
    assert "stop" not in whole(tmp_path, "none.sh", SWIFT + "--num_generations 8")[0]["rollout"]


def test_servers_of_ms_swift_keep_their_gpus(tmp_path: Path):
    server = "CUDA_VISIBLE_DEVICES=0,1 swift rollout --model org/m --vllm_tensor_parallel_size 2 &\n"
    run = "CUDA_VISIBLE_DEVICES=2,3 NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model org/m --dataset org/d "
    said = "--num_generations 2 --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --async_generate true\n"
    config, notes = whole(tmp_path, "s.sh", server + run + said)
    assert config["rollout"]["tensor_parallel"] == 2 and config["rollout"]["max_staleness"] == 1
    assert config["hardware"] == {"processes": 2, "rollout_gpus": 2}
    assert "vllm_server_host" in notes and "has no equivalent" not in notes


def test_evaluation_and_timeouts_of_ms_swift_are_converted(tmp_path: Path) -> None:
    source = SWIFT + "--val_dataset org/e --eval_steps 5 --eval_on_start false --ddp_timeout 900 "
    _, notes = converted(tmp_path, "train.sh", source)
    config = load_config(tmp_path / "out.yaml")
    assert config.eval is not None
    assert (config.eval.every, config.eval.before_training, config.hardware.timeout_s) == (5, False, 900.0)
    assert "nothing is evaluated" not in notes
    _, notes = converted(tmp_path, "train.sh", SWIFT + "--eval_steps 5 ")
    assert "nothing is evaluated there: eval_steps" in notes
    whole_notes = whole(tmp_path, "old.sh", SWIFT + "--train_type lora --num_infer_workers 1 --model_type got_ocr2\n")
    assert whole_notes[0]["eval"]["rows"] == 0.01  # the default of those versions
    assert any("images" in text for text in whole_notes[0]["decide_first"])
