"""Parts of `cohort.Trainer` that only exist in this process: an engine, a loss, an advantage, an environment."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cohort
from cohort.config import load_config
from cohort.display import Display
from cohort.errors import TrainingError, UserError
from cohort.packing.batch import LossInputs
from cohort.records import IntArray
from cohort.rollout import CallKey, SamplingParams
from cohort.rollout.engines.local.sampler import sample_tokens, uniform_stream
from playing import save_turns_model
from runs import changed, make_inputs, metric, train, weights

END = 1


class Naive:
    """Samples with the trained model, by a whole forward pass for every token, from the streams of the local engine."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.closed = False

    def update_weights(self, model: torch.nn.Module, *, policy_version: int) -> None:
        self.model = model
        self.versions.append(policy_version)

    async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> cohort.ModelCall:
        ids, logprobs = token_ids.tolist(), []
        self.model.eval()
        for u in uniform_stream(key, sampling.max_completion_tokens):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1].float()
            uniform = torch.tensor([u], dtype=torch.float64)
            token, logprob = sample_tokens(logits, uniform, temperature=sampling.temperature)
            ids.append(token.item())
            logprobs.append(logprob.item())
            if ids[-1] == END:
                break
        return cohort.ModelCall(
            context_ids=token_ids,
            token_ids=ids[len(token_ids) :],  # type: ignore[arg-type]
            sampling_logprobs=logprobs,  # type: ignore[arg-type]
            finish_reason="stop" if ids[-1] == END else "length",
            policy_version=self.versions[-1],
        )

    def close(self) -> None:
        self.closed = True


def trainer_of(files: dict[str, Any], run_dir: Path, **parts: Any) -> cohort.Trainer:
    sections = {name: files[name] for name in ("data", "rollout", "train", "eval")}
    run = {**files["run"], "dir": str(run_dir)}
    return cohort.Trainer(
        files["model"]["path"], rewards=files["rewards"], run=run, display=Display(), **{**sections, **parts}
    )


def test_an_engine_that_samples_as_the_local_one_trains_as_it_does(tmp_path: Path):
    files = changed(make_inputs(tmp_path), train={"steps": 4})
    whole, engine = train(files), Naive()
    with trainer_of(files, tmp_path / "object", engine=engine) as trainer:
        for step in trainer:
            if step.steps_done == 2:
                break
        (group,) = trainer.generate(["1 2"], num_generations=2)
        assert len(group.trajectories) == 2 and trainer.evaluate().accuracy >= 0
        result = trainer.train()
    assert engine.versions == [0, 1, 2, 3, 4] and engine.closed
    assert metric(result.run_dir, "reward") == pytest.approx(metric(whole.run_dir, "reward"), abs=1e-9)
    assert metric(result.run_dir, "eval/accuracy") == metric(whole.run_dir, "eval/accuracy")
    assert max(metric(result.run_dir, "sampling/sampling_logp_difference/max")) < 1e-4
    assert metric(result.run_dir, "sampling/importance_weight/mean") == pytest.approx([1] * 4, abs=1e-4)
    ours, theirs = weights(result.final_dir), weights(whole.final_dir)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-3)


def test_a_run_with_an_engine_goes_on_with_one(tmp_path: Path):
    files = changed(make_inputs(tmp_path), train={"steps": 2}, run={"checkpoint_every": 1})
    with trainer_of(files, tmp_path / "run", engine=Naive()) as first:
        next(iter(first))
    saved = load_config(tmp_path / "run" / "config.yaml")
    with pytest.raises(
        UserError, match=r"rollout\.engine: object stands for an object that a script gives as cohort\."
    ):
        cohort.train(saved, display=Display())
    with pytest.raises(UserError, match=r"rollout\.engine"):
        trainer_of(files, tmp_path / "run").train()
    second = Naive()
    assert [step.steps_done for step in trainer_of(files, tmp_path / "run", engine=second)] == [2]
    assert second.versions == [1, 2]


CALL: dict[str, Any] = {"token_ids": [3, END], "sampling_logprobs": [-1.0, -0.5], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"token_ids": []}, r"returned token_ids \[\]; must be 1 to 12 token ids"),
        ({"token_ids": [3] * 13}, "returned token_ids .*; must be 1 to 12 token ids"),
        ({"token_ids": [3.5, 1.0]}, "returned token_ids .*; must be 1 to 12 token ids"),
        ({"token_ids": [3, 10**6]}, "returned token ids from 3 to 1000000; must be below"),
        (
            {"sampling_logprobs": [-1.0]},
            "returned sampling_logprobs .*; must be one finite number of at most 0 per tok",
        ),
        ({"sampling_logprobs": [-1.0, 0.5]}, "returned sampling_logprobs"),
        ({"sampling_logprobs": [-1.0, float("nan")]}, "returned sampling_logprobs"),
        ({"finish_reason": "eos"}, "returned finish_reason 'eos'; must be 'stop' or 'length'"),
        (
            {"policy_version": 7},
            "returned policy_version 7; must be that of weights it was given, the last of which had 0",
        ),
        (
            {"context_ids": np.array([2])},
            "returned another context; context_ids must be the token_ids that it was given",
        ),
        (None, "returned a NoneType; must be a cohort.ModelCall"),
    ],
)
def test_answers_are_checked(tmp_path: Path, answer: dict[str, Any] | None, message: str):
    class Fixed:
        async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> Any:
            call = {"context_ids": token_ids, "policy_version": 0, **CALL}
            return None if answer is None else cohort.ModelCall(**{**call, **answer})

    with pytest.raises(UserError, match=f"engine: Fixed.generate {message}"):
        trainer_of(
            changed(make_inputs(tmp_path), eval={"before_training": False}), tmp_path / "run", engine=Fixed()
        ).train()


def test_an_engine_that_raises_is_named(tmp_path: Path):
    class Broken:
        async def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> cohort.ModelCall:
            raise ConnectionError("no route")

        def update_weights(self, model: Any, *, policy_version: int) -> None:
            if fails_early:
                raise ValueError("too large")

    for fails_early, message in (  # noqa: B007
        (False, r"Broken\.generate raised ConnectionError: no route \(at .*test_given_objects\.py"),
        (True, r"Broken\.update_weights raised ValueError: too large \(at .*test_given_objects\.py"),
    ):
        with pytest.raises(TrainingError, match=f"engine: {message}"):
            trainer_of(make_inputs(tmp_path), tmp_path / "run", engine=Broken()).train()


def test_what_is_no_engine(tmp_path: Path):
    class Blocking:
        def generate(self, token_ids: IntArray, sampling: SamplingParams, key: CallKey) -> None: ...

    for engine, message in (
        (Naive, r"engine: Naive is a class; give an instance, such as Naive\(\)"),
        (Blocking(), r"engine: Blocking needs a method `async def generate\(self, token_ids, sampling, key\)`, which"),
        ("vllm", r"engine: str needs .*; for a built-in engine use rollout={'engine': 'vllm'}"),
    ):
        with pytest.raises(UserError, match=message):
            cohort.Trainer("m", "d", ["math"], engine=engine)
    with pytest.raises(UserError, match=r"set either engine= or rollout\.engine, not both"):
        cohort.Trainer("m", "d", ["math"], engine=Naive(), rollout={"engine": "local"})
    with pytest.raises(UserError, match=r"save_config: engine \(Naive\): exists in this process only"):
        cohort.Trainer("m", "d", ["math"], engine=Naive()).save_config(tmp_path / "run.yaml")


class Centered:
    """An advantage with a state."""

    def __init__(self, scale: float):
        self.scale, self.calls = scale, 0

    def __call__(self, x: Any) -> torch.Tensor:
        self.calls += 1
        return self.scale * (x.rewards - x.rewards.nanmean(dim=1, keepdim=True))


class Ratio(torch.nn.Module):
    """A loss."""

    def forward(self, x: LossInputs) -> torch.Tensor:
        return -(x.logprobs - x.old_logprobs).exp() * x.advantages


def test_an_algorithm_of_objects(tmp_path: Path):
    """It is the built-in one of the same formulas, and so are its weights."""
    files = changed(make_inputs(tmp_path), train={"steps": 3})
    same = {"advantage": "group_mean", "policy_loss": "clipped", "loss_weight": "sequence_sum"}
    whole = train({**files, "algorithm": same})
    advantage = Centered(2.0)
    algorithm = {
        "advantage": advantage,
        "policy_loss": Ratio(),
        "loss_weight": lambda lengths_N, included_N: 0.5 * included_N / max(1, included_N.sum()),
    }
    trainer = trainer_of(files, tmp_path / "objects", algorithm=algorithm)
    result = trainer.train()
    assert advantage.calls > 3
    ours, theirs = weights(result.final_dir), weights(whole.final_dir)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-4)
    message = (
        r"save_config: algorithm\.advantage\.use \(object:Centered\), algorithm\.policy_loss\.use \(object:Ratio\), "
        r"algorithm\.loss_weight\.use \(object:<lambda>\): exists in this process only"
    )
    with pytest.raises(UserError, match=message):
        trainer.save_config(tmp_path / "run.yaml")


def test_an_environment_of_objects(tmp_path: Path):
    """A factory, as with arguments that no file can say, and a program that closes over what it counts."""
    save_turns_model(tmp_path / "base")
    made, played = [], []

    class Say:
        def __init__(self, word: Any):
            self.word = word
            made.append(word)

        def reset(self) -> str:
            return str(self.word)

        def get_reward(self) -> float:
            return float(len(made))

    async def program(row: dict[str, Any], model: Any) -> float:
        turn = await model.chat("hello")
        played.append(turn)
        return float(len(turn.content))

    for name, environment, seen in (("factory", partial(Say, Path("hello")), made), ("program", program, played)):
        trainer = cohort.Trainer(
            str(tmp_path / "base"),
            environment=environment,
            rollout={"num_generations": 4, "max_prompt_tokens": 64, "max_completion_tokens": 6},
            train={"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3},
            run={"dir": str(tmp_path / name), "checkpoint_every": 0},
            display=Display(),
        )
        assert len(metric(trainer.train().run_dir, "reward")) == 2
        assert len(seen) >= 8  # at once; the class is made anew only where its instances are in use
        with pytest.raises(UserError, match=r"save_config: rollout\.environment\.use \(object:(partial|program)\)"):
            trainer.save_config(tmp_path / "run.yaml")
    for given in (Say("hello"), {"say": Say("hello")}):
        with pytest.raises(UserError, match="an instance of Say plays one trajectory; give Say, or a function that"):
            cohort.Trainer("m", environment=given, train={"steps": 1})
