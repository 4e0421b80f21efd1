"""What ranks do together in the tests of the crew: rank 0 commands, the others serve."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cohort.algorithms import build_algorithm
from cohort.distributed import PeerError, Ranks
from cohort.engine import TrainEngine
from cohort.errors import TrainingError
from cohort.metrics import PeakMemory
from cohort.policy import Policy, stream_weights
from cohort.rollout import Sampler
from cohort.trainer.crew import Crew
from rank_engine import STEPS, make_engine, step_sequences
from test_laws import ALGORITHMS

TIMEOUT_S = 5.0


def crew_of(engine: TrainEngine, ranks: Ranks) -> Crew:
    return Crew(
        ranks=ranks,
        policy=engine.policy,
        algorithm=build_algorithm(ALGORITHMS["grpo"], max_completion_tokens=32),
        engine=engine,
        sampler=Sampler(engine.policy, end_token_ids=frozenset({1}), max_num_seqs=8),
        tokenizer=None,
        memory=PeakMemory(engine.policy.device),
    )


def sequences() -> Any:
    """Of the tests of the crew's logprobs: three groups, uneven lengths."""
    return step_sequences("grpo", *STEPS["uneven"])[1]


def commanded(crew: Crew, command: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 makes of its commands; {} on the others, which do them."""
    if not crew.ranks.is_first:
        crew.serve()
        return {}
    try:
        return command()
    finally:
        crew.stop()


def run_logprobs(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """The logprobs of a step, by index."""
    crew = crew_of(make_engine(model, ranks, reference=reference), ranks)
    return commanded(crew, lambda: {"logprobs": crew.estimate(sequences(), {"logprobs"}).logprobs})


def run_send_weights(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Weights for a receiver that takes all, for one that fails at the second, and lent: what came by on each rank."""
    crew = crew_of(make_engine(model, ranks, reference=reference), ranks)
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
        crew.send_weights(torch.float32, lambda weights, _: received.update(weights))
        with pytest.raises(TrainingError, match="the receiver has failed"):
            crew.send_weights(torch.float32, fail)
        crew.send_weights(torch.float32, lambda *_: None)  # they are in step still, and the failed one is forgotten
        lent: dict[str, torch.Tensor] = {}
        handles: dict[str, Any] = {}

        def borrow(weights: Iterator[tuple[str, torch.Tensor]], of_gpus: Mapping[str, Any]) -> None:
            handles.update(of_gpus)
            lent.update((name, tensor.clone()) for name, tensor in weights)  # the memory is used again

        crew.send_weights(torch.float32, borrow, lend=True)
        return {"received": received, "lent": lent, "handles": sorted(handles)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cohort.trainer.crew.stream_weights", counted)
        patch.setattr("cohort.rollout.vllm.lending.gpu_uuid", lambda _: f"GPU-{ranks.rank}")
        patch.setattr("cohort.rollout.vllm.lending.handle_of", lambda _: {})
        patch.setattr("cohort.rollout.vllm.lending.PORTION_BYTES", 4096)
        done = commanded(crew, command)
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
    crew = crew_of(make_engine(model, ranks, reference=reference), impatient)

    def command() -> dict[str, Any]:
        began, counts = time.monotonic(), 0
        while time.monotonic() - began < 2 * TIMEOUT_S:
            if keeps_waiting == "yes":
                crew.keep_waiting()
                counts += 1
            time.sleep(0.01)
        return {"counts": counts, "logprobs": len(crew.estimate(sequences(), {"logprobs"}).logprobs)}

    said, done = "", {}
    try:
        done = commanded(crew, command)
    except PeerError as error:
        said = str(error)
    return {**done, "said": ranks.gather(said)}


JOBS = {"logprobs": run_logprobs, "send_weights": run_send_weights, "waiting": run_waiting}
