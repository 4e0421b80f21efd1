"""What scripts use of the trainer beside `train`: overrides, evaluations, reward models, cards."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
)

from cohort.errors import UserError
from cohort.trl import GRPOConfig, GRPOTrainer
from cohort.trl.rewards import RewardModel
from reward_models import MESSAGES, naive_scores, save_reward_model
from runs import assert_same_weights, metric
from scripted import digits, rows, settings
from test_multimodal import save_multimodal_folder
from tiny import save_model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model") / "base", "qwen3"))


def logged(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Logs of steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_rewards_log_metrics_and_columns(tmp_path: Path, base: str):
    def length(completions: Any, log_metric: Any, log_extra: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        log_metric("longest", max(map(len, completions)))
        log_extra("begins", [c[:1] for c in completions])
        return [trainer_state.global_step - len(c) / 100 for c in completions]

    trainer = GRPOTrainer(base, length, settings(tmp_path, max_steps=2), rows())
    trainer.train()
    assert [0 < entry["longest"] <= 8 for entry in logged(trainer)] == [True, True]
    file = tmp_path / "cohort" / "completions" / "step-000002.parquet"
    assert any("begins" in name for name in pq.read_schema(file).names)


def test_beta_set_during_training(tmp_path: Path, base: str):
    class Anneal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.beta = 0.5 if state.global_step == 1 else 0.0

    trainer = GRPOTrainer(base, digits, settings(tmp_path, beta=0.1, max_steps=3), rows(), callbacks=[Anneal()])
    trainer.train()
    assert [entry["kl_coef"] for entry in logged(trainer)] == [0.1, 0.5, 0.0] and trainer.beta == 0.0
    assert trainer.ref_model is not None and trainer.ref_model is not trainer.model
    trainer = GRPOTrainer(base, digits, settings(tmp_path / "other"), rows())
    assert trainer.ref_model is None
    with pytest.raises(UserError, match=r"beta: is 0 at the start, so there is no reference model"):
        trainer.beta = 0.1


def test_overridden_rewards_and_logs(tmp_path: Path, base: str):
    """The values of the functions, which the override changes, and metrics that it keeps for the log."""

    async def level(level: list[int], **kwargs: Any) -> list[float | None]:
        return [None if n % 2 else float(n) for n in level]

    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            values = super()._calculate_rewards(inputs, prompts, completions, ids)
            assert values.shape == (8, 2) and values.dtype == torch.float32
            assert [row["prompt"] for row in inputs] == prompts and len(ids) == len(completions) == 8
            torch.testing.assert_close(values[:, 0], torch.tensor(digits(completions)))
            expected = [math.nan if row["level"] % 2 else float(row["level"]) for row in inputs]
            torch.testing.assert_close(values[:, 1], torch.tensor(expected), equal_nan=True)
            self._metrics["train"]["mine"].append(float(values[:, 0].sum()))
            values[:, 0] += 2
            return values

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["doubled"] = 2 * logs.get("loss", 0.0)
            super().log(logs, start_time)

    trainer = Mine(base, [digits, level], settings(tmp_path, max_steps=2), rows())
    trainer.train()
    for entry in logged(trainer):
        assert entry["rewards/digits/mean"] == pytest.approx(2 + entry["mine"] / 8)
        assert entry["doubled"] == 2 * entry["loss"] and "rewards/level/mean" in entry


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("_generate_and_score_completions", "environment_factory, or agent="),
        ("compute_loss", "algorithm="),
        ("_prepare_inputs", "rows in the order"),
        ("create_optimizer", r"optimizers=\(optimizer, scheduler\), or args\.optim"),
        ("_save_checkpoint", "a callback's on_save"),
        ("get_train_dataloader", "rows in the order"),
    ],
)
def test_overrides_that_are_never_called(tmp_path: Path, base: str, name: str, hook: str):
    mine = type("Mine", (GRPOTrainer,), {name: lambda self, *args: None})
    with pytest.raises(UserError, match=rf"Mine\.{name}: is not called by Cohort; use {hook}"):
        mine(base, digits, settings(tmp_path), rows())


def test_arguments_of_trl_itself(tmp_path: Path, base: str):
    from transformers import TrainingArguments

    with pytest.raises(UserError, match=r"args: transformers.*\.TrainingArguments; use cohort\.trl\.GRPOConfig"):
        GRPOTrainer(base, digits, TrainingArguments(str(tmp_path)), rows())  # type: ignore[arg-type]


def test_names_of_rewards(tmp_path: Path, base: str):
    class Length:
        def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            return [float(len(c)) for c in completions]

    functions = [
        functools.partial(digits, scale=2),
        digits,
        Length(),
        lambda completions, **_: [0.0] * len(completions),
    ]
    trainer = GRPOTrainer(base, functions, settings(tmp_path, max_steps=1), rows())
    assert trainer.reward_func_names == ["digits", "digits_2", "Length", "<lambda>"]
    trainer.train()
    assert {f"rewards/{name}/mean" for name in trainer.reward_func_names} <= logged(trainer)[0].keys()


def test_several_evaluation_sets(tmp_path: Path, base: str):
    names: list[set[str]] = []

    class Note(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            names.append({name for name in metrics if name.endswith("_reward")})

    sets = {"easy": rows(2), "hard": rows(3).to_iterable_dataset()}
    args = settings(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, metric_for_best_model="easy_reward")
    trainer = GRPOTrainer(base, digits, args, rows(), sets, callbacks=[Note])
    trainer.train()
    assert names == 2 * [{"eval_easy_reward"}, {"eval_hard_reward"}]
    assert trainer.state.best_metric == max(
        e["eval_easy_reward"] for e in trainer.state.log_history if "eval_easy_reward" in e
    )
    metrics = trainer.evaluate()
    assert (metrics["eval_easy_num_prompts"], metrics["eval_hard_num_prompts"]) == (2, 3)
    assert trainer.evaluate("hard")["eval_hard_reward"] == metrics["eval_hard_reward"]
    assert trainer.evaluate(rows(3), metric_key_prefix="test")["test_reward"] == metrics["eval_hard_reward"]


@pytest.mark.parametrize("trains_on_text", [True, False])
def test_held_out_prompts_in_another_form(tmp_path: Path, base: str, trains_on_text: bool):
    messages = Dataset.from_list([{"prompt": MESSAGES}] * 2)
    trained, held_out = (rows(2), messages) if trains_on_text else (messages, rows(2))
    message = "eval_dataset: its prompts are text, those of train_dataset messages; use one form for both"
    if trains_on_text:
        message = "eval_dataset: its prompts are messages, those of train_dataset text; use one form for both"
    for given in (held_out, {"same": trained, "other": held_out.to_iterable_dataset()}):
        with pytest.raises(UserError, match=message):
            GRPOTrainer(base, digits, settings(tmp_path), trained, given)
    with pytest.raises(UserError, match=message):
        GRPOTrainer(base, digits, settings(tmp_path), trained, trained).evaluate(held_out)


def test_streams(tmp_path: Path, base: str):
    """Of an endless one the rows are read that the steps need, in order; the run is that of a list of them."""
    count = itertools.count()

    def endless() -> Any:
        for n in count:
            yield {"prompt": f"say {n % 10}"}

    trainer = GRPOTrainer(base, digits, settings(tmp_path, max_steps=2), IterableDataset.from_generator(endless))
    trainer.train()
    assert next(count) <= 6
    prompts = [{"prompt": f"say {n}"} for n in range(4)]
    same = GRPOTrainer(base, digits, settings(tmp_path / "list", max_steps=2, shuffle_dataset=False), prompts)
    same.train()
    assert metric(tmp_path / "cohort", "reward") == metric(tmp_path / "list" / "cohort", "reward")
    with pytest.raises(UserError, match=r"max_steps: missing; a stream has no length"):
        GRPOTrainer(base, digits, settings(tmp_path / "none", max_steps=-1), IterableDataset.from_generator(endless))


def test_the_best_adapter_at_the_end(tmp_path: Path, base: str):
    args = settings(
        tmp_path,
        max_steps=5,
        learning_rate=0.5,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="rewards/digits/mean",
        greater_is_better=True,
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    trainer = GRPOTrainer(base, digits, args, rows(), rows(4), peft_config=adapter, callbacks=callbacks)
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    trainer.save_model(str(tmp_path / "final"))
    saved, wanted = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "final", best))
    assert saved.keys() == wanted.keys() and all(torch.equal(saved[name], wanted[name]) for name in saved)
    assert trainer.evaluate()["eval_rewards/digits/mean"] == pytest.approx(trainer.state.best_metric)


def test_reward_models(tmp_path: Path, base: str):
    """Objects with and without a tokenizer, and ids; conversations by the chat template, texts as they are."""
    path = save_reward_model(tmp_path / "judge")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    args: dict[str, Any] = {"device": torch.device("cpu"), "options": {}, "template": {}}
    answers = [[{"role": "assistant", "content": text}] for text in ("4", "twenty-two", "")]
    for reward in (RewardModel(model, tokenizer, **args), RewardModel(str(path), None, **args)):
        scores = reward([MESSAGES] * 3, answers)
        assert scores == pytest.approx(naive_scores(path, [MESSAGES] * 3, answers), abs=1e-5)
        (score,) = reward(["2+2?"], ["4"])
        with torch.no_grad():
            ids = tokenizer("2+2?4", add_special_tokens=False, return_tensors="pt")["input_ids"]
            assert score == pytest.approx(model(input_ids=ids).logits[0, 0].item(), abs=1e-5)
    trainer = GRPOTrainer(
        base,
        [model, digits, str(path)],
        settings(tmp_path, max_steps=1),
        rows(),
        reward_processing_classes=[tokenizer, None, None],
    )
    assert trainer.reward_func_names == ["judge", "digits", "judge_2"]
    trainer.train()
    entry = logged(trainer)[0]
    assert entry["rewards/judge/mean"] == pytest.approx(entry["rewards/judge_2/mean"], abs=1e-5)
    with pytest.raises(UserError, match=r"reward_processing_classes: 1 for 2 reward_funcs"):
        GRPOTrainer(base, [model, digits], settings(tmp_path), rows(), reward_processing_classes=tokenizer)


@pytest.mark.extras
def test_reward_models_score_as_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from trl_parts import import_trl

    path = save_reward_model(tmp_path / "judge")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    trl = import_trl()
    monkeypatch.setattr(trl.grpo_trainer, "gather", lambda values: values)
    monkeypatch.setattr(trl.GRPOTrainer.__mro__[2], "_prepare_inputs", lambda self, inputs: inputs)
    stand_in = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    vars(stand_in).update(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        reward_funcs=[model],
        reward_processing_classes=[tokenizer],
        reward_func_names=["judge"],
        chat_template_kwargs={},
        environments=None,
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
    )
    ours = RewardModel(model, tokenizer, device=torch.device("cpu"), options={}, template={})
    for prompt, completions in (
        ("2+2?", ["4", "twenty-two", " "]),
        (MESSAGES, [[{"role": "assistant", "content": text}] for text in ("4", "twenty-two", " ")]),
    ):
        prompts = [prompt] * 3
        theirs = stand_in._calculate_rewards([{"prompt": prompt}] * 3, prompts, completions, None)
        torch.testing.assert_close(torch.tensor(ours(prompts, completions)), theirs[:, 0])


def test_the_end_of_usual_scripts(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Metrics into files and on the console, a model card, and an upload of all but checkpoints."""
    uploads: list[dict[str, Any]] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **_: type("Repo", (), {"repo_id": f"me/{name}"}))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: uploads.append(given))
    args = settings(tmp_path / "out", max_steps=1, push_to_hub=True, save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(base, digits, args, rows())
    metrics = {**trainer.train().metrics, "train_samples": 12}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model(args.output_dir)
    trainer.create_model_card(model_name="mine", tags="math", dataset_name="me/rows")
    trainer.push_to_hub(dataset_name="me/rows")
    assert "***** train metrics *****" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert saved["train_samples"] == 12 and saved["train_runtime"] > 0
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert card.datasets == "me/rows" and card.tags == ["cohort", "grpo"]
    assert [upload["commit_message"] for upload in uploads] == ["Model save", "End of training"]
    assert uploads[0]["repo_id"] == "me/out" and "checkpoint-*/*" in uploads[0]["ignore_patterns"]
    assert_same_weights(tmp_path / "out", tmp_path / "out" / "checkpoint-1")


@pytest.mark.parametrize("with_adapter", [False, True])
def test_training_again(tmp_path: Path, base: str, with_adapter: bool):
    """The second time starts from the weights of the first, as another run, with other rows."""
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if with_adapter else None
    args = settings(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(base, digits, args, rows(), peft_config=adapter)
    trainer.train()
    after_one = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert trainer.evaluate([{"prompt": "2"}])["eval_num_prompts"] == 1, "of rows that the trainer does not know"
    starts: list[bool] = []

    class Start(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            starts.append(all(torch.equal(after_one[n], tensor) for n, tensor in model.state_dict().items()))
            assert state.global_step == 0 and not state.log_history

    trainer.add_callback(Start)
    trainer.train_dataset, trainer.args.learning_rate = rows(3), 1e-3
    assert trainer.train().global_step == 1 and starts == [True]
    config = trainer._built().config
    assert config.train.learning_rate == 1e-3 and config.run.dir.endswith("cohort-2")
    assert (tmp_path / "earlier" / "checkpoint-1").is_dir() and (tmp_path / "checkpoint-1").is_dir()


def test_a_run_that_fails_goes_on_from_its_checkpoint(tmp_path: Path, base: str):
    works: list[int] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        works.append(len(works))
        assert len(works) != 3, "breaks once"
        return digits(completions)

    trainer = GRPOTrainer(base, reward, settings(tmp_path, max_steps=3, save_strategy="steps", save_steps=1), rows())
    with pytest.raises(UserError, match="breaks once"):
        trainer.train()
    assert trainer.train().global_step == 3 and [entry["step"] for entry in logged(trainer)] == [1, 2, 3]


def test_what_is_changed_before_training(tmp_path: Path, base: str):
    trainer = GRPOTrainer(base, digits, settings(tmp_path), rows())
    trainer.args.max_steps, trainer.train_dataset = 1, rows(2)
    assert trainer.num_generations == 4 and trainer.epsilon_low == 0.2
    with pytest.raises(
        UserError, match=r"epsilon_high: cannot be changed on the trainer; set args\.epsilon_high before train"
    ):
        trainer.epsilon_high = 0.3
    with pytest.raises(AttributeError, match="'GRPOTrainer' object has no attribute 'data_collator'"):
        _ = trainer.data_collator
    assert trainer.train().global_step == 1 and metric(tmp_path / "cohort", "reward") != []


def test_beta_before_training(tmp_path: Path, base: str):
    trainer = GRPOTrainer(base, digits, settings(tmp_path / "set", max_steps=1, beta=0.1), rows())
    trainer.beta, trainer.args.learning_rate = 0.05, 1e-3
    trainer.train()
    assert trainer.beta == 0.05 == logged(trainer)[0]["kl_coef"]
    trainer = GRPOTrainer(base, digits, settings(tmp_path / "argument", max_steps=1, beta=0.1), rows())
    trainer.args.beta = 0.5
    trainer.train()
    assert trainer.beta == 0.5 == logged(trainer)[0]["kl_coef"]


def test_a_best_model_by_a_loss(tmp_path: Path):
    with pytest.raises(UserError, match=r"metric_for_best_model: 'loss' is not measured; use eval_reward"):
        GRPOConfig(str(tmp_path), eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True)


def test_merging_the_adapter_of_a_multimodal_model(tmp_path: Path):
    base, adapter = str(save_multimodal_folder(tmp_path / "base", "gemma3")), LoraConfig(r=4, target_modules=["q_proj"])
    trainer = GRPOTrainer(base, digits, settings(tmp_path / "out"), rows(), peft_config=adapter)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    trainer.save_model(str(tmp_path / "adapter"))
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = trainer.model.merge_and_unload()
    assert type(merged) is type(plain) and not (tmp_path / "out" / "cohort" / "merged").exists()
    torch.testing.assert_close(merged.float().state_dict(), expected, rtol=1e-2, atol=1e-3)
    unmerged = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).state_dict()
    (name, *_) = [name for name in expected if "language_model" in name and "q_proj" in name]
    assert (expected[name] - unmerged[name]).abs().max() > 0.1
