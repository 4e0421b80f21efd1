"""What ranks do together in the tests of the critic."""

from typing import Any

import numpy as np
import torch

from cohort.algorithms import Coefficients, assign_advantages, bare_sequences, build_algorithm, with_returns
from cohort.config import AlgorithmConfig, ModelConfig, TrainConfig
from cohort.distributed import Ranks
from cohort.engine import CriticEngine, TrainEngine
from cohort.metrics import PeakMemory
from cohort.policy import Collectives, load_critic, load_policy, load_tokenizer
from cohort.records import Estimates, TrainSequence
from cohort.rollout import Sampler
from cohort.trainer.crew import Crew
from rank_crew import commanded
from rank_engine import CPU, LONG, SHORT, nothing, out_of_memory_over, whole_gradients, whole_weights
from test_laws import random_groups

STEPS = {"uneven": ([[3, 14, 9], [1, 6, 2], [8, 1, 30]], SHORT), "long prompts": ([[3, 14, 9], [20, 1, 6]], LONG)}
PLACES = ("forward embedding", "forward mlp 1", "backward self_attn 1", "backward mlp 0")  # where memory runs out
ALGORITHM = build_algorithm(AlgorithmConfig(name="ppo"), max_completion_tokens=32)


def values_of(num_tokens: int, index: int) -> np.ndarray:
    """Values of before, by a formula."""
    return np.random.default_rng(100 + index).normal(size=num_tokens)


def critic_sequences(
    lengths_PG: list[list[int]], prompt_tokens: tuple[int, int] = SHORT, *, seed: int
) -> list[TrainSequence]:
    """What a critic learns from, of random completions, one in eight not judged."""
    groups = random_groups(lengths_PG, seed, prompt_tokens)
    completions = [completion for group in groups for completion in group.completions]
    values = {n: values_of(len(c.token_ids), n) for n, c in enumerate(completions)}
    return with_returns(assign_advantages(groups, ALGORITHM, Estimates(values=values)))


def make_crew(model: str, ranks: Ranks, *, dtype: str = "float64") -> Crew:
    """Of a policy, and a critic of the same model whose values are not 0."""
    collectives = Collectives()
    config = ModelConfig(path=model, dtype=dtype)
    tokenizer = load_tokenizer(config) if ranks.is_first else None
    how: dict[str, Any] = {"device": CPU, "tokenizer": tokenizer, "ranks": ranks, "collectives": collectives}
    policy, critic = load_policy(config, **how), load_critic(config, **how)
    head = critic.model.value_head.weight
    with torch.no_grad():
        (head.to_local() if hasattr(head, "to_local") else head).copy_(
            torch.sin(torch.arange(head.shape[1], dtype=head.dtype)).unsqueeze(0)[: head_rows(head)]
        )
    train = TrainConfig(learning_rate=0.01)

    def options() -> dict[str, Any]:
        return {
            "micro_batch_tokens": 10_000,
            "learning_rate": lambda _: train.learning_rate,
            "temperature": 1.0,
            "reference": None,
            "ranks": ranks,
        }

    return Crew(
        ranks=ranks,
        policy=policy,
        algorithm=ALGORITHM,
        engine=TrainEngine(policy, train, **options()),
        critic=CriticEngine(critic, train, **options()),
        sampler=Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8),
        tokenizer=tokenizer,
        memory=PeakMemory(CPU),
    )


def head_rows(head: Any) -> int:
    """Rows of a head that this rank has: it has one, and most ranks none."""
    return (head.to_local() if hasattr(head, "to_local") else head).shape[0]


def critic_gradient(crew: Crew, sequences: list[TrainSequence], budget: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result and the whole gradient of one pass, under a budget, from old values by a formula."""
    critic = crew.critic
    assert critic is not None and ALGORITHM.critic is not None
    critic.micro_batch_tokens = budget
    shuffled = [sequences[n] for n in np.random.default_rng(1).permutation(len(sequences))]
    batch = crew.pack_for_critic(shuffled)[crew.ranks.rank]
    old = {s.index: torch.from_numpy(values_of(s.num_completion_tokens, s.index)) for s in sequences}
    result = critic.forward_backward(batch, ALGORITHM.critic.loss, old_logprobs=old)
    return result, whole_gradients(critic)


def run_critic_gradients(ranks: Ranks, model: str) -> dict[str, Any]:
    """Every step and budget; and memory that runs out on one rank, at every place."""
    crew = make_crew(model, ranks)
    assert crew.critic is not None
    results: dict[str, Any] = {}
    for step, lengths in STEPS.items():
        sequences = critic_sequences(*lengths, seed=3)
        for budget in (20, 10_000):
            result, gradient = critic_gradient(crew, sequences, budget)
            results[f"{step}/{budget}"] = (result.metrics["loss"], gradient)
    sequences = critic_sequences(*STEPS["uneven"], seed=3)
    for place in PLACES:
        unlucky = ranks.rank == ranks.world_size - 1
        with out_of_memory_over(14, place, crew.critic) if unlucky else nothing():
            result, gradient = critic_gradient(crew, sequences, 10_000)
        results[f"memory/{place}"] = (result.num_out_of_memory, gradient)
    return results


def run_critic_steps(ranks: Ranks, model: str) -> dict[str, Any]:
    """Three updates at rank 0's word: estimates, metrics, and the weights of policy and critic."""
    crew = make_crew(model, ranks)

    def command() -> dict[str, Any]:
        groups = random_groups([[3, 14, 9], [1, 6, 2], [8, 1, 30]], seed=3)
        completions = sum(len(group.completions) for group in groups)
        sequences = assign_advantages(groups, ALGORITHM, crew.estimate(bare_sequences(groups), ALGORITHM.estimates))
        assert len(sequences) == completions
        metrics = []
        for update in range(3):
            critic = crew.train_critic(None if update else crew.pack_for_critic(with_returns(sequences)))
            losses = crew.forward_backward(None if update else crew.pack(sequences), Coefficients(kl=0.0, entropy=0.0))
            crew.optim_step()
            metrics.append((critic.metrics, losses.metrics["loss"]))
        return {"metrics": metrics}

    done = commanded(crew, command)
    assert crew.critic is not None
    return {**done, "policy": whole_weights(crew.engine), "critic": whole_weights(crew.critic)}


JOBS = {"critic_gradients": run_critic_gradients, "critic_steps": run_critic_steps}
