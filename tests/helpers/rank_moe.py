"""Mixtures of experts in the tests: steps with a loss of the routers, and what ranks do together with them."""

from typing import Any

import torch
from transformers import PreTrainedModel

import rank_engine
import test_laws
from cohort.config import AdamwConfig, ModelConfig
from cohort.learner import TrainEngine, TrainResult
from cohort.models import CollectiveCounter, Policy
from cohort.packing.batch import LossInputs, LossOutput
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.records import TrainSequence
from rank_engine import batches_of, begun_again, nothing, out_of_memory_over, whole_gradients, whole_weights
from tiny import random_sequences

COEFFICIENT = 0.7  # large, so that it is not lost beside the policy's loss
# A group that is a stream under the smaller budget, one-token completions, and a prompt alone.
GROUPS = [(5, [7, 1, 3]), (1, [1, 4]), (9, [6]), (30, [20, 13, 9])]
BUDGETS = (1, 45, 10_000)


def policy_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token_loss=-inputs.advantages * inputs.logprobs)


def sequences() -> list[TrainSequence]:
    return random_sequences(GROUPS)


def make_engine(policy: Policy, ranks: Ranks = SINGLE_PROCESS, **train: Any) -> TrainEngine:
    train = {"router_aux_loss_coef": COEFFICIENT, "learning_rate": 0.01, "micro_batch_tokens": 10_000, **train}
    return test_laws.make_engine(policy, optim=AdamwConfig(weight_decay=0.1), temperature=1.0, ranks=ranks, **train)


def step(engine: TrainEngine, budget: int) -> TrainResult:
    """Forward and backward of all sequences, spread over the ranks."""
    engine.budget.tokens = budget
    batches = batches_of(engine, sequences(), engine.ranks, budget)
    return engine.forward_backward(batches[engine.ranks.rank], policy_loss)


def naive(model: PreTrainedModel, coefficient: float = COEFFICIENT) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the routers, and the gradient of all: one unpadded forward pass per completion, one backward pass."""
    model.train()
    logits, loss = [], torch.zeros((), dtype=model.dtype)
    for s in sequences():
        ids = torch.from_numpy(s.token_ids).unsqueeze(0)
        out = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
        chosen = torch.log_softmax(out.logits[0], -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        loss = loss - (torch.from_numpy(s.loss_weights * s.advantages).to(chosen) * chosen[-s.num_loss_tokens :]).sum()
        logits.append(torch.stack([layer.reshape(-1, layer.shape[-1]) for layer in out.router_logits]))
    aux = switch_loss(torch.cat(logits, dim=1), model.config.num_experts_per_tok)
    (loss + coefficient * aux).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return aux.item(), grads


def switch_loss(logits_RNE: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Equation 4 of arXiv:2101.03961, of all routers' positions together."""
    p = torch.softmax(logits_RNE, -1).flatten(0, 1)
    chosen = p.topk(num_chosen, -1).indices
    f = torch.nn.functional.one_hot(chosen, p.shape[-1]).sum(1).to(p.dtype).mean(0)
    return p.shape[-1] * (f * p.mean(0)).sum()


def load(path: str, ranks: Ranks = SINGLE_PROCESS, **keys: Any) -> Policy:
    collectives = CollectiveCounter() if ranks.world_size > 1 else None
    return rank_engine.load(ModelConfig(path=path, **keys), ranks, collectives=collectives)


def run_balance(ranks: Ranks, path: str) -> dict[str, Any]:
    """Law 1: the gradient under every budget, with and without checkpointing, and in other layouts."""
    results = {}
    for way, keys in {"": {}, "checkpointing": {"gradient_checkpointing": True}}.items():
        engine = make_engine(load(path, ranks, **keys), ranks)
        for budget in BUDGETS:
            metrics = step(engine, budget).metrics
            results[f"{way}/{budget}"] = (dict(metrics), whole_gradients(engine))
    return results


def run_out_of_memory(ranks: Ranks, path: str) -> dict[str, Any]:
    """Memory runs out on the last rank, in its first micro-batch and in its second."""
    engine = make_engine(load(path, ranks), ranks)
    results = {}
    for place, number in (("backward mlp 1", 1), ("backward mlp 0", 2)):
        unlucky = ranks.rank == ranks.world_size - 1
        memory = out_of_memory_over(0, place, engine, only=number) if unlucky else nothing()
        results[place] = begun_again(engine, lambda budget: (step(engine, budget), whole_gradients(engine)), 45, memory)
    return results


def run_frozen(ranks: Ranks, path: str) -> dict[str, Any]:
    """Three updates with frozen routers and a frozen embedding: weights before and after."""
    frozen = ("routers", "model.embed_tokens.*")
    engine = make_engine(load(path, ranks, freeze=frozen), ranks, router_aux_loss_coef=0.0)
    before = {name: weight.clone() for name, weight in whole_weights(engine).items()}
    for _ in range(3):
        step(engine, 45)
        without = [name for name, p in engine.policy.model.named_parameters() if p.grad is None]
        engine.optim_step()
    state = engine.state_dict()["optimizer"]["state"]
    return {"before": before, "after": whole_weights(engine), "no gradient": without, "state": list(state)}


def check_frozen(results: dict[str, Any]) -> None:
    """Of `run_frozen`: frozen weights are the same bit for bit, and nothing is computed or kept for them."""
    before, after = results["before"], results["after"]
    frozen = {name for name in before if "mlp.gate.weight" in name or "embed_tokens" in name}
    assert len(frozen) == 3 == len(results["no gradient"])
    assert frozen == {name for name in before if torch.equal(before[name], after[name])} == set(results["no gradient"])
    assert not frozen.intersection(results["state"]) and results["state"]


JOBS = {"moe_balance": run_balance, "moe_out_of_memory": run_out_of_memory, "moe_frozen": run_frozen}
