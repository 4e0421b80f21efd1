"""PPO's critic: advantages and returns, values and their gradients under laws 1 and 2, and whole runs."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cohort
from cohort.algorithms import AdvantageInputs, assign_advantages, build_algorithm, value_metrics, with_returns
from cohort.algorithms.advantages import gae
from cohort.algorithms.critic import clipped_value, gae_returns
from cohort.batch import ValueInputs
from cohort.config import AdamwConfig, AlgorithmConfig, ModelConfig, TrainConfig, config_from_dict
from cohort.demo.run import demo_config, write_data
from cohort.display import Display
from cohort.distributed import ALONE
from cohort.engine import CriticEngine, find_budget
from cohort.errors import UserError
from cohort.policy import Critic, load_critic
from cohort.policy.layout import Layout
from cohort.records import Estimates, TrainSequence
from cohort.trainer.crew import Crew
from rank_critic import PLACES, STEPS, critic_gradient, critic_sequences, make_crew, run_critic_steps
from rank_engine import out_of_memory_over
from ranks import run_ranks
from test_flops import make_moe
from test_laws import random_groups
from test_training import assert_same_weights, changed, make_inputs, metric, stop_after, train, weights
from tiny import gradients, make_model, make_tokenizer, pack_for, relative_error, save_model_folder

PPO = build_algorithm(AlgorithmConfig(name="ppo"), max_completion_tokens=32)
assert PPO.critic is not None
CPU = torch.device("cpu")


def inputs(rewards: Sequence[float], values: Sequence[Sequence[float]]) -> AdvantageInputs:
    """Completions of one prompt, each with its reward at the last of its tokens."""
    lengths = torch.tensor([[len(v) for v in values]])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(v, dtype=torch.float64) for v in values], batch_first=True)
    rewards_PG = torch.tensor([rewards], dtype=torch.float64)
    tokens = torch.zeros_like(padded).unsqueeze(0)
    for g, reward in enumerate(rewards):
        tokens[0, g, len(values[g]) - 1] = 0.0 if np.isnan(reward) else reward
    return AdvantageInputs(
        rewards=rewards_PG,
        reward_parts=rewards_PG.unsqueeze(-1),
        reward_weights=torch.ones(1, dtype=torch.float64),
        token_rewards=tokens,
        lengths=lengths,
        values=padded.unsqueeze(0),
    )


def test_advantages_by_hand():
    x = inputs([1.0, 0.0], [[0.2, 0.4, 0.6], [0.5]])
    # lambda 1: the reward less the value; gamma 1
    expected = torch.tensor([[[0.8, 0.6, 0.4], [-0.5, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gae(x, gamma=1.0, gae_lambda=1.0, whiten_advantages=False), expected)
    # lambda 0: deltas 0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 1 - 0.6
    expected = torch.tensor([[[0.16, 0.14, 0.4], [-0.5, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gae(x, gamma=0.9, gae_lambda=0.0, whiten_advantages=False), expected)
    # gamma 0.9, lambda 0.5: 0.14 + 0.45 * 0.4 = 0.32, 0.16 + 0.45 * 0.32 = 0.304
    expected = torch.tensor([[[0.304, 0.32, 0.4], [-0.5, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gae(x, gamma=0.9, gae_lambda=0.5, whiten_advantages=False), expected)
    # returns are the advantages plus the values
    expected = torch.tensor([[[0.504, 0.72, 1.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gae_returns(x, gamma=0.9, gae_lambda=0.5), expected)


def test_whitening_by_hand():
    """Over the judged tokens 0.8, 0.6, 0.4, -0.2: mean 0.4, squares 0.56 over 3. The middle one is not judged."""
    x = inputs([1.0, np.nan, 0.0], [[0.2, 0.4, 0.6], [9.0, 9.0], [0.2]])
    actual = gae(x, gamma=1.0, gae_lambda=1.0, whiten_advantages=True)
    expected = torch.tensor([[0.4, 0.2, 0.0], [0.0, 0.0, 0.0], [-0.6, 0.0, 0.0]]) / (0.56 / 3) ** 0.5
    torch.testing.assert_close(actual[0], expected.double(), rtol=1e-6, atol=1e-9)
    equal = inputs([0.1] * 3, [[0.0] * 7] * 3)  # nothing to choose between: rounding must not be blown up
    assert not gae(equal, gamma=1.0, gae_lambda=1.0, whiten_advantages=True).any()
    nothing = inputs([np.nan], [[1.0]])
    assert not gae(nothing, gamma=1.0, gae_lambda=1.0, whiten_advantages=True).any()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gamma=st.floats(0.1, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_advantages_are_those_of_the_definition(lengths: list[int], gamma: float, gae_lambda: float, seed: int):
    """The sum over all later differences of each completion by itself, with rewards at every token."""
    rng = np.random.default_rng(seed)
    x = inputs(rng.normal(size=len(lengths)).tolist(), [rng.normal(size=n).tolist() for n in lengths])
    within = x.token_mask
    x = replace(x, token_rewards=torch.from_numpy(rng.normal(size=within.shape)) * within)
    actual = gae(x, gamma=gamma, gae_lambda=gae_lambda, whiten_advantages=False)[0]
    assert x.values is not None
    for g, n in enumerate(lengths):
        rewards, values = x.token_rewards[0, g].tolist(), [*x.values[0, g, :n].tolist(), 0.0]
        for t in range(n):
            deltas = [rewards[k] + gamma * values[k + 1] - values[k] for k in range(t, n)]
            expected = sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas))
            assert actual[g, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert not actual[g, n:].any()


def test_the_loss_of_values_by_hand():
    values = torch.tensor([0.5, 0.9, 0.9, -0.5], requires_grad=True)
    x = ValueInputs(values=values, old_values=torch.full((4,), 0.5), returns=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    out = clipped_value(x, value_clip=0.2)
    # errors 0.5, 0.1 and of the bounded value 0.3, 0.9 and 0.7, 1.5 and 0.7
    torch.testing.assert_close(out.per_token_loss, 0.5 * torch.tensor([0.25, 0.09, 0.81, 2.25]))
    assert out.token_metrics["value/clip_ratio"].tolist() == [0, 1, 0, 0]
    out.per_token_loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.5, 0.0, 0.9, -1.5]))  # no gain from moving on


def test_what_the_critic_learns_from():
    """Judged completions, and not the truncated ones where those are masked; the mean over all of their tokens."""
    groups = random_groups([[3], [5], [2], [4]], seed=0)
    reasons = ("stop", "length", "stop", "stop")
    groups = [
        replace(
            group,
            completions=(replace(group.completions[0], finish_reason=reason),),
            rewards=np.array([np.nan if n == 2 else 1.0]),
        )
        for n, (group, reason) in enumerate(zip(groups, reasons, strict=True))
    ]
    values = {n: np.full(len(group.completions[0].token_ids), 0.25) for n, group in enumerate(groups)}
    for masked, kept in ((False, [0, 1, 3]), (True, [0, 3])):
        config = AlgorithmConfig(name="ppo", mask_truncated_completions=masked)
        algorithm = build_algorithm(config, max_completion_tokens=16)
        sequences = assign_advantages(groups, algorithm, Estimates(values=values))
        learned = with_returns(sequences)
        assert [s.index for s in learned] == kept
        total = sum(s.num_completion_tokens for s in learned)
        assert all((s.loss_weights == 1 / total).all() and (s.returns == 1.0).all() for s in learned)
        metrics = value_metrics(sequences, values)
        assert metrics == {"value/mean": 0.25}  # returns that do not vary explain nothing
    assert with_returns([replace(s, returns=np.zeros(0)) for s in sequences]) == []
    assert value_metrics([replace(s, returns=np.zeros(0)) for s in sequences], {}) == {}


def test_explained_variance_by_hand():
    sequences = with_returns(critic_sequences([[2]], seed=0))
    returns = [replace(sequences[0], returns=np.array([0.0, 2.0]))]
    assert value_metrics(returns, {0: np.array([0.0, 2.0])})["value/explained_variance"] == 1
    assert value_metrics(returns, {0: np.array([5.0, 5.0])})["value/explained_variance"] == 0
    # errors -1, 1 are of variance 1, as returns are: what is said is worth as much as nothing
    assert value_metrics(returns, {0: np.array([1.0, 1.0])})["value/explained_variance"] == 0
    assert value_metrics(returns, {0: np.array([2.0, 0.0])})["value/explained_variance"] == -3


def test_one_completion_needs_a_critic_and_only_then_is_there_one(tmp_path: Path):
    config = make_inputs(tmp_path)
    one = changed(config, rollout={"num_generations": 1})
    with pytest.raises(UserError, match=r"num_generations: 1 .*group_mean_std.* reinforce_pp or reinforce or ppo"):
        config_from_dict(one)
    config_from_dict({**one, "algorithm": {"name": "ppo"}})
    with pytest.raises(UserError, match=r"critic has no effect with algorithm.name: grpo.*ppo"):
        config_from_dict({**config, "critic": {"learning_rate": 0.1}})
    with pytest.raises(UserError, match=r"gae_lambda.*has no effect.*gae"):
        config_from_dict({**config, "algorithm": {"gae_lambda": 0.9}})
    with pytest.raises(UserError, match=r"rollout.resample: 2 .*group of one"):
        config_from_dict(changed({**one, "algorithm": {"name": "ppo"}}, rollout={"num_generations": 1, "resample": 2}))
    with pytest.raises(UserError, match=r"critic.warmup_steps: 6 of train.steps: 6.*at most 5"):
        config_from_dict({**config, "algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 6}})


def make_critic(kind: str = "llama", *, dtype: torch.dtype = torch.float64, **overrides: Any) -> Critic:
    """A critic whose values are not all 0."""
    model = make_model(kind, dtype=dtype, **overrides)
    Critic.adapt(model)
    torch.manual_seed(5)
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    return Critic(model, device=CPU, compute_dtype=dtype, pad_token_id=0)


def naive_values(critic: Critic, sequence: TrainSequence) -> Tensor:
    """One unpadded row through the body: what it makes of the future before each token of the completion."""
    ids = torch.from_numpy(sequence.token_ids).unsqueeze(0)
    hidden = critic.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return critic.model.value_head(hidden)[sequence.num_prompt_tokens - 1 : -1, 0]


def engine_of(critic: Critic, *, optim: AdamwConfig | None = None, **train_keys: Any) -> CriticEngine:
    config = TrainConfig(**train_keys)
    return CriticEngine(
        critic,
        config,
        optim,
        micro_batch_tokens=10_000,
        learning_rate=lambda _: config.learning_rate,
        temperature=1.0,
        reference=None,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_values_and_gradients_are_the_naive_ones(kind: str, layout: Layout):
    """Laws 1 and 2 for the critic: any budget, streams too, against one unpadded forward per completion."""
    critic = make_critic(kind)
    assert critic.layout == "shared"
    sequences = critic_sequences([[3, 14, 9], [1, 6, 2], [8, 1, 30]], seed=1)
    assert PPO.critic is not None
    expected_loss, old = torch.zeros((), dtype=torch.float64), {}
    for s in sequences:
        values = naive_values(critic, s)
        old[s.index] = values.detach() + 0.3 * torch.randn(len(values), dtype=torch.float64)
        loss = PPO.critic.loss(
            ValueInputs(values=values, old_values=old[s.index], returns=torch.from_numpy(s.returns))
        ).per_token_loss
        expected_loss = expected_loss + (torch.from_numpy(s.loss_weights) * loss).sum()
    expected_loss.backward()
    expected = gradients(critic.model)
    assert set(expected) == {name for name, _ in critic.model.named_parameters()}
    engine = engine_of(critic)
    critic.traits = replace(critic.traits, layout=layout)
    for budget in (1, 20, 60, 10_000):
        (batch,) = pack_for(critic, sequences, budget)
        result = engine.forward_backward(batch, PPO.critic.loss, old_logprobs=old)
        assert result.metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-6)
        actual = gradients(critic.model)
        assert max(relative_error(actual[k], expected[k]) for k in expected) < 1e-6
    estimated = engine.estimate(sequences, {"values"})["values"]
    for s in sequences:
        torch.testing.assert_close(estimated[s.index], naive_values(critic, s).detach(), rtol=1e-5, atol=1e-6)


def test_old_values_are_those_of_the_first_pass():
    critic = make_critic(dtype=torch.float32)
    engine = engine_of(critic, learning_rate=0.01)
    assert PPO.critic is not None
    sequences = critic_sequences([[3, 14, 9]], seed=0)
    before = engine.estimate(sequences, {"values"})["values"]
    clipped = []
    for update in range(6):
        (batch,) = pack_for(critic, sequences, 30)
        clipped.append(engine.forward_backward(None if update else batch, PPO.critic.loss).metrics["value/clip_ratio"])
        engine.optim_step()
    for n, values in before.items():
        torch.testing.assert_close(engine.old_outputs[n], values)
    assert clipped[0] == 0 and max(clipped) > 0  # they have moved away from the old ones


def test_a_learning_rate_of_0_leaves_weights_and_moments_alone():
    engines = [engine_of(make_critic(dtype=torch.float32), optim=AdamwConfig(weight_decay=0.1)) for _ in range(2)]
    assert PPO.critic is not None
    (batch,) = pack_for(engines[0].policy, critic_sequences([[3, 14, 9]], seed=0), 100)
    engines[0]._learning_rate = lambda done: 0.0 if done == 0 else 1e-2
    engines[1]._learning_rate = lambda done: 1e-2
    start = copy.deepcopy(engines[0].policy.model.state_dict())
    engines[0].forward_backward(batch, PPO.critic.loss)
    engines[0].optim_step()
    assert all(torch.equal(v, start[k]) for k, v in engines[0].policy.model.state_dict().items())
    for engine in engines:
        engine.forward_backward(batch, PPO.critic.loss)
        engine.optim_step()
    after = engines[1].policy.model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in engines[0].policy.model.state_dict().items())
    assert any(not torch.equal(after[k], start[k]) for k in start)


@pytest.mark.parametrize("kind", ["tied", "untied", "converted"])
def test_a_critic_begins_at_0_and_comes_back_as_it_was_saved(tmp_path: Path, kind: str):
    """Of a tied and an untied model, and of one whose weights the library renames when it loads them."""
    folder = tmp_path / "model"
    if kind == "converted":
        make_moe().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    else:
        save_model_folder(folder, tie=kind == "tied")
    tokenizer = make_tokenizer()
    critic = load_critic(ModelConfig(path=str(folder)), device=CPU, tokenizer=tokenizer)
    names = {name for name, _ in critic.model.named_parameters()}
    assert not any("lm_head" in name for name in names) and {"value_head.weight", "value_head.bias"} < names
    engine = engine_of(critic, learning_rate=0.01)
    sequences = critic_sequences([[3, 14], [1, 6]], seed=1)
    assert not any(v.any() for v in engine.estimate(sequences, {"values"})["values"].values())
    assert PPO.critic is not None
    for _ in range(2):  # in the first the head alone has a gradient
        (batch,) = pack_for(critic, sequences, 100)
        engine.forward_backward(batch, PPO.critic.loss)
        engine.optim_step()
    learned = engine.estimate(sequences, {"values"})["values"]
    assert all(v.all() for v in learned.values())
    critic.model.save_pretrained(tmp_path / "critic")
    again = load_critic(ModelConfig(path=str(tmp_path / "critic")), device=CPU, tokenizer=tokenizer)
    values = engine_of(again).estimate(sequences, {"values"})["values"]
    assert all(torch.equal(values[n], learned[n]) for n in learned)


def test_the_budget_leaves_room_for_the_other_models_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What both need and do not have yet is there while one of them is tried; one budget is found for both."""
    crew = make_crew(str(save_model_folder(tmp_path / "m")), ALONE)
    assert crew.critic is not None
    asked: list[tuple[str, int]] = []
    for engine in (crew.engine, crew.critic):
        fits = type(engine).fits

        def told(self: Any, sequences: Any, loss: Any, *, reserved_bytes: int = 0, fits: Any = fits) -> bool:
            asked.append((type(self.policy).__name__, reserved_bytes))
            return fits(self, sequences, loss, reserved_bytes=reserved_bytes)

        monkeypatch.setattr(engine, "fits", told.__get__(engine))
    with out_of_memory_over(200, "backward mlp 1", crew.critic):
        found = crew.find_budget(40, 2000)
    assert 0.9 * 200 / 1.1 <= found <= 200
    assert crew.engine.micro_batch_tokens == crew.critic.micro_batch_tokens == found
    rooms = {("Policy", crew.critic.num_state_bytes), ("Critic", crew.engine.num_state_bytes)}
    assert rooms <= set(asked) <= rooms | {("Policy", 0), ("Critic", 0)}  # 0 where what is kept is measured
    assert all(p.grad is None for e in (crew.engine, crew.critic) for p in e.policy.model.parameters())
    assert find_budget(crew.critic, crew.algorithm.critic.loss, longest_sequence_tokens=40, most_tokens=2000) == 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkpoint of three ranks."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, model: str, root: Path) -> list[dict[str, Any]]:
    """What three ranks made of each job."""
    jobs = (("critic_gradients", model), ("critic_steps", model, str(root)))
    return run_ranks(3, tmp_path_factory.mktemp("ranks"), *jobs)


def test_the_gradient_over_three_ranks_is_that_of_one(three: list[dict[str, Any]], model: str):
    """Any budget, streams, ranks with nothing to do, and one that runs out of memory at every place."""
    crew = make_crew(model, ALONE)
    for step, lengths in STEPS.items():
        sequences = critic_sequences(*lengths, seed=3)
        result, expected = critic_gradient(crew, sequences, 10_000)
        for budget in (20, 10_000):
            loss, actual = three[0][f"{step}/{budget}"]
            assert loss == pytest.approx(result.metrics["loss"], rel=1e-6)
            assert max(relative_error(actual[k], expected[k]) for k in expected) < 1e-6, (step, budget)
    _, expected = critic_gradient(crew, critic_sequences(*STEPS["uneven"], seed=3), 10_000)
    for place in PLACES:
        num_out_of_memory, actual = three[0][f"memory/{place}"]
        assert num_out_of_memory >= 1, place
        assert max(relative_error(actual[k], expected[k]) for k in expected) < 1e-6, place


def test_updates_over_three_ranks_are_those_of_one(three: list[dict[str, Any]], model: str, tmp_path: Path):
    one = run_critic_steps(ALONE, model, str(tmp_path))
    for (critic, loss), (expected_critic, expected_loss) in zip(three[1]["metrics"], one["metrics"], strict=True):
        assert critic == pytest.approx(expected_critic, rel=1e-6)
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-9)
    for part in ("policy", "critic"):
        assert three[1][part].keys() == one[part].keys()
        assert max(relative_error(three[1][part][k], one[part][k]) for k in one[part]) < 1e-6
    assert one["metrics"][0][0].keys() == {"value_loss", "value/clip_ratio", "value/grad_norm", "value/learning_rate"}


def test_a_checkpoint_of_three_ranks_goes_on_with_one(three: list[dict[str, Any]], model: str, root: Path):
    """Policy, critic and both optimizers."""
    resumed = run_critic_steps(ALONE, model, str(root), "resume")
    (metrics, loss), (expected, expected_loss) = resumed["metrics"][0], three[1]["metrics"][2]
    assert metrics == pytest.approx(expected, rel=1e-6) and loss == pytest.approx(expected_loss, rel=1e-6)
    for part in ("policy", "critic"):
        assert max(relative_error(resumed[part][k], weight) for k, weight in three[1][part].items()) < 1e-6


def ppo_inputs(folder: Path, **critic: Any) -> dict[str, Any]:
    """Six quick steps with one completion per prompt."""
    config = changed(make_inputs(folder), rollout={"num_generations": 1}, train={"prompts_per_step": 8})
    return {**config, "algorithm": {"name": "ppo"}, "critic": {"learning_rate": 1e-2, **critic}}


def test_a_run_with_a_critic_and_what_it_leaves_behind(tmp_path: Path):
    result = train(ppo_inputs(tmp_path, warmup_steps=2))
    run = result.run_dir
    names = ("value_loss", "value/mean", "value/explained_variance", "value/clip_ratio", "value/grad_norm")
    assert all(len(metric(run, name)) == 6 and np.isfinite(metric(run, name)).all() for name in names)
    assert metric(run, "value/mean")[0] == 0 and 0 not in metric(run, "value/mean")[1:]
    assert metric(run, "value/learning_rate") == [1e-2] * 6
    assert metric(run, "learning_rate") == [0.0, 0.0, 1e-2, 1e-2, 1e-2, 1e-2]
    steps = {n: run / "checkpoints" / f"step-{n}" for n in (2, 4, 6)}
    assert_same_weights(steps[2], tmp_path / "base")  # the policy waited for the critic
    assert any(not torch.equal(t, weights(steps[4])[name]) for name, t in weights(steps[2]).items())
    trained, base = weights(steps[2] / "critic"), weights(tmp_path / "base")
    assert trained["value_head.weight"].shape == (1, 32)
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in base.items() if name in trained)
    assert not (result.final_dir / "critic").exists()
    assert metric(run, "completions/trained_ratio") == [1.0] * 6
    # another run goes on with that critic: its first values are not 0
    again = changed(ppo_inputs(tmp_path, path=str(steps[6] / "critic")), run={"dir": str(tmp_path / "b")})
    assert metric(train(again).run_dir, "value/mean")[0] != 0


def test_resumed_with_a_critic_is_uninterrupted_bit_for_bit(tmp_path: Path):
    config = changed(ppo_inputs(tmp_path, warmup_steps=1), train={"lr_schedule": "cosine", "updates_per_rollout": 2})
    config = changed(config, model={"gradient_checkpointing": True}, critic={"updates": 2})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    actual = train(config, resume=True)
    assert_same_weights(actual.final_dir, expected.final_dir)
    last = Path("checkpoints") / "step-6" / "critic"
    assert_same_weights(actual.run_dir / last, expected.run_dir / last)
    for name in ("loss", "reward", "value_loss", "value/mean", "value/grad_norm", "value/learning_rate"):
        assert metric(actual.run_dir, name) == metric(expected.run_dir, name), name


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}])
def test_values_in_bfloat16(tmp_path: Path, model: dict[str, str]):
    """Values are float32; weights and moments keep their dtype."""
    run = train(changed(ppo_inputs(tmp_path), model=model, train={"steps": 2})).run_dir
    assert np.isfinite(metric(run, "value_loss")).all() and metric(run, "value/mean")[1] != 0
    dtypes = {t.dtype for t in weights(run / "checkpoints" / "step-2" / "critic").values()}
    assert dtypes == {getattr(torch, model.get("dtype", "float32"))}


@pytest.mark.slow
def test_ppo_learns_the_demo_from_one_completion_per_prompt(tmp_path: Path):
    raw = demo_config(tmp_path / "run", seed=0).model_dump(mode="json")
    raw = changed(raw, rollout={"num_generations": 1}, train={"prompts_per_step": 256, "steps": 5})
    config = config_from_dict({**raw, "algorithm": {"name": "ppo"}, "critic": {"learning_rate": 1e-3}})
    write_data(tmp_path / "run", config, seed=0)
    summary = cohort.train(config, display=Display()).summary
    assert summary["accuracy_before"] < 0.25 and summary["accuracy_after"] > 0.5


def test_more_updates_of_the_critic_than_of_the_policy(tmp_path: Path):
    """As many passes over the same returns, of which the first has the old values."""
    folder = save_model_folder(tmp_path / "m")
    once, thrice = (replace_updates(make_crew(str(folder), ALONE, dtype="float32"), updates) for updates in (1, 3))
    batches = once.pack_for_critic(critic_sequences([[3, 14, 9]], seed=0))
    single = [once.train_critic(None if update else batches) for update in range(3)]
    done = thrice.train_critic(batches)
    for name, value in done.metrics.items():
        assert value == pytest.approx(np.mean([result.metrics[name] for result in single]), rel=1e-12), name
    assert done.num_inputs == sum(result.num_inputs for result in single)
    actual, expected = (crew.critic.policy.model.state_dict() for crew in (thrice, once) if crew.critic)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def replace_updates(crew: Crew, updates: int) -> Crew:
    crew.critic_updates = updates
    return crew


def test_a_critic_that_does_not_fit_the_policy(tmp_path: Path):
    with pytest.raises(UserError, match=r"critic.path: .*nowhere.*no such folder"):
        train(ppo_inputs(tmp_path, path="./nowhere"))
    save_model_folder(tmp_path / "other", vocab_size=50)
    with pytest.raises(UserError, match=r"critic.path: .*50 tokens, and the policy for 101"):
        train(ppo_inputs(tmp_path, path=str(tmp_path / "other")))


def test_a_disk_too_small_for_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With room for the policy's checkpoints alone there is none for the critic's."""
    config = ppo_inputs(tmp_path)
    size = sum(t.numel() * 4 for t in weights(tmp_path / "base").values())
    free = type("Usage", (), {"free": 3 * 4 * size + size + 1000})
    monkeypatch.setattr("cohort.trainer.setup.shutil.disk_usage", lambda _: free)
    with pytest.raises(UserError, match="GB free"):
        train(config)
    train({**changed(config, rollout={"num_generations": 4}), "algorithm": {"name": "grpo"}, "critic": None})


def test_a_critic_learns_what_its_returns_are():
    """Sixty updates on the same completions: most of how their returns differ is foreseen."""
    model = make_model()
    Critic.adapt(model)
    critic = Critic(model, device=CPU, compute_dtype=torch.float32, pad_token_id=0)
    engine = engine_of(critic, learning_rate=3e-3)
    assert PPO.critic is not None
    sequences = critic_sequences([[3, 14, 9], [1, 6, 2]], seed=1)
    explained = []
    for update in range(60):
        if update % 10 == 0:
            values = {n: v.double().numpy() for n, v in engine.estimate(sequences, {"values"})["values"].items()}
            explained.append(value_metrics(sequences, values)["value/explained_variance"])
        (batch,) = pack_for(critic, sequences, 30)
        engine.forward_backward(batch, PPO.critic.loss)
        engine.optim_step()
    assert explained[0] == 0 and explained[-1] > 0.7
