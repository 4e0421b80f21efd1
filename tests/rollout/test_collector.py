"""Rollouts as coroutines: turns, batches of all calls that wait, and how they end."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from assigned import assign_advantages
from cohort.algorithms import build_algorithm
from cohort.config import AlgorithmConfig, SgdConfig
from cohort.errors import StopRequested, UserError
from cohort.records import ModelCall, Prompt, ScoredGroup, Trajectory
from cohort.rollout import (
    CallKey,
    Generate,
    LocalEngine,
    RolloutCollector,
    SampledCompletion,
    Sampler,
    SampleRequest,
    SamplingParams,
    StepKey,
    collector,
    split_requests,
)
from cohort.rollout.engines.local.decoders import SharedPromptDecoder
from engines import ScriptedEngine, generate
from test_laws import dense_gradient, make_engine, old_logprobs_of
from tiny import VOCAB_SIZE, make_policy, make_tokenizer, pack_for

KEY = StepKey(purpose="train", seed=3, step=5)
SAMPLING = SamplingParams(num_generations=4, max_completion_tokens=6, temperature=1.0)
REPLY = np.array([7, 11])  # of an environment

Turns = Coroutine[Any, Any, list[ModelCall]]


def prompts(*lengths: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(id=n, epoch=0, content="", token_ids=rng.integers(2, VOCAB_SIZE, length), columns={})
        for n, length in enumerate(lengths)
    ]


class RecordedSampler:
    """Samples in shares of some ranks, one after the other, and remembers each batch."""

    def __init__(self, *, num_ranks: int = 1, max_num_seqs: int = 64):
        policy = make_policy(dtype=torch.float64)
        self.sampler = Sampler(policy, end_token_ids=frozenset({1, 5, 9}), max_num_seqs=max_num_seqs)
        self.num_ranks = num_ranks
        self.batches: list[Sequence[SampleRequest]] = []

    def __call__(self, requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        self.batches.append(requests)
        shares = split_requests(requests, self.num_ranks)
        return [completion for share in shares for completion in self.sampler.sample(share)]

    @property
    def num_calls(self) -> list[int]:
        """Calls of each batch."""
        return [sum(len(request.keys) for request in batch) for batch in self.batches]


def collect(sample: Any, rollouts: Callable[[Generate], list[Coroutine[Any, Any, Any]]]) -> list[Any]:
    """What rollouts return that run at the same time."""
    engine = LocalEngine(sample)
    with closing(RolloutCollector(engine, make_tokenizer())) as runs:
        tasks = [runs.start(rollout) for rollout in rollouts(engine.generate)]
        runs.wait(tasks, count=len(tasks))
        return [task.result() for task in tasks]


async def play(
    generate: Generate, prompt: Prompt, index: int, num_turns: int, *, sampling: SamplingParams = SAMPLING
) -> list[ModelCall]:
    """Turns with an environment that always replies the same."""
    calls: list[ModelCall] = []
    context = prompt.token_ids
    for turn in range(num_turns):
        calls.append(await generate(context, sampling, KEY.call(prompt, index, turn)))
        context = np.concatenate([context, calls[-1].token_ids, REPLY])
    return calls


def tokens_of(trajectories: list[list[ModelCall]]) -> list[list[list[int]]]:
    return [[call.token_ids.tolist() for call in calls] for calls in trajectories]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_turn_of_a_rollout_is_what_is_sampled_alone(num_ranks: int):
    sample = RecordedSampler(num_ranks=num_ranks)
    lengths = {(prompt.id, index): 1 + (prompt.id + index) % 3 for prompt in prompts(3, 9) for index in range(4)}

    def rollouts(generate: Generate) -> list[Turns]:
        return [play(generate, p, i, lengths[p.id, i]) for p in prompts(3, 9) for i in range(4)]

    trajectories = collect(sample, rollouts)
    assert [len(calls) for calls in trajectories] == list(lengths.values())
    assert sample.num_calls == [8, 5, 2]  # all that wait at a time; a rollout that has ended is missed by nobody
    for (prompt_id, index), calls in zip(lengths, trajectories, strict=True):
        for turn, call in enumerate(calls):
            key = KEY.call(prompts(3, 9)[prompt_id], index, turn)
            request = SampleRequest(token_ids=call.context_ids, sampling=SAMPLING, keys=(key,))
            (alone,) = sample.sampler.sample([request])
            assert call.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(call.sampling_logprobs, alone.sampling_logprobs, atol=1e-12)


def test_a_rollout_that_waits_for_something_else_holds_nobody_up():
    """One waits until another has ended, by way of several callbacks: meanwhile the others are sampled."""
    sample = RecordedSampler()

    def rollouts(generate: Generate) -> list[Turns]:
        ended = asyncio.Event()
        (prompt,) = prompts(4)

        async def patient() -> list[ModelCall]:
            first = await play(generate, prompt, 0, 1)
            await ended.wait()
            return [*first, await generate(prompt.token_ids, SAMPLING, KEY.call(prompt, 0, 1))]

        async def quick() -> list[ModelCall]:
            calls = await play(generate, prompt, 1, 3)
            ended.set()
            return calls

        return [patient(), quick()]

    collect(sample, rollouts)
    assert sample.num_calls == [2, 1, 1, 1]


def test_a_batch_waits_for_every_rollout_that_can_run():
    sample = RecordedSampler()

    def rollouts(generate: Generate) -> list[Turns]:
        (prompt,) = prompts(4)

        async def delayed(index: int) -> list[ModelCall]:
            for _ in range(5 * index):  # each lets all others run
                await asyncio.sleep(0)
            return await play(generate, prompt, index, 2)

        return [delayed(index) for index in range(4)]

    collect(sample, rollouts)
    assert sample.num_calls == [4, 4]


def test_equal_contexts_are_prefilled_once(monkeypatch: pytest.MonkeyPatch):
    prefilled: list[list[list[int]]] = []
    start = SharedPromptDecoder.start

    def counted(self: Any, contexts: Any, counts: Any) -> Any:
        prefilled.append([[len(context), count] for context, count in zip(contexts, counts, strict=True)])
        return start(self, contexts, counts)

    monkeypatch.setattr(SharedPromptDecoder, "start", counted)
    first, second = prompts(3, 9)
    same = replace(first, id=5)

    async def forgetful(generate: Generate, prompt: Prompt, index: int) -> list[ModelCall]:
        """The second context is the same whatever the first answer is."""
        contexts = [prompt.token_ids, np.concatenate([prompt.token_ids, REPLY])]
        return [await generate(ids, SAMPLING, KEY.call(prompt, index, turn)) for turn, ids in enumerate(contexts)]

    trajectories = collect(
        RecordedSampler(), lambda generate: [forgetful(generate, p, i) for p in (first, second, same) for i in range(4)]
    )
    assert prefilled == [[[3, 8], [9, 4]], [[5, 8], [11, 4]]]
    tokens = tokens_of(trajectories)
    assert tokens[:4] != tokens[8:], "prompts with equal tokens have streams of their own"


def test_prompts_with_equal_tokens_stay_within_max_num_seqs(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    start = SharedPromptDecoder.start
    monkeypatch.setattr(
        SharedPromptDecoder, "start", lambda self, contexts, n: counts.extend(n) or start(self, contexts, n)
    )
    (prompt,) = prompts(3)
    same = [replace(prompt, id=n) for n in range(4)]
    trajectories = collect(
        RecordedSampler(max_num_seqs=6), lambda generate: [play(generate, p, i, 1) for p in same for i in range(4)]
    )
    assert counts == [6, 6, 4]
    one_by_one = [collect(RecordedSampler(), lambda g, p=p: [play(g, p, i, 1) for i in range(4)]) for p in same]
    assert tokens_of(trajectories) == [tokens for group in one_by_one for tokens in tokens_of(group)]


def test_calls_with_limits_of_their_own_share_a_batch():
    sample = RecordedSampler()
    limits = [1, 4, 6, 20]
    ps = prompts(3, 5, 3, 3)

    def rollouts(generate: Generate) -> list[Turns]:
        some = [replace(SAMPLING, max_completion_tokens=limit) for limit in limits]
        return [play(generate, p, 0, 1, sampling=s) for p, s in zip(ps, some, strict=True)]

    answers = [tokens for (tokens,) in tokens_of(collect(sample, rollouts))]
    assert sample.num_calls == [4]
    long = replace(SAMPLING, max_completion_tokens=20)
    longest = collect(sample, lambda generate: [play(generate, p, 0, 1, sampling=long) for p in ps])
    assert answers == [tokens[:limit] for (tokens,), limit in zip(tokens_of(longest), limits, strict=True)]
    assert [len(answer) for answer in answers[:2]] == limits[:2]


def test_calls_that_are_sampled_differently_do_not_share_a_batch():
    sample = RecordedSampler()
    (prompt,) = prompts(4)
    others = [SAMPLING, replace(SAMPLING, temperature=0.0), replace(SAMPLING, top_k=3)]
    collect(sample, lambda g: [play(g, prompt, i, 1, sampling=s) for s in others for i in range(2)])
    assert sample.num_calls == [2, 2, 2]
    assert [batch[0].sampling for batch in sample.batches] == others


def test_what_is_not_awaited_is_cancelled_when_the_collector_is_closed():
    cleaned_up: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append("yes")

    runs = RolloutCollector(ScriptedEngine(lambda: 1_000_000), make_tokenizer())
    tasks: list[asyncio.Task[Any]] = [runs.start(endless()), *runs.submit(prompts(3, 4), SAMPLING, KEY)]
    runs.wait(tasks, count=0)
    runs.close()
    assert all(task.cancelled() for task in tasks) and cleaned_up == ["yes"]
    runs.close()


def test_a_rollout_that_never_pauses_holds_up_no_other(monkeypatch: pytest.MonkeyPatch):
    """And the run is asked whether it should stop, and other ranks hear from it."""
    monkeypatch.setattr(collector, "_TICK_S", 0.01)
    waited: list[str] = []

    async def busy(others: list[asyncio.Task[Any]]) -> None:
        while not all(task.done() for task in others):
            await asyncio.sleep(0)

    runs = RolloutCollector(ScriptedEngine(lambda: 3), make_tokenizer(), while_waiting=lambda: waited.append("yes"))
    with closing(runs):
        groups = runs.submit(prompts(3), SAMPLING, KEY)
        task = runs.start(busy(groups))
        runs.wait([task, *groups], count=2)
    assert waited


def test_the_failure_of_a_rollout_is_raised_where_it_is_waited_for():
    async def fail() -> None:
        raise UserError("no such tool")

    with closing(RolloutCollector(LocalEngine(RecordedSampler()), make_tokenizer())) as runs:
        task = runs.start(fail())
        group = runs.submit(prompts(3), SAMPLING, KEY)
        runs.wait(group, count=1)
        with pytest.raises(UserError, match="no such tool"):
            runs.wait([task], count=1)


def test_a_run_that_is_asked_to_end_does_not_wait_for_an_environment(monkeypatch: pytest.MonkeyPatch):
    asked = iter([False, False, True])

    def check() -> None:
        if next(asked):
            raise StopRequested("asked to end by SIGTERM")

    monkeypatch.setattr(collector, "_TICK_S", 0.01)

    async def slow_tool() -> None:
        await asyncio.Event().wait()

    with closing(RolloutCollector(LocalEngine(RecordedSampler()), make_tokenizer(), while_waiting=check)) as runs:
        task = runs.start(slow_tool())
        with pytest.raises(StopRequested):
            runs.wait([task], count=1)
    assert task.cancelled()


def test_the_failure_of_a_callback_ends_the_wait():
    """Nobody awaits it, so that the answer of a server would be waited for without end."""

    def fail() -> None:
        raise UserError("an answer that cannot be read")

    runs = RolloutCollector(ScriptedEngine(lambda: 1_000_000), make_tokenizer())
    with closing(runs):
        tasks = runs.submit(prompts(3), SAMPLING, KEY)

        async def schedule() -> None:
            asyncio.get_running_loop().call_later(0.01, fail)

        runs.start(schedule())
        with pytest.raises(UserError, match="an answer that cannot be read"):
            runs.wait(tasks, count=1)


async def use_tool(
    generate: Generate, tokenizer: Any, prompt: Prompt, sampling: SamplingParams, key: CallKey
) -> Trajectory:
    """Two turns, with the reply of a tool between them."""
    first = await generate(prompt.token_ids, sampling, key)
    context = np.concatenate([first.context_ids, first.token_ids, REPLY])
    second = await generate(context, sampling, replace(key, turn=1))
    texts = [tokenizer.decode(call.token_ids.tolist()) for call in (first, second)]
    messages = tuple({"role": "assistant", "content": text} for text in texts)
    return Trajectory(calls=(first, second), messages=messages, text="".join(texts), end="answer")


def test_a_tool_loop_is_collected_and_trains_as_computed_naively():
    policy = make_policy(dtype=torch.float64, num_hidden_layers=1)
    engine = LocalEngine(Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=64).sample)
    with closing(RolloutCollector(engine, make_tokenizer(), rollout_function=use_tool)) as runs:
        groups = runs.collect(prompts(3, 5), SAMPLING, KEY)
    plain = generate(engine, prompts(3, 5), SAMPLING, KEY)
    rewards = np.random.default_rng(0).random((2, 4))
    scored = [
        ScoredGroup(prompt=g.prompt, trajectories=g.trajectories, rewards=r, reward_parts={})
        for g, r in zip(groups, rewards, strict=True)
    ]
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=12)
    sequences = assign_advantages(scored, algorithm)
    members = [(g.prompt, t) for g in groups for t in g.trajectories]
    assert len(sequences) == len(members) == 8
    for s, (prompt, t), single in zip(sequences, members, [t for g in plain for t in g.trajectories], strict=True):
        first, second = (call.token_ids.tolist() for call in t.calls)
        assert first == single.sampled_token_ids.tolist(), "the first turn has the random stream of a plain prompt"
        assert s.token_ids.tolist() == [*prompt.token_ids, *first, *REPLY, *second]
        lengths = [len(prompt.token_ids), len(first), len(REPLY), len(second)]
        np.testing.assert_array_equal(s.loss_mask, np.repeat([False, True, False, True], lengths))
    weights = {name: p.detach().clone().requires_grad_() for name, p in policy.model.named_parameters()}
    _, expected = dense_gradient(policy, policy, sequences, algorithm)
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    for name, weight in weights.items():
        weight.grad = expected[name]
    optimizer.step()
    train_engine = make_engine(policy, optim=SgdConfig(), learning_rate=0.1, max_grad_norm=1e9)
    (batch,) = pack_for(policy, sequences, 20)
    old = {s.index: old_logprobs_of(s) for s in sequences}
    train_engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
    train_engine.optim_step()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name].detach(), rtol=1e-9, atol=1e-12)


def test_no_deadline_expires_while_a_local_engine_samples(monkeypatch: pytest.MonkeyPatch):
    """A batch of a hundred seconds, during which a tool that needs several turns of the loop cannot get them."""
    sampling_s = [0.0]
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: time.monotonic() + sampling_s[0])
    sampler = RecordedSampler()

    def sample(requests: Sequence[SampleRequest]) -> list[SampledCompletion]:
        sampling_s[0] += 100
        return sampler(requests)

    async def tool() -> str:
        async with asyncio.timeout(50):
            for _ in range(3):
                await asyncio.sleep(0.001)
        return "answered"

    def rollouts(generate: Generate) -> list[Coroutine[Any, Any, Any]]:
        return [play(generate, prompts(3)[0], 0, 2), tool()]

    assert collect(sample, rollouts)[1] == "answered"


def test_rollouts_run_inside_of_another_event_loop():
    """As in a notebook."""

    async def main() -> int:
        outer = asyncio.get_running_loop()
        (prompt,) = prompts(3)
        (calls,) = collect(RecordedSampler(), lambda generate: [play(generate, prompt, 0, 2)])
        assert asyncio.get_running_loop() is outer
        await asyncio.sleep(0)
        return len(calls)

    assert asyncio.run(main()) == 2
