"""`from cohort.trl import ...`: TRL scripts with another import train as Cohort does."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    TrainerCallback,
    TrainerState,
)

import scripted
from cohort.chat import ResponseParser
from cohort.config.other_trainers import equivalents, grpo_config_fields
from cohort.errors import UserError
from cohort.trl import GRPOConfig, GRPOTrainer
from cohort_check.findings import load_table
from playing import make_game, save_turns_model
from runs import assert_same_weights
from scripted import digits, rows
from tiny import save_model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


OF_NEWER_TRANSFORMERS = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # than 5.17


async def right(completions: list[str], answer: list[str], trainer_state: Any, log_metric: Any, **kwargs: Any) -> Any:
    log_metric("at", float(trainer_state.global_step))
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


class Length:
    """An instance with `__call__`."""

    __name__ = "length"

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        return [-len(ids) / 100 for ids in completion_ids]


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def _note(name: str) -> Any:  # noqa: N805
        def note(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(f"{name}:{state.global_step}")

        return note

    on_train_begin, on_step_begin, on_step_end = _note("begin"), _note("step_begin"), _note("step_end")
    on_log, on_evaluate, on_save, on_train_end = _note("log"), _note("evaluate"), _note("save"), _note("end")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_model_folder(tmp_path / "base", "qwen3")
    return tmp_path / "base"


def settings(tmp_path: Path, **given: Any) -> GRPOConfig:
    return scripted.settings(tmp_path / "out", **given)


def test_a_script_trains_with_events_in_order_and_a_log(tmp_path: Path, base: Path):
    events = Events()
    trainer = GRPOTrainer(
        model=str(base),
        reward_funcs=[digits, right, Length()],
        args=settings(
            tmp_path,
            reward_weights=[1.0, 0.5, 0.1],
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            save_strategy="steps",
            logging_steps=2,
        ),
        train_dataset=rows(),
        eval_dataset=rows(3),
        callbacks=[events],
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.reward_func_names == ["digits", "right", "length"]
    output = trainer.train()
    assert output.global_step == 4 and not all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert [event for event in events.seen if "step_" not in event] == [
        "begin:0",
        *["log:2", "log:2", "evaluate:2", "save:2"],
        *["log:4", "log:4", "evaluate:4", "save:4"],
        *["log:4", "end:4"],
    ]
    assert isinstance(trainer.state, TrainerState) and trainer.state.max_steps == 4
    first, evaluated = trainer.state.log_history[:2]
    assert {
        "reward",
        "reward_std",
        "loss",
        "grad_norm",
        "learning_rate",
        "rewards/digits/mean",
        "step",
        "epoch",
    } <= set(first)
    assert {"eval_reward", "eval_completions/mean_length"} <= set(evaluated)
    saved = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["global_step"] == 4
    trainer.save_model(str(tmp_path / "final"))
    assert_same_weights(tmp_path / "final", tmp_path / "out" / "checkpoint-4")
    assert_same_weights(tmp_path / "final", tmp_path / "out" / "cohort" / "final")
    AutoTokenizer.from_pretrained(tmp_path / "final")


def test_a_model_object_with_peft_and_the_tokenizer(tmp_path: Path, base: Path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    trainer = GRPOTrainer(
        model,
        [digits],
        settings(tmp_path, max_steps=1, bf16=True, max_prompt_length=64, warmup_ratio=0.1),
        rows(),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert json.loads((tmp_path / "final" / "adapter_config.json").read_text())["r"] == 4


def test_the_best_model_at_the_end_and_early_stopping(tmp_path: Path, base: Path):
    args = settings(
        tmp_path,
        max_steps=6,
        learning_rate=0.5,  # ruins the model at once
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_rewards/digits/mean",
        greater_is_better=True,
    )
    stopper = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = GRPOTrainer(str(base), digits, args, rows(), rows(4), callbacks=[stopper])
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None
    values = [entry["eval_rewards/digits/mean"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert trainer.state.best_metric == max(values)
    trainer.save_model(str(tmp_path / "final"))
    assert_same_weights(tmp_path / "final", Path(best))


def test_an_evaluation_at_the_start_and_saving_the_best(tmp_path: Path, base: Path):
    events = Events()
    args = settings(
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        save_strategy="best",
        metric_for_best_model="eval_reward",
    )
    GRPOTrainer(str(base), digits, args, rows(), rows(2), callbacks=[events]).train()
    seen = [event for event in events.seen if event.startswith(("evaluate", "save"))]
    assert seen[:3] == ["evaluate:0", "evaluate:1", "save:1"], seen
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


def test_a_subclass_that_logs(tmp_path: Path, base: Path):
    class Mine(GRPOTrainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0})

    trainer = Mine(str(base), digits, settings(tmp_path, max_steps=1), rows())
    trainer.train()
    assert [entry["mine"] for entry in trainer.state.log_history] == [1.0, 1.0]


def test_an_argument_without_an_equivalent(tmp_path: Path, base: Path):
    with pytest.raises(UserError, match="rollout_func is not supported; use environment_factory"):
        GRPOTrainer(str(base), digits, settings(tmp_path), rows(), rollout_func=print)


def test_an_override_that_is_never_called(tmp_path: Path, base: Path):
    class Mine(GRPOTrainer):
        def compute_loss(self, *args: Any) -> None: ...

    with pytest.raises(UserError, match=r"Mine\.compute_loss: is not called by Cohort; use algorithm="):
        Mine(str(base), digits, settings(tmp_path), rows())


@pytest.mark.parametrize(
    ("given", "section", "expected"),
    [
        ({"loss_type": "grpo"}, "algorithm", {"policy_loss": "clipped", "loss_weight": "sequence_mean"}),
        ({"importance_sampling_level": "sequence"}, "algorithm", {"policy_loss": "gspo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm", {"policy_loss": "cispo", "clip_high": 4.0}),
        ({"scale_rewards": False}, "algorithm", {"advantage": "group_mean"}),
        ({"beta": 0.04}, "algorithm", {"beta": 0.04, "kl_unbiased": True}),
        ({"num_iterations": 2, "max_steps": 5}, "train", {"steps": 3, "updates_per_rollout": 2}),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}, "train", {"prompts_per_step": 1}),
        ({"max_steps": -1, "num_train_epochs": 2}, "train", {"epochs": 2, "steps": None}),
        ({"optim": "sgd"}, "optim", {"name": "sgd"}),
        ({"warmup_steps": 0.25}, "train", {"warmup_ratio": 0.25}),
        ({"generation_kwargs": {"stop": "x"}}, "rollout", {"stop": ("x",)}),
        ({"max_prompt_length": 99}, "rollout", {"max_prompt_tokens": 99}),
        ({"min_p": 0.1}, "rollout", {"min_p": 0.1, "repetition_penalty": 1.0}),
        ({"repetition_penalty": 1.2}, "rollout", {"min_p": 0.0, "repetition_penalty": 1.2}),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is a field of earlier versions")
def test_fields(tmp_path: Path, base: Path, given: dict[str, Any], section: str, expected: dict[str, Any]):
    config = GRPOTrainer(str(base), digits, settings(tmp_path, **given), rows())._built().config
    found = getattr(config, section)
    assert {name: getattr(found, name) for name in expected} == expected


def test_fields_that_are_not_supported_and_those_of_earlier_versions(tmp_path: Path):
    with pytest.raises(UserError, match=r"label_smoothing_factor: 0\.1 is not supported: it has no meaning for GRPO"):
        settings(tmp_path, label_smoothing_factor=0.1)
    with pytest.warns(UserWarning, match="overwrite_output_dir is a field of earlier versions: "):
        settings(tmp_path, overwrite_output_dir=True)
    with pytest.warns(UserWarning, match="push_to_hub_model_id is a field of earlier versions: use hub_model_id"):
        assert settings(tmp_path, push_to_hub_model_id="mine").hub_model_id == "mine"
    with pytest.raises(UserError, match=r"report_to: 'mlflow' is not supported; use tensorboard, wandb, trackio"):
        settings(tmp_path, report_to=["wandb", "mlflow"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        settings(tmp_path, bf16=True, report_to="all")


def test_every_field_has_one_place():
    """It is in the table that conversions use, or refused, dropped or without effect for a reason."""
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    tables = equivalents()["trl"]
    read = {
        key.partition(".")[0]
        for table in ("transformers", "reference", "evaluation", "trl", "trl_vllm")
        for row in tables[table].values()
        for key in (row if isinstance(row, str) else row["from"]).split()
    }
    refused, dropped, as_there, no_effect = (
        set(grpo_config_fields()[group]) for group in ("refused", "dropped", "read", "no_effect")
    )
    assert names - read <= refused | dropped | as_there | no_effect <= names | OF_NEWER_TRANSFORMERS
    assert not (refused & (dropped | as_there | no_effect) or as_there & (dropped | no_effect))
    converting = load_table("convert/not_needed/trl.yaml")
    assert not no_effect & {key for keys in converting.values() for key in keys.split()}, "a reason has one place"


def test_arguments_are_parsed_and_subclassed(tmp_path: Path):
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        question: str = "why"

    (parsed,) = HfArgumentParser(Mine).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--beta", "0.1", "--question", "how", "--bf16", "true"]
    )
    assert (parsed.beta, parsed.question, parsed.bf16) == (0.1, "how", True)


def test_it_is_trl_config():
    trl = pytest.importorskip("trl")
    ours = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: ours.get(name, "missing") for name in theirs} == theirs


def test_an_environment_and_its_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ResponseParser, "check_tools", lambda self: None)
    save_turns_model(tmp_path / "base")

    args = settings(
        tmp_path, max_steps=1, max_completion_length=6, max_tool_calling_iterations=2, max_prompt_length=600
    )
    data = [{"prompt": [{"role": "user", "content": "say 1"}]}, {"prompt": [{"role": "user", "content": "say 2"}]}]
    trainer = GRPOTrainer(str(tmp_path / "base"), None, args, data, environment_factory=make_game())
    trainer.train()
    assert trainer._built().config.rollout.max_turns == 3
    assert "rewards/Game/mean" in trainer.state.log_history[0]


def chat_digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """Completions of chat prompts are lists of messages."""
    return [sum(c.isdigit() for c in completion[0]["content"]) / 12 for completion in completions]


@pytest.mark.parametrize("form", ["dataset", "streamed", "mapped", "list"])
def test_forms_of_data(tmp_path: Path, base: Path, form: str):
    def as_chat(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": row["prompt"]}]}

    plain = rows()
    data = {
        "dataset": plain,
        "streamed": plain.to_iterable_dataset(),
        "mapped": plain.map(as_chat),
        "list": list(plain),
    }[form]
    reward = chat_digits if form == "mapped" else digits
    trainer = GRPOTrainer(str(base), [reward], settings(tmp_path, max_steps=1), data, callbacks=[Events])
    trainer.train()
    assert trainer.state.global_step == 1 and len(trainer.state.log_history) == 2
