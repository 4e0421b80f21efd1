"""PPO's critic: advantages and returns, values and their gradients under laws 1 and 2, and whole runs."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assigned import assign_advantages
from cohort.algorithms import AdvantageInputs, build_algorithm, critic_sequences, value_metrics
from cohort.algorithms.advantages import gae
from cohort.algorithms.gae import clipped_value, gae_returns
from cohort.config import AdamwConfig, AlgorithmConfig, ModelConfig, config_from_dict
from cohort.errors import UserError
from cohort.learner import find_budget
from cohort.models import Critic, LoadRequest, load_critic, save_policy
from cohort.models.batch_layout import Layout
from cohort.packing.batch import ValueInputs
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.records import ForwardOnlyOutputs
from critics import CPU, PPO, engine_of, make_critic, naive_values
from rank_critic import make_critic_sequences, make_worker
from rank_engine import REWRITTEN, SHARD, TURNS, out_of_memory_over
from runs import changed, make_inputs
from selection import examples, mostly_slow
from test_flops import make_moe
from test_laws import random_groups
from tiny import gradients, make_model, make_tokenizer, pack_for, relative_error, save_model_folder


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
    """Over the scored tokens 0.8, 0.6, 0.4, -0.2: mean 0.4, squares 0.56 over 3. The middle one is not scored."""
    x = inputs([1.0, np.nan, 0.0], [[0.2, 0.4, 0.6], [9.0, 9.0], [0.2]])
    actual = gae(x, gamma=1.0, gae_lambda=1.0, whiten_advantages=True)
    expected = torch.tensor([[0.4, 0.2, 0.0], [0.0, 0.0, 0.0], [-0.6, 0.0, 0.0]]) / (0.56 / 3) ** 0.5
    torch.testing.assert_close(actual[0], expected.double(), rtol=1e-6, atol=1e-9)
    equal = inputs([0.1] * 3, [[0.0] * 7] * 3)  # nothing to choose between: rounding must not be blown up
    assert not gae(equal, gamma=1.0, gae_lambda=1.0, whiten_advantages=True).any()
    nothing = inputs([np.nan], [[1.0]])
    assert not gae(nothing, gamma=1.0, gae_lambda=1.0, whiten_advantages=True).any()


@examples(30)
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
    """Scored completions, and not the truncated ones where those are masked; the mean over all of their tokens."""
    groups = random_groups([[3], [5], [2], [4]], seed=0)
    reasons = ("stop", "length", "stop", "stop")
    groups = [
        replace(
            group,
            trajectories=(replace(group.trajectories[0], end="answer" if reason == "stop" else "length"),),
            rewards=np.array([np.nan if n == 2 else 1.0]),
        )
        for n, (group, reason) in enumerate(zip(groups, reasons, strict=True))
    ]
    values = {n: np.full(group.trajectories[0].num_sampled_tokens, 0.25) for n, group in enumerate(groups)}
    for masked, kept in ((False, [0, 1, 3]), (True, [0, 3])):
        config = AlgorithmConfig(name="ppo", mask_truncated_completions=masked)
        algorithm = build_algorithm(config, max_completion_tokens=16)
        sequences = assign_advantages(groups, algorithm, ForwardOnlyOutputs(values=values))
        learned = critic_sequences(sequences)
        assert [s.index for s in learned] == kept
        total = sum(s.num_loss_tokens for s in learned)
        assert all((s.loss_weights == 1 / total).all() and (s.returns == 1).all() for s in learned)
        metrics = value_metrics(sequences, values)
        assert metrics == {"value/mean": 0.25}  # returns that do not vary explain nothing
    assert critic_sequences([replace(s, returns=np.zeros(0)) for s in sequences]) == []
    assert value_metrics([replace(s, returns=np.zeros(0)) for s in sequences], {}) == {}


def test_explained_variance_by_hand():
    (sequence,) = critic_sequences(make_critic_sequences([[2]], seed=0))
    sequences = [replace(sequence, returns=np.array([0.0, 2.0]))]

    def explained(first: float, second: float) -> float:
        return value_metrics(sequences, {0: np.array([first, second])})["value/explained_variance"]

    assert explained(0.0, 2.0) == 1
    assert explained(5.0, 5.0) == 0
    assert explained(1.0, 1.0) == 0  # errors -1, 1 are of variance 1, as returns are: worth as much as nothing
    assert explained(2.0, 0.0) == -3


def test_one_completion_needs_a_critic_and_only_then_is_there_one(tmp_path: Path):
    config = make_inputs(tmp_path)
    one = changed(config, rollout={"num_generations": 1})
    config_from_dict({**one, "algorithm": {"name": "ppo"}})
    with pytest.raises(UserError, match=r"gae_lambda.*has no effect.*gae"):
        config_from_dict({**config, "algorithm": {"gae_lambda": 0.9}})
    with pytest.raises(UserError, match=r"rollout.resample: 2 .*group of one"):
        config_from_dict(changed({**one, "algorithm": {"name": "ppo"}}, rollout={"num_generations": 1, "resample": 2}))
    with pytest.raises(UserError, match=r"critic.warmup_steps: 6 leaves no step of train.steps: 6.*at most 5"):
        config_from_dict({**config, "algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 6}})


@pytest.mark.parametrize(
    ("kind", "layout"),
    mostly_slow(
        [*itertools.product(["llama", "qwen3", "qwen2"], ["shared", "packed", "padded"])],
        *(("llama", "shared"), ("qwen3", "packed"), ("qwen2", "padded"), ("qwen2", "shared")),
        reason="each family and each layout",
    ),
)
def test_values_and_gradients_are_the_naive_ones(kind: str, layout: Layout):
    """Laws 1 and 2 for the critic: any budget, streams too, against one unpadded forward per completion."""
    critic = make_critic(kind)
    assert critic.layout == "shared"
    sequences = make_critic_sequences([[3, 14, 9], [1, REWRITTEN, 2], [8, TURNS, 30]], seed=1)
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
    estimated = engine.forward_only(sequences, {"values"})["values"]
    for s in sequences:
        torch.testing.assert_close(estimated[s.index], naive_values(critic, s).detach(), rtol=1e-5, atol=1e-6)


def test_old_values_are_those_of_the_first_pass():
    critic = make_critic(dtype=torch.float32)
    engine = engine_of(critic, learning_rate=0.01)
    assert PPO.critic is not None
    sequences = make_critic_sequences([[3, 14, 9]], seed=0)
    before = engine.forward_only(sequences, {"values"})["values"]
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
    (batch,) = pack_for(engines[0].policy, make_critic_sequences([[3, 14, 9]], seed=0), 100)
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
    request = LoadRequest(ModelConfig(path=str(folder)), device=CPU, tokenizer=tokenizer)
    critic = load_critic(request)
    names = {name for name, _ in critic.model.named_parameters()}
    assert not any("lm_head" in name for name in names) and {"value_head.weight", "value_head.bias"} < names
    engine = engine_of(critic, learning_rate=0.01)
    sequences = make_critic_sequences([[3, 14], [1, 6]], seed=1)
    assert not any(v.any() for v in engine.forward_only(sequences, {"values"})["values"].values())
    assert PPO.critic is not None
    for _ in range(2):  # in the first the head alone has a gradient
        (batch,) = pack_for(critic, sequences, 100)
        engine.forward_backward(batch, PPO.critic.loss)
        engine.optim_step()
    learned = engine.forward_only(sequences, {"values"})["values"]
    assert all(v.all() for v in learned.values())
    save_policy(critic, tokenizer, tmp_path / "critic")
    again = load_critic(replace(request, config=ModelConfig(path=str(tmp_path / "critic"))))
    values = engine_of(again).forward_only(sequences, {"values"})["values"]
    assert all(torch.equal(values[n], learned[n]) for n in learned)


def test_the_budget_leaves_room_for_the_other_models_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What both need and do not have yet is there while one of them is tried; one budget is found for both."""
    worker = make_worker(str(save_model_folder(tmp_path / "m")), SINGLE_PROCESS)
    assert worker.critic is not None
    asked: list[tuple[str, int]] = []
    for engine in (worker.engine, worker.critic):
        fits = type(engine).fits

        def told(self: Any, sequences: Any, loss: Any, *, reserved_bytes: int = 0, fits: Any = fits) -> bool:
            asked.append((type(self.policy).__name__, reserved_bytes))
            return fits(self, sequences, loss, reserved_bytes=reserved_bytes)

        monkeypatch.setattr(engine, "fits", told.__get__(engine))
    with out_of_memory_over(200, "backward mlp 1", worker.critic):
        found = worker.find_budget(SHARD, 2000)
    assert 0.9 * 200 / 1.1 <= found <= 200
    assert worker.engine.budget.tokens == worker.critic.budget.tokens == found
    rooms = {("Policy", worker.critic.num_state_bytes), ("Critic", worker.engine.num_state_bytes)}
    assert rooms <= set(asked) <= rooms | {("Policy", 0), ("Critic", 0)}  # 0 where what is kept is measured
    assert all(p.grad is None for e in (worker.engine, worker.critic) for p in e.policy.model.parameters())
    assert find_budget(worker.critic, worker.algorithm.critic.loss, shard=SHARD, max_tokens=2000) == 2000


def test_a_critic_learns_what_its_returns_are():
    """Sixty updates on the same completions: most of how their returns differ is foreseen."""
    model = make_model()
    Critic.replace_head(model)
    critic = Critic(model, device=CPU, compute_dtype=torch.float32, pad_token_id=0)
    engine = engine_of(critic, learning_rate=3e-3)
    assert PPO.critic is not None
    sequences = make_critic_sequences([[3, 14, 9], [1, 6, 2]], seed=1)
    explained = []
    for update in range(60):
        if update % 10 == 0:
            estimated = engine.forward_only(sequences, {"values"})["values"]
            values = {s.index: estimated[s.index].double().numpy() for s in sequences}
            explained.append(value_metrics(sequences, values)["value/explained_variance"])
        (batch,) = pack_for(critic, sequences, 30)
        engine.forward_backward(batch, PPO.critic.loss)
        engine.optim_step()
    assert explained[0] == 0 and explained[-1] > 0.7
