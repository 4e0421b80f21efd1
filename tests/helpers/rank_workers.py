"""What ranks do together in the tests of workers: rank 0 commands, the others serve."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cohort.algorithms import build_algorithm
from cohort.errors import TrainingError
from cohort.learner import TrainEngine
from cohort.metrics.resources import PeakMemory
from cohort.models import Policy, stream_weights
from cohort.ranks.collectives import PeerError, Ranks
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout import Sampler
from cohort.trainer.worker import Worker, keep_waiting, pack_batches, run_forward_only
from rank_engine import STEPS, make_engine, step_sequences, whole_gradients
from test_laws import ALGORITHMS

TIMEOUT_S = 5.0


def workers_of(engine: TrainEngine, ranks: Ranks) -> WorkerGroup[Worker]:
    worker = Worker(
        ranks=ranks,
        policy=engine.policy,
        algorithm=build_algorithm(ALGORITHMS["grpo"], max_completion_tokens=32),
        engine=engine,
        sampler=Sampler(engine.policy, end_token_ids=frozenset({1}), max_num_seqs=8),
        tokenizer=None,
        memory=PeakMemory(engine.policy.device),
    )
    return WorkerGroup(worker, ranks)


def sequences() -> Any:
    """Of the tests of logprobs: three groups, uneven lengths."""
    return step_sequences("grpo", *STEPS["uneven"])[1]


def commanded(workers: WorkerGroup[Any], command: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 makes of its commands; {} on the others, which do them."""
    if not workers.ranks.is_rank0:
        workers.serve()
        return {}
    try:
        return command()
    finally:
        workers.ranks.end_commands()


def run_logprobs(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """The logprobs of a step, by index."""
    workers = workers_of(make_engine(model, ranks, reference=reference), ranks)
    return commanded(workers, lambda: {"logprobs": run_forward_only(workers, sequences(), {"logprobs"}).logprobs})


def run_send_weights(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Weights for a receiver that takes all, for one that fails at the second, and lent: what came by on each rank."""
    workers = workers_of(make_engine(model, ranks, reference=reference), ranks)
    came: list[str] = []

    def counted(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream_weights(policy, dtype):
            came.append(name)
            yield name, tensor

    def fail(weights: Iterator[tuple[str, torch.Tensor]], handles: Mapping[str, Any]) -> None:
        next(weights), next(weights)
        raise TrainingError("the receiver has failed")

    def command() -> dict[str, Any]:
        received: dict[str, torch.Tensor] = {}
        workers.call_with_local(Worker.send_weights, lambda weights, _: received.update(weights), torch.float32)
        with pytest.raises(TrainingError, match="the receiver has failed"):
            workers.call_with_local(Worker.send_weights, fail, torch.float32)
        # the ranks are still in step
        workers.call_with_local(Worker.send_weights, lambda *_: None, torch.float32)
        lent: dict[str, torch.Tensor] = {}
        handles: dict[str, Any] = {}

        def borrow(weights: Iterator[tuple[str, torch.Tensor]], of_gpus: Mapping[str, Any]) -> None:
            handles.update(of_gpus)
            lent.update((name, tensor.clone()) for name, tensor in weights)  # the memory is used again

        workers.call_with_local(Worker.send_weights, borrow, torch.float32, share=True)
        return {"received": received, "lent": lent, "handles": sorted(handles)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.trainer.worker.stream_weights", counted)
        patch.setattr("cohort.rollout.engines.servers.cuda_ipc.gpu_uuid", lambda _: f"GPU-{ranks.rank}")
        patch.setattr("cohort.rollout.engines.servers.cuda_ipc.ipc_handle", lambda _: {})
        patch.setattr("cohort.rollout.engines.servers.cuda_ipc.BUCKET_BYTES", 4096)
        done = commanded(workers, command)
    return {**done, "came": ranks.gather(came)}


def run_waiting(ranks: Ranks, model: str, reference: str, keeps_waiting: str) -> dict[str, Any]:
    """Rank 0 waits for longer than the others' deadlines allow, twice as long, and says so or not."""
    deadline = timedelta(seconds=TIMEOUT_S)
    impatient = replace(
        ranks,
        timeout_s=TIMEOUT_S,
        control_group=dist.new_group(backend="gloo", timeout=deadline),
        command_group=dist.new_group(backend="gloo", timeout=deadline),
    )
    workers = workers_of(make_engine(model, ranks, reference=reference), impatient)

    def command() -> dict[str, Any]:
        began, counts = time.monotonic(), 0
        while time.monotonic() - began < 2 * TIMEOUT_S:
            if keeps_waiting == "yes":
                keep_waiting(workers)
                counts += 1
            time.sleep(0.01)
        return {"counts": counts, "logprobs": len(run_forward_only(workers, sequences(), {"logprobs"}).logprobs)}

    said, done = "", {}
    try:
        done = commanded(workers, command)
    except PeerError as error:
        said = str(error)
    return {**done, "said": ranks.gather(said)}


def run_mesh(ranks: Ranks, model: str) -> dict[str, Any]:
    """This rank's place in the device mesh, and the mesh that the weights are sharded over."""
    weight: Any = next(make_engine(model, ranks, reference=model).policy.model.parameters())
    mesh = weight.device_mesh
    where = {"dp": (ranks.dp_rank, ranks.dp_size), "weights": (mesh.get_local_rank(), mesh.size())}
    return {"axes": mesh.mesh_dim_names, "where": ranks.gather(where)}


class Failing:
    """A worker of which one rank fails."""

    def __init__(self, rank: int):
        self.rank = rank

    def add(self, shard: int, number: int, *, fails: int = -1) -> int:
        if self.rank == fails:
            raise TrainingError(f"rank {self.rank} has failed")
        return 100 * self.rank + shard + number


def run_calls(ranks: Ranks) -> dict[str, Any]:
    """Calls with shards and without, of which one fails on the last rank."""
    workers = WorkerGroup(Failing(ranks.rank), ranks)

    def command() -> dict[str, Any]:
        sharded = workers.scatter(Failing.add, [1, 2, 3], 10)
        with pytest.raises(TrainingError) as error:
            workers.call(Failing.add, 1, 2, fails=2)
        return {"sharded": sharded, "error": str(error.value), "same": workers.call(Failing.add, 1, number=2)}

    return commanded(workers, command)


class WithReplicas(Ranks):
    """Ranks of a mesh with a second axis, along which two ranks compute the same sequences."""

    @property
    def mesh_axes(self) -> dict[str, int]:
        return {"dp_shard": self.world_size // 2, "tp": 2}


def run_replicas(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Calls with shards and a step, which is packed again under half of its budget, on a mesh with two axes."""
    ranks = WithReplicas(**{field.name: getattr(ranks, field.name) for field in fields(ranks)})
    calls = WorkerGroup(Failing(ranks.rank), ranks)
    shards = commanded(calls, lambda: {"results": calls.scatter(Failing.add, range(ranks.dp_size), 10)})
    workers = workers_of(make_engine(model, ranks, reference=reference), ranks)

    def command() -> dict[str, Any]:
        first = workers.local.algorithm.coefficients(workers.local.algorithm.initial_coefficients)
        batches = pack_batches(workers.local.engine, sequences())
        # packed for another number of tokens than the engine has left: it packs them again
        too_large = [replace(batch, micro_batch_tokens=2 * batch.micro_batch_tokens) for batch in batches]
        logprobs = run_forward_only(workers, sequences(), {"logprobs"}).logprobs
        results = workers.scatter(Worker.forward_backward, too_large, "policy", first)
        return {"logprobs": logprobs, "steps": results}

    done = commanded(workers, command)
    return {**shards, **done, "gradients": whole_gradients(workers.local.engine)}


JOBS = {
    "calls": run_calls,
    "replicas": run_replicas,
    "mesh": run_mesh,
    "logprobs": run_logprobs,
    "send_weights": run_send_weights,
    "waiting": run_waiting,
}
