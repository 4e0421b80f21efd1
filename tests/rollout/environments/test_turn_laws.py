"""From chat messages to packed sequences: what is trained is what was sampled, with the sampler's logprobs."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assigned import assign_advantages
from chat_tokenizers import CHATML, GEMMA, LLAMA3, MISTRAL, make_tokenizer
from cohort.algorithms import build_algorithm
from cohort.chat import ChatTemplate, ResponseParser
from cohort.config import AlgorithmConfig
from cohort.models.batch_layout import Layout
from cohort.records import Prompt, RolloutGroup, ScoredGroup, join_calls
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey
from cohort.rollout.environments.model import TurnLimits
from cohort.rollout.environments.programs import UserProgram
from cohort.rollout.environments.trajectory import TrajectoryRunner
from conversations import FAMILIES, LOADERS, QWEN2_5, QWEN3_5, TOOLS, Family
from selection import slow
from test_laws import make_engine
from tiny import make_model, pack_for, policy_of
from waiting import PATIENCE_S

G, TURNS = 3, 4
SAMPLING = SamplingParams(num_generations=G, max_completion_tokens=12, temperature=0.9)
LIMITS = TurnLimits(max_turns=TURNS, max_prompt_tokens=2000, max_new_tokens=2000, timeout_s=PATIENCE_S)
LAYOUTS: list[Layout] = ["shared", "packed", "padded"]
WITHOUT_TOOLS = [
    replace(QWEN2_5, name=name, tokens=tokens)
    for name, tokens in (("chatml", CHATML), ("gemma3", GEMMA), ("llama3", LLAMA3), ("mistral", MISTRAL))
]
FEWER = slow("a template that keeps the history, and one that rewrites it, do the same")
QUICK = [(QWEN2_5, "fixture"), (QWEN3_5, "fixture")]  # which drops the reasoning of every turn
CASES = [(family, source) for source in LOADERS for family in FAMILIES] + [(f, "fixture") for f in WITHOUT_TOOLS]


async def converse(row: Any, model: Any) -> None:
    """Three turns of a conversation, of which a user is simulated, and one that summarizes it."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(TURNS - 1):
        reply = await model.chat(messages, row["tools"])
        if turn == 0:
            await model.chat("What would a user ask next?", train=False)
        messages += [reply.message, {"role": "user", "content": f"and then? {turn}"}]
    await model.chat("Summarize what was said.")


def collect(tokenizer: Any, policy: Any, tools: Any) -> list[RolloutGroup]:
    """Groups of conversations, sampled from the policy."""
    runner = TrajectoryRunner(
        UserProgram(converse, name="converse"),
        template=ChatTemplate(tokenizer),
        parser=ResponseParser(tokenizer),
        limits=LIMITS,
        prompt_column="prompt",
        retries=0,
    )
    contents = ["find cats", "find the tools of 12 cats"]
    prompts = [
        Prompt(id=n, epoch=0, content=content, token_ids=np.array([1]), columns={"tools": tools})
        for n, content in enumerate(contents)
    ]
    sampler = Sampler(policy, end_token_ids=frozenset({tokenizer.eos_token_id}), max_num_seqs=64)
    collector = RolloutCollector(LocalEngine(sampler.sample), tokenizer, rollout_function=runner)
    with closing(collector):
        return collector.collect(prompts, SAMPLING, StepKey(purpose="train", seed=0, step=0))


@pytest.mark.parametrize(
    ("family", "source"),
    [
        pytest.param(family, source, id=f"{family.name}-{source}", marks=[] if (family, source) in QUICK else [FEWER])
        for family, source in CASES
    ],
)
def test_law_packed_sequences_have_the_samplers_tokens_and_logprobs(family: Family, source: str):
    """Law 5 for several turns, also where the template or the program rewrites the history."""
    tokenizer = make_tokenizer(LOADERS[source](family.name), family.tokens)
    policy = policy_of(
        make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096)
    )
    groups = collect(tokenizer, policy, TOOLS if family in FAMILIES else None)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [(t.end, t.error, len(t.calls), len(t.trained_calls)) for t in trajectories] == [
        (t.end, None, TURNS + 1, TURNS) for t in trajectories
    ]
    # the summary starts a sequence; a template that drops reasoning does so after every user message
    dropped = TURNS - 2 if family is QWEN3_5 else 0
    assert max(len(join_calls(t.calls)) for t in trajectories) >= 2 + dropped

    scored = [
        ScoredGroup(prompt=g.prompt, trajectories=g.trajectories, rewards=np.arange(G, dtype=float), reward_parts={})
        for g in groups
    ]
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=TURNS * 12)
    sequences = assign_advantages(scored, algorithm)
    for number, trajectory in enumerate(trajectories):
        trained = [s.token_ids[s.loss_mask] for s in sequences if s.trajectory == number]
        np.testing.assert_array_equal(np.concatenate(trained), trajectory.sampled_token_ids)
    for number, group in enumerate(groups):
        (prefix,) = {tuple(t.trained_calls[0].context_ids) for t in group.trajectories}
        assert {s.shared_prefix_tokens for s in sequences if s.group == number} == {0, len(prefix)}
    engine = make_engine(policy, temperature=SAMPLING.temperature)
    for layout in LAYOUTS:
        policy.traits = replace(policy.traits, layout=layout)
        (batch,) = pack_for(policy, sequences, 600)
        assert len(batch.micro_batches) > 1
        metrics = engine.forward_backward(batch, algorithm.policy_loss).metrics
        policy.model.zero_grad()
        assert 0 < metrics["sampling/sampling_logp_difference/max"] < 1e-5
        logprobs = engine.forward_only(sequences, {"logprobs"})["logprobs"]
        for s in sequences:
            np.testing.assert_allclose(logprobs[s.index], s.sampling_logprobs, atol=1e-5, rtol=0)
