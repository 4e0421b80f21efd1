"""`optimizers=(optimizer, scheduler)`: they train the run's model, as the arguments' own would, and go on exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback, get_cosine_schedule_with_warmup

from cohort.errors import UserError
from cohort.trl import GRPOTrainer
from runs import assert_same_weights, metric
from scripted import digits, rows, settings
from tiny import save_model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


class Seen(TrainerCallback):
    """Notes what callbacks get, and stops after a step."""

    def __init__(self, last: int = 99):
        self.last, self.rates, self.optimizer = last, [], None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.optimizer = given["optimizer"]
        self.rates.append(given["lr_scheduler"].get_last_lr()[0])
        control.should_training_stop = state.global_step == self.last


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model") / "base", "qwen3")


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def grouped(model: Any) -> Any:
    """An optimizer with groups as people write them, one of them empty, and a schedule."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}, {"params": []}]
    optimizer = torch.optim.NAdam(groups, lr=0.01)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 4)


def test_like_those_of_the_arguments(tmp_path: Path, base: Path):
    given = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "adam_beta2": 0.9, "max_grad_norm": 0.5}
    own, seen = Seen(), Seen()
    GRPOTrainer(load(base), digits, settings(tmp_path / "own", **given), rows(), callbacks=[own]).train()
    model = load(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.9), weight_decay=0, fused=True)
    args = settings(tmp_path / "given", **{**given, "learning_rate": 7.0})  # not read, as in transformers
    trainer = GRPOTrainer(model, digits, args, rows(), callbacks=[seen], optimizers=(optimizer, None))
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is None
    trainer.train()
    assert seen.optimizer is optimizer and seen.rates == own.rates and len(set(own.rates)) > 1
    assert_same_weights(tmp_path / "own/cohort/final", tmp_path / "given/cohort/final")


def test_a_scheduler_and_a_break(tmp_path: Path, base: Path):
    def make(out: str, last: int = 99) -> tuple[GRPOTrainer, Seen]:
        model, seen = load(base), Seen(last)
        model.model.embed_tokens.requires_grad_(False)
        args = settings(tmp_path / out, save_strategy="steps", save_steps=1)
        optimizer, scheduler = grouped(model)
        pair = (optimizer if out == "whole" else None, scheduler)
        return GRPOTrainer(model, digits, args, rows(), callbacks=[seen], optimizers=pair), seen

    trainer, seen = make("whole")
    trainer.train()
    assert seen.rates == pytest.approx([0.01, 0.0075, 0.0025, 0.0])
    assert metric(tmp_path / "whole/cohort", "learning_rate") == pytest.approx([0.0, 0.01, 0.0075, 0.0025])
    frozen = trainer.model.get_input_embeddings().weight
    assert torch.equal(frozen, load(base).get_input_embeddings().weight)
    assert not torch.equal(trainer.model.model.norm.weight, load(base).model.norm.weight)
    make("out", 2)[0].train()
    again, seen = make("out")
    again.train(resume_from_checkpoint=True)
    assert seen.rates == pytest.approx([0.0025, 0.0]) and again.lr_scheduler.last_epoch == 4
    assert_same_weights(tmp_path / "out/checkpoint-4", tmp_path / "whole/checkpoint-4")
    again.train()  # from these weights, with both as they began
    assert seen.rates[2:] == pytest.approx([0.01, 0.0075, 0.0025, 0.0])


def test_another_optimizer_cannot_go_on(tmp_path: Path, base: Path):
    def make(kind: type[torch.optim.Optimizer], last: int) -> GRPOTrainer:
        model, args = load(base), settings(tmp_path / "out", save_strategy="steps", save_steps=1)
        pair = (kind(model.parameters(), lr=1e-3), None)  # type: ignore[call-arg]
        return GRPOTrainer(model, digits, args, rows(), callbacks=[Seen(last)], optimizers=pair)

    make(torch.optim.NAdam, 1).train()
    with pytest.raises(UserError, match=r"optim\.use"):
        make(torch.optim.RAdam, 2).train(resume_from_checkpoint=True)


def test_an_adapter(tmp_path: Path, base: Path):
    model = get_peft_model(load(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), adapter_name="mine")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)  # frozen ones included, as in many scripts
    trainer = GRPOTrainer(model, digits, settings(tmp_path / "out"), rows(), optimizers=(optimizer, None))
    trainer.train()
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in trained.values()]
    assert all(".lora_" in name for name in trained) and any(p.any() for n, p in trained.items() if "lora_B" in n)


def test_what_is_refused(tmp_path: Path, base: Path):
    model, other = load(base), load(base)
    sgd, stepped = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    stepped.step()

    class Keeps(torch.optim.SGD):
        def __init__(self, params: Any):
            super().__init__(params)
            self.kept = list(self.param_groups[0]["params"])

    for given, pair, message in (
        (str(base), (sgd, None), r"optimizers: '.*' is loaded when training starts, .* load the model, make the"),
        (other, (sgd, None), r"\d+ of the \d+ parameters of SGD are not parameters of the model; make it of"),
        (model, (stepped, None), r"AdamW has already made steps; pass a new one, without state"),
        (model, (sgd, torch.optim.lr_scheduler.ConstantLR(stepped)), r"the scheduler was made for another optimizer"),
        (model, (torch.optim.SGD, None), r"optimizers: must be a torch\.optim\.Optimizer, not type"),
        (model, sgd, r"optimizers: must be a pair \(optimizer, scheduler\), not SGD"),
        (model, (Keeps(model.parameters()), None), r"Keeps keeps parameters outside of its param_groups"),
    ):
        with pytest.raises(UserError, match=message):
            GRPOTrainer(given, digits, settings(tmp_path / "out"), rows(), optimizers=pair)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = GRPOTrainer(model, digits, settings(tmp_path / "out"), rows(), optimizers=(sgd, None), peft_config=lora)
    with pytest.raises(
        UserError,
        match=r"SGD has \d+ parameters, of which the run does not train \d+ \(.*; with peft_config, add the ad",
    ):
        trainer.train()
