"""`cohort.Trainer`: the run that `cohort.train` makes, step by step, from Python objects."""

import os
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort
from cohort.config import load_config
from cohort.config.user_code import load_callable
from cohort.data import read_rows
from cohort.display import Display
from cohort.errors import UserError
from commands import run_script
from runs import assert_same_weights, changed, make_inputs, metric, train
from selection import slow
from waiting import PATIENCE_S, until


def of_objects(files: dict[str, Any], run_dir: Path, **sections: Any) -> cohort.Trainer:
    """A trainer with the parts of a configuration as objects."""
    rest = {name: files[name] for name in ("rollout", "train", "run")}
    rest["run"] = {**rest["run"], "dir": str(run_dir)}
    return cohort.Trainer(
        sections.pop("model", files["model"]["path"]),
        {"path": read_rows(files["data"]["path"], field="data.path"), "prompt": "question"},
        [{**reward, "use": load_callable(reward["use"], field="use")} for reward in files["rewards"]],
        eval_data={**files["eval"], "path": read_rows(files["eval"]["path"], field="eval.path")},
        display=Display(),
        **{**rest, **sections},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(files: dict[str, Any]) -> cohort.RunResult:
    """The run of the files, without a stop."""
    return train(files)


def test_step_by_step_is_the_whole_run(tmp_path: Path, files: dict[str, Any], whole: cohort.RunResult):
    """Looking, sampling and evaluating between steps changes nothing."""
    trainer, seen = of_objects(files, tmp_path / "steps"), []
    trainer.callbacks.append(lambda report: seen.append(report.steps_done))
    for step in trainer:
        assert step.metrics["reward"] == metric(tmp_path / "steps", "reward")[-1]
        assert len(step.groups) == 3
        groups = trainer.generate(["1 2", [{"role": "user", "content": "3"}]], num_generations=2, temperature=0.5)
        assert [len(group.trajectories) for group in groups] == [2, 2]
        if step.steps_done == 3:
            break
    weight = next(trainer.model.parameters()).detach().clone()
    evaluated = trainer.evaluate()
    assert evaluated.accuracy == metric(tmp_path / "steps", "eval/accuracy")[-1]
    result = trainer.train()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert not torch.equal(weight, next(trainer.model.parameters()))
    assert_same_weights(result.final_dir, whole.final_dir)
    assert metric(result.run_dir, "reward") == metric(whole.run_dir, "reward")
    assert metric(result.run_dir, "eval/accuracy") == metric(whole.run_dir, "eval/accuracy")
    trainer.save(tmp_path / "saved")
    assert_same_weights(tmp_path / "saved", whole.final_dir)
    assert list(trainer) == [] and trainer.train() is result
    trainer.close()
    with pytest.raises(UserError, match="the run is finished; load its model from"):
        _ = trainer.model


def test_history(tmp_path: Path):
    files = make_inputs(tmp_path)
    trainer = of_objects(files, tmp_path / "run")
    assert len(trainer.history) == 0 and "no values" not in trainer.history._repr_html_()
    trainer.train()
    history = trainer.history
    assert isinstance(history, cohort.History) and len(history) == 6 and history[-1]["step"] == 6
    np.testing.assert_array_equal(history["reward"], metric(tmp_path / "run", "reward"))
    np.testing.assert_array_equal(history["eval/accuracy"], metric(tmp_path / "run", "eval/accuracy"))
    with pytest.raises(KeyError, match="'rewrad'; the metrics are num_groups, reward,"):
        history["rewrad"]
    assert history._repr_html_().count("<svg") == 5
    assert "reward: " in history.plot("reward")._repr_html_() and "to " in history.plot("reward")._repr_html_()
    history.plot("reward", "entropy").save(tmp_path / "curves.html")
    assert (tmp_path / "curves.html").read_text().count("<path d='M") == 2
    assert list(history.to_pandas().index) == [1, 2, 3, 4, 5, 6]
    trainer.close()


def test_a_trainer_that_is_closed_goes_on_in_the_next_one(
    tmp_path: Path, files: dict[str, Any], whole: cohort.RunResult
):
    """As a notebook whose kernel was started again: also between two checkpoints."""
    files = changed(files, run={"checkpoint_every": 4})
    with of_objects(files, tmp_path / "parts") as first:
        for step in first:
            if step.steps_done == 3:
                break
    with of_objects(files, tmp_path / "parts") as second:
        steps = [step.steps_done for step in second]
    assert steps == [4, 5, 6]
    assert_same_weights(tmp_path / "parts" / "final", whole.final_dir)
    with of_objects(files, tmp_path / "parts") as third:
        assert third.train().summary["steps"] == 6


@pytest.mark.usefixtures("in_foreground")
def test_an_interrupt_saves_and_the_same_trainer_goes_on(
    tmp_path: Path, files: dict[str, Any], whole: cohort.RunResult
):
    interrupts = iter([True])

    trainer = of_objects(files, tmp_path / "stopped")
    before = signal.getsignal(signal.SIGINT)

    class Interrupt(Display):
        def phase(self, name: str) -> None:
            if name == "pack" and trainer.history and len(trainer.history) == 3 and next(interrupts, False):
                os.kill(os.getpid(), signal.SIGINT)

    trainer._display = Interrupt()
    with pytest.raises(KeyboardInterrupt, match="stopped; "):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before, "handlers are given back"
    assert len(list((tmp_path / "stopped" / "checkpoints").glob("step-*"))) > 0
    assert [step.steps_done for step in trainer][-1] == 6
    assert_same_weights(tmp_path / "stopped" / "final", whole.final_dir)


@pytest.mark.usefixtures("in_foreground")
def test_an_interrupt_at_the_end_of_a_step_is_not_lost(tmp_path: Path):
    trainer = of_objects(changed(make_inputs(tmp_path), run={"checkpoint_every": 4}), tmp_path / "run")

    class Interrupt(Display):
        def step(self, report: cohort.StepReport) -> None:
            if report.steps_done == 2:
                os.kill(os.getpid(), signal.SIGINT)
                until(trainer._stop.requested)

    trainer._display = Interrupt()
    with pytest.raises(KeyboardInterrupt, match=r"stopped; .* from step-2"):
        trainer.train()
    trainer._display = Display()
    assert [step.steps_done for step in trainer] == [3, 4, 5, 6]


def test_an_error_in_the_loop_of_the_user_leaves_the_trainer_as_it_is(tmp_path: Path):
    trainer = of_objects(make_inputs(tmp_path), tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        for _ in trainer:
            _ = 1 / 0
    with pytest.raises(
        UserError, match=r"generate\.prompt='question': row 1: a prompt is text or a list of chat messages, not 3"
    ):
        trainer.generate([3])
    assert [step.steps_done for step in trainer] == [2, 3, 4, 5, 6]
    trainer.close()


def test_two_trainers_and_another_thread(tmp_path: Path, files: dict[str, Any], whole: cohort.RunResult):
    found: list[cohort.RunResult] = []
    for name in ("a", "b"):
        thread = threading.Thread(target=lambda name=name: found.append(of_objects(files, tmp_path / name).train()))
        thread.start()
        thread.join(PATIENCE_S)
    for result in found:
        assert_same_weights(result.final_dir, whole.final_dir)
    assert len(found) == 2


def test_settings(tmp_path: Path):
    files = make_inputs(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(files["model"]["path"])
    trainer = cohort.Trainer(
        Path(files["model"]["path"]),
        files["data"]["path"],
        ["math"],
        tokenizer=tokenizer,
        algorithm="dapo",
        train=cohort.Trainer("m", "d", ["math"]).config.train,
    )
    assert trainer.config.algorithm.name == "dapo" and trainer.config.rewards[0].use == "math"
    assert trainer.config.hardware.processes == 1
    with pytest.raises(UserError, match="save_config: tokenizer: exists in this process only"):
        trainer.save_config(tmp_path / "run.yaml")
    named = cohort.Trainer(files["model"]["path"], files["data"]["path"], ["math"], rollout={"num_generations": 4})
    named.save_config(tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == named.config
    with pytest.raises(UserError, match=r"save_config: rewards.0.use \(object:<lambda>\): exists in this process only"):
        cohort.Trainer("m", "d", [lambda completions: completions]).save_config(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="eval_data: missing"):
        named.evaluate()
    with pytest.raises(UserError, match=r"hardware\.processes: 2: Trainer runs in this process"):
        cohort.Trainer("m", "d", ["math"], hardware={"processes": 2})
    with pytest.raises(UserError, match="trian: unknown key; did you mean train"):
        cohort.Trainer("m", "d", ["math"], trian={"steps": 1})


def test_a_model_object(tmp_path: Path, files: dict[str, Any], whole: cohort.RunResult):
    """Trains as its folder does; other weights do not go on with the run."""
    model = AutoModelForCausalLM.from_pretrained(files["model"]["path"], dtype=torch.float32)
    trainer = of_objects(files, tmp_path / "object", model=model)
    assert_same_weights(trainer.train().final_dir, whole.final_dir)
    named = cohort.Trainer(model, files["data"]["path"], ["math"], run={"dir": str(tmp_path / "named")})
    named.save_config(tmp_path / "named.yaml")
    saved = load_config(tmp_path / "named.yaml").model
    assert_same_weights(Path(saved.path), Path(files["model"]["path"]))
    model.get_input_embeddings().weight.data.mul_(2)
    with pytest.raises(UserError, match=r"model\.path"):
        of_objects(files, tmp_path / "object", model=model).train()
    model.config._name_or_path = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"tokenizer: missing; the model's origin .*nowhere' has none"):
        cohort.Trainer(model, "d", ["math"])


def test_a_peft_model(tmp_path: Path):
    files = changed(make_inputs(tmp_path), train={"learning_rate": 1e-2})
    base = AutoModelForCausalLM.from_pretrained(files["model"]["path"], dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    whole = train(changed(files, model={"adapter": {"path": str(tmp_path / "adapter")}}))
    result = of_objects(files, tmp_path / "object", model=model).train()
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (result.final_dir, whole.final_dir))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


SCRIPT = """
import sys

import cohort

print("begins", file=sys.stderr)

def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in completion) / 16 for completion in completions]

trainer = cohort.Trainer(
    MODEL,
    [{"prompt": f"{n} 1"} for n in range(8)],
    [{"use": digits, "isolate": True}],
    rollout={"num_generations": 4, "max_completion_tokens": 8},
    train={"steps": 2, "prompts_per_step": 3},
    run={"dir": RUN},
    hardware={"device": "cpu"},
    callbacks=[lambda step: print("called", step.steps_done)],
)
trainer.train()
print("ends", file=sys.stderr)
"""


@slow("scripts of other tests, and rewards in child processes")
@pytest.mark.parametrize("processes", [1, 3])
def test_a_script_without_a_main_guard(tmp_path: Path, processes: int):
    """The child process that has the reward imports the script, and does not train; so does each rank of torchrun."""
    files = make_inputs(tmp_path)
    run = tmp_path / "run"
    model = repr(files["model"]["path"])
    if processes > 1:
        model = f"__import__('transformers').AutoModelForCausalLM.from_pretrained({model})"
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("MODEL", model).replace("RUN", repr(str(run))))
    done = run_script(tmp_path / "script.py", processes=processes)
    assert done.stderr.count("ends") == processes
    assert [line for line in done.stdout.splitlines() if line.startswith("called")] == ["called 1", "called 2"]
    assert metric(run, "processes") == [processes, processes] and len(metric(run, "rewards/digits/mean")) == 2


ON_EVERY_RANK = """
import os

import cohort

rank = os.environ["RANK"]


def digits(completions, **kwargs):
    if FAILS:
        raise ValueError("no reward today")
    return [sum(c.isdigit() for c in completion) / 8 for completion in completions]


def make(folder):
    return cohort.Trainer(
        MODEL,
        ROWS,
        [digits],
        eval_data=ROWS[:2],
        rollout={"num_generations": 2, "max_completion_tokens": 4},
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-2},
        run={"dir": folder, "view": False},
    )


trainer = make("one")
for step in trainer:
    if step.steps_done == 2:
        break
(group,) = trainer.generate(["1 2"], num_generations=2)
values = step.metrics["reward"], trainer.evaluate().accuracy, trainer.evaluate(ROWS[:1]).accuracy, group.prompt.id
print(f"said {rank} {len(step.groups)} {values}\\n", end="", flush=True)
if rank == "0":
    trainer.save("by-rank-0")
assert trainer.train().final_dir.exists() and trainer.tokenizer is not None
make("two").train()
"""


@slow(
    "test_step_by_step_is_the_whole_run has one process, and tests/from_trl/test_trl_torchrun.py this with TRL's names"
)
@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_makes_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool):
    """Groups are rank 0's; what it calls alone, the others serve until they end. A failure ends all."""
    files = make_inputs(tmp_path)
    rows = [{"prompt": f"{n} 1"} for n in range(4)]
    text = ON_EVERY_RANK.replace("MODEL", repr(files["model"]["path"])).replace("ROWS", repr(rows))
    (tmp_path / "script.py").write_text(text.replace("FAILS", str(fails)))
    monkeypatch.chdir(tmp_path)
    if fails:
        with pytest.raises(AssertionError, match="no reward today"):
            run_script(tmp_path / "script.py", processes=2)
        return
    lines = run_script(tmp_path / "script.py", processes=2).stdout.splitlines()
    first, second = sorted(line.split(maxsplit=3)[1:] for line in lines if line.startswith("said"))
    assert first[:2] == ["0", "2"] and second[:2] == ["1", "0"] and first[2] == second[2]
    assert load_file(tmp_path / "by-rank-0" / "model.safetensors").keys()
    assert_same_weights(tmp_path / "one" / "final", tmp_path / "two" / "final")
