"""What ranks do together in the tests of adapters."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import test_laws
from adapters import KINDS
from cohort.config import AdapterConfig, ModelConfig
from cohort.learner import TrainEngine
from cohort.models.loading.meta_device import named_saved_tensors
from cohort.ranks.collectives import Ranks
from cohort.records import Prompt
from cohort.rollout import Sampler, SampleRequest, SamplingParams, StepKey
from rank_engine import (
    STEPS,
    batches_of,
    begun_again,
    load,
    nothing,
    out_of_memory_over,
    resume_engine,
    save_engine,
    step_sequences,
)
from test_laws import old_logprobs_of

BUDGETS = (20, 10_000)
WAYS = (("lora", False), ("lora", True), ("dora", False), ("outer", True))  # kind, and whether it started from another
LENGTHS = {name: STEPS[name] for name in ("uneven", "long prompts", "turns")}
PLACES = ("forward mlp 0", "backward mlp 0", "backward self_attn 1", "forward reference", "backward head")


def make_engine(
    ranks: Ranks,
    model: str,
    start: str | None,
    current: str | None,
    *,
    adapter: dict[str, Any] | None = None,
    **other: Any,
) -> TrainEngine:
    """An engine whose adapter is that in `current`; the reference has that in `start`, or none."""
    train = {"learning_rate": 0.01, "micro_batch_tokens": 10_000, **other.pop("train", {})}
    given = {"path": start} if start else adapter or {}
    config = ModelConfig(path=model, adapter=AdapterConfig(**given), **{"dtype": "float64", **other})
    checkpoint = None if current is None else Path(current)
    policy = load(config, ranks, adapter_checkpoint=checkpoint, keep_reference=True, seed=5)
    return test_laws.make_engine(policy, policy.as_reference(), ranks=ranks, **train)


def adapter_gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Of the adapter by name in its file, whole on every rank; nothing else has one. Cleared afterwards."""
    tensors = engine.policy.adapter.tensors()
    trained = {id(t) for t in tensors.values()}
    assert all(p.grad is None for p in engine.policy.model.parameters() if id(p) not in trained)
    whole = {k: t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad.clone() for k, t in tensors.items()}
    engine.policy.model.zero_grad(set_to_none=True)
    return whole


def gradient(engine: TrainEngine, algorithm: Any, sequences: Any, ranks: Ranks, budget: int) -> tuple[Any, Any]:
    batch = batches_of(engine, sequences, ranks, budget)[ranks.rank]
    old = {s.index: old_logprobs_of(s) for s in sequences}
    result = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
    return result, adapter_gradients(engine)


def base_digest(engine: TrainEngine) -> str:
    """Of this rank's part of the model's own weights."""
    digest = hashlib.sha256()
    for name, tensor in named_saved_tensors(engine.policy.model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(
            f"{name} {local.dtype}".encode() + local.detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def run_adapter_gradients(ranks: Ranks, model: str, kind: str, start: str, current: str) -> dict[str, Any]:
    """Law 1 with a kind of adapter; `start`: the folder of what the run started from, or nothing."""
    results = {}
    engine = make_engine(ranks, model, start or None, current, adapter=KINDS[kind])
    for step, lengths in LENGTHS.items():
        algorithm, sequences = step_sequences("grpo_kl", *lengths)
        shuffled = [sequences[n] for n in np.random.default_rng(1).permutation(len(sequences))]
        for budget in BUDGETS:
            result, gradients = gradient(engine, algorithm, shuffled, ranks, budget)
            results[f"{step}/{budget}"] = (result.metrics["loss"], gradients)
    return results


def run_adapter_out_of_memory(ranks: Ranks, model: str, current: str) -> dict[str, Any]:
    """Memory runs out on one rank, at every place of forward and backward."""
    engine = make_engine(ranks, model, None, current, adapter=KINDS["lora"])
    algorithm, sequences = step_sequences("grpo_kl", [[3, 14, 9], [10, 6, 2], [8, 12, 7], [5, 5, 5], [13, 1, 4]])
    results: dict[str, Any] = {"expected": gradient(engine, algorithm, sequences, ranks, 10_000)[1]}
    unlucky = ranks.world_size - 1
    for place in PLACES:
        memory = out_of_memory_over(30, place, engine) if ranks.rank == unlucky else nothing()
        results[place] = begun_again(
            engine, lambda budget: gradient(engine, algorithm, sequences, ranks, budget), 10_000, memory
        )
    return results


def run_adapter_updates(ranks: Ranks, model: str, root: str, resume: str) -> dict[str, Any]:
    """A new adapter: two updates, a checkpoint, two more; or the last two from the checkpoint."""
    folder = Path(root) / "step-2"
    current = str(folder) if resume == "resume" else None
    engine = make_engine(ranks, model, None, current, adapter=KINDS["lora"], dtype="float32")
    before, first = base_digest(engine), engine.policy.adapter.full_weights()
    if resume == "resume":
        resume_engine(engine, ranks, folder)
    for update in range(engine.updates_done, 4):
        algorithm, sequences = step_sequences("grpo_kl", *STEPS["uneven"], seed=update)
        engine.forward_backward(batches_of(engine, sequences, ranks, 30)[ranks.rank], algorithm.policy_loss)
        engine.optim_step()
        if update == 1 and resume != "resume":
            save_engine(engine, ranks, Path(root), model)
    return {
        "first": first,
        "weights": engine.policy.adapter.full_weights(),
        "frozen": ranks.gather(base_digest(engine) == before),
    }


MODES: dict[str, dict[str, Any]] = {
    "float64": {},
    "checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "gradients in forward": {"train": {"gradients_in_forward": True}},
    "whole": {},
    "bfloat16": {"dtype": "bfloat16"},
    "mixed": {"dtype": "float32", "compute_dtype": "bfloat16"},
}


def run_adapter_way(ranks: Ranks, model: str, current: str, way: str) -> dict[str, Any]:
    """Another way to compute or to load, with two updates: gradients, dtypes, and whether the base is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "whole":  # as if the files had to be converted
            patch.setattr("cohort.models.loading.load_model.match_weights", lambda *_: None)
        engine = make_engine(ranks, model, None, current, adapter=KINDS["lora"], **MODES[way])
    before, gradients = base_digest(engine), []
    for step, budget in (("long prompts", 20), ("uneven", 20)):
        algorithm, sequences = step_sequences("grpo_kl", *STEPS[step])
        gradients.append(gradient(engine, algorithm, sequences, ranks, budget)[1])
    for _ in range(2):
        engine.forward_backward(batches_of(engine, sequences, ranks, 20)[ranks.rank], algorithm.policy_loss)
        engine.optim_step()
    state = engine.state_dict()["optimizer"]["state"]
    return {
        "gradients": gradients,
        "frozen": ranks.gather(base_digest(engine) == before),
        "base": {t.dtype for _, t in named_saved_tensors(engine.policy.model)},
        "adapter": {t.dtype for t in engine.policy.adapter.tensors().values()},
        "states": {s["exp_avg"].dtype for s in state.values()},
        "num_states": len(state),
    }


def run_adapter_sampling(ranks: Ranks, model: str, current: str) -> dict[str, Any]:
    """What every rank samples of the same prompts."""
    policy = make_engine(ranks, model, None, current, adapter=KINDS["lora"]).policy
    prompts = [Prompt(id=n, epoch=0, content="", token_ids=np.arange(3, 8 + n), columns={}) for n in range(3)]
    sampler = Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8)
    sampling = SamplingParams(num_generations=4, max_completion_tokens=10, temperature=1.0)
    key = StepKey(purpose="train", seed=0, step=0)
    sampled = sampler.sample(
        [
            SampleRequest(token_ids=p.token_ids, sampling=sampling, keys=tuple(key.call(p, i) for i in range(4)))
            for p in prompts
        ]
    )
    return {"tokens": ranks.gather([s.token_ids.tolist() for s in sampled]), "layout": policy.layout}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "adapter_gradients": run_adapter_gradients,
    "adapter_out_of_memory": run_adapter_out_of_memory,
    "adapter_updates": run_adapter_updates,
    "adapter_way": run_adapter_way,
    "adapter_sampling": run_adapter_sampling,
}
