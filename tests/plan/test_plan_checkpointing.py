"""`model.gradient_checkpointing: auto`: the fastest that fits, in a plan and in the run that it is of."""

from typing import Any

import pytest

from cohort.plan.advice import replan
from cohort.plan.defaults import with_checkpointing
from cohort.plan.hardware import local_cpu
from cohort.plan.predict import CHECKPOINTING, Plan
from cohort.trainer import preflight
from cohort.trainer.preflight import choose_checkpointing_on
from plans import EIGHT, config, on_gpus, plan_of

AUTO = "train.micro_batch_tokens=auto"


def step_s(plan: Plan) -> float:
    return plan.timing["step_s"].value


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([AUTO], False),
        ([AUTO, "rollout.max_completion_tokens=10000"], "selective"),
        (["train.micro_batch_tokens=20000"], "selective"),
        (["train.micro_batch_tokens=120000"], True),
    ],
)
def test_auto_is_the_fastest_that_fits(overrides: list[str], kind: Any) -> None:
    found = plan_of("7b", *overrides)
    given = {k: plan_of("7b", *overrides, f"model.gradient_checkpointing={str(k).lower()}") for k in CHECKPOINTING}
    assert found.fits and found.config.model.gradient_checkpointing == kind
    assert (found.timing, found.memory) == (given[kind].timing, given[kind].memory)
    assert all(step_s(found) <= 1.01 * step_s(plan) for plan in given.values() if plan.fits)
    assert found.checkpointing_s == step_s(given[kind]) - step_s(given[False])
    assert given[kind].checkpointing_s is given[kind].chosen_checkpointing is None
    assert replan(found, {"rollout.max_completion_tokens": 512}).config.model.gradient_checkpointing is False


def test_the_smallest_micro_batch_leaves_room_for_what_plans_do_not_know() -> None:
    settings = [AUTO, "optim.offload=true", "rollout.max_num_seqs=64", "rollout.max_completion_tokens=4096"]
    one = on_gpus(1, memory="80GB")
    assert plan_of("7b", *settings, "model.gradient_checkpointing=false", on=one).fits
    assert plan_of("7b", *settings, on=one).config.model.gradient_checkpointing == "selective"


def test_beside_offloading_nothing_is_recomputed_that_fits() -> None:
    offloading = plan_of("7b", AUTO, "model.activation_offload=true")
    assert offloading.config.model.gradient_checkpointing is False
    assert step_s(replan(offloading, {"model.gradient_checkpointing": "selective"})) < step_s(offloading)


def test_nothing_is_chosen_on_a_cpu() -> None:
    plan = plan_of("0.5b", on=local_cpu(1))
    assert plan.config.model.gradient_checkpointing is False and plan.chosen_checkpointing is None
    assert plan.configured.model.gradient_checkpointing is False


def test_a_run_chooses_what_its_plan_says_and_tells_it() -> None:
    settings = ["model.path=Qwen/Qwen2.5-7B", AUTO, "rollout.max_completion_tokens=10000", "rollout.engine=local"]
    about: dict[str, Any] = {"shared": False, "keeps_base": False}
    chosen, notes = choose_checkpointing_on(config(*settings), EIGHT, longest_prompt_tokens=512, **about)
    plan = plan_of("7b", *settings)
    assert chosen.model.gradient_checkpointing == plan.config.model.gradient_checkpointing == "selective"
    assert notes == [f"model.gradient_checkpointing: auto: {plan.chosen_checkpointing}"]
    assert "s more per step than without checkpointing" in notes[0]
    unknown, notes = choose_checkpointing_on(config("model.path=m"), EIGHT, longest_prompt_tokens=512, **about)
    assert unknown.model.gradient_checkpointing is False and "without a memory plan" in notes[0]
    on_cpu, notes = choose_checkpointing_on(config(*settings), local_cpu(1), longest_prompt_tokens=512, **about)
    assert on_cpu.model.gradient_checkpointing is False and notes == []


def test_a_resumed_run_chooses_again_if_what_it_began_with_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about: dict[str, Any] = {"shared": True, "keeps_base": False, "longest_prompt_tokens": 512}
    wanted = config("model.path=Qwen/Qwen2.5-7B", AUTO, "rollout.max_completion_tokens=8000", "rollout.engine=local")
    begun = with_checkpointing(wanted, False)
    fresh, said = choose_checkpointing_on(wanted, on_gpus(3, gpu="a100"), **about)
    assert fresh.model.gradient_checkpointing == "selective"
    monkeypatch.setattr(preflight, "recorded_config", lambda folder: begun)
    kept, notes = choose_checkpointing_on(wanted, on_gpus(8, gpu="a100"), **about)
    assert kept.model.gradient_checkpointing is False
    assert notes == ["model.gradient_checkpointing: auto: false, as when the run started"]
    again, notes = choose_checkpointing_on(wanted, on_gpus(3, gpu="a100"), **about)
    assert again == fresh
    assert notes == [f"{said[0]} (the run started with false, which does not fit here)"]
