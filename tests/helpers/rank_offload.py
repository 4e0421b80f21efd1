"""What ranks do together in the tests of host memory and of resharding, each job in all of them."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import test_laws
from cohort.config import Adamw8bitConfig, AdamwConfig, ModelConfig, MuonConfig, OptimConfig, SgdConfig
from cohort.learner import TrainEngine
from cohort.learner.optimizer_offload import to_local
from cohort.models import fsdp
from cohort.models.host_memory import PinnedMemory
from cohort.models.saving import stream_weights
from cohort.ranks.collectives import Ranks
from rank_engine import (
    MANY,
    STEPS,
    batches_of,
    gradient,
    load,
    nothing,
    out_of_memory_over,
    resume_engine,
    save_engine,
    step_sequences,
)
from tiny import relative_error

BFLOAT16, MIXED = {"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}
# name -> the `optim` section, and the `model` section's dtypes
MODES: dict[str, tuple[OptimConfig, dict[str, Any]]] = {
    "adamw": (AdamwConfig(weight_decay=0.1), {}),
    "offloaded": (AdamwConfig(weight_decay=0.1, offload=True), {}),
    "mixed": (AdamwConfig(weight_decay=0.1), MIXED),
    "mixed, offloaded": (AdamwConfig(weight_decay=0.1, offload=True), MIXED),
    "parameters": (AdamwConfig(weight_decay=0.1), {"parameter_offload": True}),
    "mixed, parameters": (AdamwConfig(weight_decay=0.1), {**MIXED, "parameter_offload": True}),
    "bfloat16": (AdamwConfig(weight_decay=0.1), BFLOAT16),
    "bfloat16, muon": (MuonConfig(), BFLOAT16),
    "bfloat16, parameters": (AdamwConfig(weight_decay=0.1), {**BFLOAT16, "parameter_offload": True}),
    "sgd": (SgdConfig(momentum=0.9, weight_decay=0.1), {}),
    "sgd, offloaded": (SgdConfig(momentum=0.9, weight_decay=0.1, offload=True), {}),
    "8 bits": (Adamw8bitConfig(), {}),
    "8 bits, offloaded": (Adamw8bitConfig(offload=True), {}),
    "at random": (AdamwConfig(stochastic_rounding=True), BFLOAT16),
    "at random, muon": (MuonConfig(stochastic_rounding=True), BFLOAT16),
    "at random, 8 bits": (Adamw8bitConfig(stochastic_rounding=True), BFLOAT16),
}


def make_engine(model: str, ranks: Ranks, mode: str, *, reshard: bool | int = True, **train: Any) -> TrainEngine:
    optim, dtypes = MODES[mode]
    config = ModelConfig(path=model, **dtypes)
    policy = load(config, ranks, offload_master_weights=optim.offload, reshard_after_forward=reshard)
    train = {"learning_rate": 0.003, "micro_batch_tokens": 10_000, **train}
    return test_laws.make_engine(policy, optim=optim, ranks=ranks, **train)


def whole_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """What is saved."""
    return {name: weight.clone() for name, weight in stream_weights(engine.policy)}


def update(engine: TrainEngine, ranks: Ranks, number: int, *, budget: int = 30) -> float:
    """One step on sequences of its own; the gradient's norm."""
    algorithm, sequences = step_sequences("dapo", *STEPS["uneven"], seed=number)
    engine.forward_backward(batches_of(engine, sequences, ranks, budget)[ranks.rank], algorithm.policy_loss)
    return engine.optim_step().grad_norm


def run_trajectory(ranks: Ranks, model: str, mode: str, steps: int, budget: int = 30) -> dict[str, Any]:
    """Updates from the start."""
    engine = make_engine(model, ranks, mode)
    norms = [update(engine, ranks, number, budget=budget) for number in range(steps)]
    return {"weights": whole_weights(engine), "norms": norms}


def run_saved(ranks: Ranks, model: str, mode: str, root: str) -> dict[str, Any]:
    """Two updates, a checkpoint, two more."""
    engine = make_engine(model, ranks, mode)
    for number in range(4):
        update(engine, ranks, number)
        if number == 1:
            save_engine(engine, ranks, Path(root) / mode, model)
    return {"weights": whole_weights(engine)}


def run_resumed(ranks: Ranks, model: str, mode: str, root: str) -> dict[str, Any]:
    """The last two updates, from the checkpoint."""
    folder = Path(root) / mode / "step-2"
    engine = make_engine(str(folder), ranks, mode)
    resume_engine(engine, ranks, folder)
    for number in range(engine.updates_done, 4):
        update(engine, ranks, number)
    return {"weights": whole_weights(engine)}


def run_sum(ranks: Ranks, model: str, mode: str, micro_batches: int) -> dict[str, Any]:
    """A step of so many micro-batches of one completion, against the sum in float64 of what each of them gives."""
    engine = make_engine(model, ranks, mode)
    algorithm, sequences = step_sequences("dapo", [[5, 9, 3, 7]] * (micro_batches // 4))
    exact: dict[str, torch.Tensor] = {}
    for sequence in sequences:
        _, alone = gradient(engine, algorithm, [sequence], ranks, 10_000)
        exact = {name: exact.get(name, 0) + x.double() for name, x in alone.items()}
    _, whole = gradient(engine, algorithm, sequences, ranks, 10_000)
    result, together = gradient(engine, algorithm, sequences, ranks, 1)
    engine.forward_backward(None, algorithm.policy_loss)
    exact_norm = torch.nn.utils.get_total_norm(list(exact.values())).item()
    return {
        "micro_batches": result.num_micro_batches,
        "in one": max(relative_error(whole[name], x) for name, x in exact.items()),
        "error": max(relative_error(together[name], x) for name, x in exact.items()),
        "norm error": engine.optim_step().grad_norm / exact_norm - 1,
    }


def run_resharding(ranks: Ranks, model: str) -> dict[str, Any]:
    """The gradient of a step and the collectives that it took, by what happens to gathered weights; memory runs out."""
    results: dict[str, Any] = {}
    policies: tuple[bool | int, ...] = (True, False) if ranks.world_size < 4 else (True, False, 2)
    for reshard in policies:
        engine = make_engine(model, ranks, "adamw", reshard=reshard)
        algorithm, sequences = step_sequences("dapo", MANY)
        gathers: list[int] = []
        with patch.object(fsdp, "_all_gather", counted(fsdp._all_gather, gathers)):
            whole = gradient(engine, algorithm, sequences, ranks, 10_000)
        streamed = gradient(engine, *step_sequences("dapo", *STEPS["long prompts"]), ranks, 20)
        engine.budget.tokens = 10_000
        unlucky = ranks.rank == ranks.world_size - 1
        with out_of_memory_over(30, "backward mlp 0", engine) if unlucky else nothing():
            recovered = gradient(engine, algorithm, sequences, ranks, 10_000)
        with torch.no_grad(), engine.policy.unsharded():  # as the sampler does, in between
            pass
        engine.budget.tokens = 10_000
        again = gradient(engine, algorithm, sequences, ranks, 10_000)
        results[str(reshard)] = {
            "gradients": [whole[1], recovered[1], again[1], streamed[1]],
            "out of memory": recovered[0].num_out_of_memory,
            "gathers": len(gathers),
            "layers": len(engine.policy.model.model.layers),
            "elements": sum(gathers),
        }
    return results


def run_place(ranks: Ranks, model: str) -> dict[str, Any]:
    """Whether sharded weights on the host, padded ones too, stay in the memory that was taken for them."""
    taken: list[torch.Tensor] = []

    def take(num_bytes: int, device: torch.device) -> PinnedMemory:
        memory = PinnedMemory(num_bytes, device)
        taken.append(memory._bytes)
        return memory

    with patch.object(fsdp, "PinnedMemory", take):
        engine = make_engine(model, ranks, "parameters")
    update(engine, ranks, 0)
    assert engine.policy.sharding is not None
    parameters = [p for group in engine.policy.sharding._groups() for p in group.fsdp_params]
    storages = {p._sharded_param_data.untyped_storage().data_ptr() for p in parameters}
    storages |= {
        to_local(p).untyped_storage().data_ptr() for p in engine.policy.model.parameters() if to_local(p).numel()
    }
    padded = sum(p._sharded_param_data.numel() > p.sharded_param._local_tensor.numel() for p in parameters)
    return {
        "stay": ranks.all_reduce_min(storages == {taken[0].untyped_storage().data_ptr()}) == 1,
        "padded": ranks.all_reduce_max(padded),
    }


def counted(call: Any, sizes: list[int]) -> Any:
    """The same call, whose output's size is noted."""

    def counting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(output.numel())
        return call(output, *args, **kwargs)

    return counting


def eager(job: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """With torchao's step not compiled, which would take a minute."""

    @wraps(job)
    def run(*args: Any) -> dict[str, Any]:
        with torch.compiler.set_stance("force_eager"):
            return job(*args)

    return run


JOBS = {
    "trajectory": eager(run_trajectory),
    "saved": eager(run_saved),
    "resumed": eager(run_resumed),
    "resharding": run_resharding,
    "sum": run_sum,
    "place": run_place,
}
