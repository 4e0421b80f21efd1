"""What ranks do together in the tests of the critic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rank_engine
from assigned import assign_advantages
from cohort.algorithms import build_algorithm, build_sequences, critic_sequences
from cohort.config import AlgorithmConfig, ModelConfig, TrainConfig, config_from_dict
from cohort.learner import CriticEngine, TokenBudget, TrainEngine
from cohort.metrics.resources import PeakMemory, PhaseClock
from cohort.models import CollectiveCounter, LoadRequest, load_critic, load_policy, load_tokenizer
from cohort.ranks.collectives import Ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import ForwardOnlyOutputs, TrainSequence
from cohort.rollout import Sampler
from cohort.trainer.checkpoint import CRITIC, load_engine_state
from cohort.trainer.update import Updater
from cohort.trainer.worker import Worker, pack_batches, run_forward_only
from rank_engine import (
    CPU,
    LONG,
    SHORT,
    begun_again,
    nothing,
    out_of_memory_over,
    trainer_state,
    whole_gradients,
    whole_weights,
)
from rank_workers import commanded
from test_laws import random_groups

STEPS = {
    "uneven": ([[3, 14, 9], [1, 6, 2], [8, 1, 30]], SHORT),
    "long prompts": ([[3, 14, 9], [20, 1, 6]], LONG),
    "turns": rank_engine.STEPS["turns"],
}
PLACES = ("forward embedding", "forward mlp 1", "backward self_attn 1", "backward mlp 0")  # where memory runs out
STATE = trainer_state(1)
ALGORITHM = build_algorithm(AlgorithmConfig(name="ppo"), max_completion_tokens=32)


def values_of(num_tokens: int, index: int) -> np.ndarray:
    """Values of before, by a formula."""
    return np.random.default_rng(100 + index).normal(size=num_tokens)


def make_critic_sequences(
    lengths_PG: list[list[Any]], prompt_tokens: tuple[int, int] = SHORT, *, seed: int
) -> list[TrainSequence]:
    """What a critic learns from, of random completions, one in eight not scored."""
    groups = random_groups(lengths_PG, seed, prompt_tokens)
    values = {s.index: values_of(s.num_loss_tokens, s.index) for s in build_sequences(groups)}
    return critic_sequences(assign_advantages(groups, ALGORITHM, ForwardOnlyOutputs(values=values)))


def make_worker(model: str, ranks: Ranks, *, dtype: str = "float64", checkpoint: Path | None = None) -> Worker:
    """Of a policy, and a critic of the same model whose values are not 0; or of both from a checkpoint."""
    model = str(checkpoint or model)
    collectives = CollectiveCounter()
    config = ModelConfig(path=model, dtype=dtype)
    tokenizer = load_tokenizer(config) if ranks.is_rank0 else None
    request = LoadRequest(config, device=CPU, tokenizer=tokenizer, ranks=ranks, collectives=collectives)
    of_critic = config.model_copy(update={"path": str(checkpoint / CRITIC)}) if checkpoint else config
    policy, critic = load_policy(request), load_critic(replace(request, config=of_critic))
    if checkpoint is None:
        head = critic.model.value_head.weight
        own = head.to_local() if hasattr(head, "to_local") else head  # one row, and most ranks have none
        with torch.no_grad():
            own.copy_(torch.sin(torch.arange(head.shape[1], dtype=head.dtype)).unsqueeze(0)[: len(own)])
    train = TrainConfig(learning_rate=0.01)

    budget = TokenBudget(10_000)

    def options() -> dict[str, Any]:
        return {
            "budget": budget,
            "learning_rate": lambda _: train.learning_rate,
            "temperature": 1.0,
            "reference": None,
            "ranks": ranks,
        }

    worker = Worker(
        ranks=ranks,
        policy=policy,
        algorithm=ALGORITHM,
        engine=TrainEngine(policy, train, **options()),
        critic=CriticEngine(critic, train, **options()),
        sampler=Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8),
        tokenizer=tokenizer,
        memory=PeakMemory(CPU),
    )
    if checkpoint is not None:
        state = worker.engine_state()
        load_engine_state(checkpoint, state, ranks)
        worker.load_engine_state(state)
    return worker


def make_updater(workers: WorkerGroup[Worker], **critic: Any) -> Updater:
    """Of a run with one update of the policy per step, and a `critic` section."""
    config = {
        "model": {"path": "m"},
        "data": {"path": "prompts.jsonl", "prompt": "question"},
        "rewards": [{"use": "exact"}],
        "train": {"steps": 3},
        "algorithm": {"name": "ppo"},
        "critic": critic,
    }
    return Updater(
        config=config_from_dict(config),
        workers=workers,
        clock=PhaseClock(),
        coefficient_state=ALGORITHM.initial_coefficients,
        before_update=lambda: None,
        on_out_of_memory=lambda _: None,
    )


def critic_gradient(worker: Worker, sequences: list[TrainSequence], budget: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result and the whole gradient of one pass, under a budget, from old values by a formula."""
    critic = worker.critic
    assert critic is not None and ALGORITHM.critic is not None
    critic.budget.tokens = budget
    batch = pack_batches(critic, sequences)[worker.ranks.rank]
    old = {s.index: torch.from_numpy(values_of(s.num_loss_tokens, s.index)) for s in sequences}
    result = critic.forward_backward(batch, ALGORITHM.critic.loss, old_logprobs=old)
    return result, whole_gradients(critic)


def run_critic_gradients(ranks: Ranks, model: str) -> dict[str, Any]:
    """Every step and budget; and memory that runs out on one rank, at every place."""
    worker = make_worker(model, ranks)
    assert worker.critic is not None
    results: dict[str, Any] = {}
    for step, lengths in STEPS.items():
        sequences = make_critic_sequences(*lengths, seed=3)
        for budget in (20, 10_000):
            result, gradient = critic_gradient(worker, sequences, budget)
            results[f"{step}/{budget}"] = (result.metrics["loss"], gradient)
    sequences = make_critic_sequences(*STEPS["uneven"], seed=3)
    for place in PLACES:
        unlucky = ranks.rank == ranks.world_size - 1
        memory = out_of_memory_over(14, place, worker.critic) if unlucky else nothing()
        results[f"memory/{place}"] = begun_again(
            worker.critic, lambda budget: critic_gradient(worker, sequences, budget), 10_000, memory
        )
    return results


def run_critic_steps(ranks: Ranks, model: str, root: str, resume: str = "") -> dict[str, Any]:
    """Three updates at rank 0's word, a checkpoint after the second: metrics, and the weights of policy and critic.

    With `resume` the third alone, from that checkpoint.
    """
    worker = make_worker(model, ranks, checkpoint=Path(root) / "step-2" if resume else None)
    assert worker.critic is not None
    workers = WorkerGroup(worker, ranks)
    updater = make_updater(workers)

    def command() -> dict[str, Any]:
        metrics = []
        for update in range(2 if resume else 0, 3):
            groups = random_groups([[3, 14, 9], [1, 6, 2], [8, 1, 30]], seed=3 + update)
            outputs = run_forward_only(workers, build_sequences(groups), ALGORITHM.forward_only_outputs)
            sequences = assign_advantages(groups, ALGORITHM, outputs)
            updates = updater.update(updater.pack(sequences), outputs, num_trajectories=9, steps_done=update + 1)
            metrics.append(updates.metrics)
            if update == 1:
                workers.call(Worker.save, Path(root), STATE, keep=1)
        return {"metrics": metrics}

    done = commanded(workers, command)
    return {**done, "policy": whole_weights(worker.engine), "critic": whole_weights(worker.critic)}


JOBS = {"critic_gradients": run_critic_gradients, "critic_steps": run_critic_steps}
