"""What ranks do together in the tests of the engine, each job in all of them; and the steps that they do it with."""

import itertools
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import test_laws
from assigned import assign_advantages
from cohort.algorithms import build_algorithm, drop_zero_gradient
from cohort.config import (
    AdafactorConfig,
    Adamw8bitConfig,
    AdamwConfig,
    ModelConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from cohort.errors import StopRequested
from cohort.learner import TrainEngine, TrainResult, WorstCaseShard, find_budget
from cohort.models import (
    CollectiveCounter,
    LoadRequest,
    Policy,
    activation_checkpointing,
    fsdp,
    load_policy,
    load_tokenizer,
)
from cohort.models.activation_checkpointing import enable_offload
from cohort.models.saving import stream_weights
from cohort.packing import pack
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.stopping import StopSignals
from cohort.trainer.checkpoint import TrainerState, load_engine_state, save_checkpoint
from samples import History
from test_laws import ALGORITHMS, old_logprobs_of, random_groups

CPU = torch.device("cpu")
# Uneven lengths and a step of one prompt: with three ranks and small budgets some of them have nothing to do.
# Groups with long prompts are streams under the smaller budgets: one of them for two ranks, and two.
SHORT, LONG = (1, 9), (290, 310)
TURNS: History = [(True, [(0, 3), (2, 5), (4, 1)])]  # one sequence whose contexts are not trained
REWRITTEN: History = [(True, [(0, 2), (3, 1)]), (True, [(2, 6)]), (False, [(4, 3)])]  # three sequences
STEPS: dict[str, tuple[list[list[Any]], tuple[int, int]]] = {
    "uneven": ([[3, 14, 9], [1, 6, 2], [8, 1, 30]], SHORT),
    "one prompt": ([[5, 11, 2]], SHORT),
    "long prompts": ([[3, 14, 9], [20, 1, 6]], LONG),
    "one long prompt": ([[1, 12, 2, 8, 5, 3, 1]], LONG),
    "turns": ([[TURNS, 14, REWRITTEN], [1, 6, TURNS], [REWRITTEN, 1, 9]], SHORT),
}
BUDGETS = (1, 20, 320, 10_000)
# Of the other steps each budget that splits it in another way: the short ones are one row from 320 tokens on
SPLITS = [
    *(f"uneven/{budget}" for budget in BUDGETS),
    *("one prompt/1", "one prompt/10000", "turns/20", "turns/10000"),
    *("long prompts/20", "long prompts/10000", "one long prompt/1", "one long prompt/320"),
]
# One row on each rank, and several: of micro-batches and of streams, some ranks having nothing to do
FEW_SPLITS = ["uneven/20", "one prompt/20", "long prompts/20", "one long prompt/320", "turns/10000"]
OPTIMIZERS: dict[str, OptimConfig] = {
    "adamw": AdamwConfig(),
    "adamw_8bit": Adamw8bitConfig(),
    "adafactor": AdafactorConfig(),
    "muon": MuonConfig(weight_decay=0.1),
    "sgd": SgdConfig(momentum=0.9),
}
MANY = [[3, 14, 9], [10, 6, 2], [8, 12, 7], [5, 5, 5], [13, 1, 4]]


def make_engine(
    model: str,
    ranks: Ranks,
    *,
    reference: str,
    reference_changes: bool = False,
    precision: dict[str, Any] | None = None,
    optim: OptimConfig | None = None,
    **train: Any,
) -> TrainEngine:
    dtypes, collectives = precision or {"dtype": "float64"}, CollectiveCounter()
    return test_laws.make_engine(
        load(ModelConfig(path=model, **dtypes), ranks, collectives=collectives),
        load(ModelConfig(path=reference, **dtypes), ranks, collectives=collectives, trainable=False),
        optim=optim,
        reference_changes=reference_changes,
        ranks=ranks,
        micro_batch_tokens=10_000,
        **train,
    )


def load(config: ModelConfig, ranks: Ranks, **options: Any) -> Policy:
    """A policy on the CPU; `options` are those of a `LoadRequest`."""
    tokenizer = load_tokenizer(config) if ranks.is_rank0 else None
    options = {"collectives": CollectiveCounter(), **options}
    return load_policy(LoadRequest(config, device=CPU, tokenizer=tokenizer, ranks=ranks, **options))


def save_engine(engine: TrainEngine, ranks: Ranks, root: Path, model: str) -> None:
    """Save the checkpoint step-2 in `root`."""
    save_checkpoint(
        root,
        policy=engine.policy,
        tokenizer=load_tokenizer(ModelConfig(path=model)) if ranks.is_rank0 else None,
        engine_state=engine.state_dict(),
        state=trainer_state(ranks.world_size),
        keep=1,
        ranks=ranks,
    )


def resume_engine(engine: TrainEngine, ranks: Ranks, folder: Path) -> None:
    """Give the engine the state of a checkpoint."""
    state = engine.state_dict()
    load_engine_state(folder, state, ranks)
    engine.load_state_dict(state)


def whole_gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, whole on every rank; cleared afterwards."""
    gradients = {}
    for name, parameter in engine.policy.model.named_parameters():
        gradient = parameter.grad
        gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    engine.policy.model.zero_grad(set_to_none=True)
    return gradients


def step_sequences(name: str, lengths_PG: list[list[Any]], prompt_tokens: tuple[int, int] = SHORT, *, seed: int = 0):
    algorithm = build_algorithm(ALGORITHMS[name], max_completion_tokens=32)
    return algorithm, assign_advantages(random_groups(lengths_PG, seed, prompt_tokens), algorithm)


def batches_of(engine: TrainEngine, sequences, ranks: Ranks, budget: int):
    layout = engine.policy.layout
    return pack(
        sequences,
        micro_batch_tokens=budget,
        dp_size=ranks.dp_size,
        share_prompts=layout == "shared",
        padded=layout == "padded",
    )


def gradient(engine: TrainEngine, algorithm, sequences, ranks: Ranks, budget: int):
    batch = batches_of(engine, sequences, ranks, budget)[ranks.rank]
    old = {s.index: old_logprobs_of(s) for s in sequences}
    result = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
    return result, whole_gradients(engine)


def run_gradients(ranks: Ranks, model: str, reference: str, name: str, *splits: str) -> dict[str, Any]:
    """Law 1: an algorithm with steps and budgets, "step/budget", in a shuffled order."""
    results = {}
    engine = make_engine(model, ranks, reference=reference)
    for split in splits:
        step, budget = split.split("/")
        algorithm, sequences = step_sequences(name, *STEPS[step])
        shuffled = [sequences[n] for n in np.random.default_rng(1).permutation(len(sequences))]
        result, gradients = gradient(engine, algorithm, shuffled, ranks, int(budget))
        results[split] = (result.metrics["loss"], gradients, result.num_micro_batches)
    return results


def run_collectives(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Bytes that FSDP2 moves in a step by collective, and the number of micro-batches."""
    engine, moved = make_engine(model, ranks, reference=reference), Counter()

    def counted(name: str) -> Any:
        collective = getattr(fsdp, name)

        def count(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
            moved[name] += max(output.nbytes, input.nbytes)
            return collective(output, input, **options)

        return mock.patch.object(fsdp, name, count)

    algorithm, sequences = step_sequences("dapo", *STEPS["long prompts"])
    with counted("_all_gather"), counted("_reduce_scatter"):
        result, _ = gradient(engine, algorithm, sequences, ranks, 20)
    return {**moved, "micro-batches": result.num_micro_batches}


def run_updates(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Gradients clipped and applied, twice; and an update of which nothing has a gradient."""
    engine = make_engine(
        model, ranks, reference=reference, learning_rate=0.01, max_grad_norm=0.05, optim=AdamwConfig(weight_decay=0.1)
    )
    norms = []
    for update in range(2):
        algorithm, sequences = step_sequences("dapo_kl_masked", *STEPS["uneven"], seed=update)
        batch = batches_of(engine, drop_zero_gradient(sequences, algorithm), ranks, 20)[ranks.rank]
        engine.forward_backward(batch, algorithm.policy_loss)
        norms.append(engine.optim_step().grad_norm)
    engine.forward_backward(batches_of(engine, [], ranks, 20)[ranks.rank], algorithm.policy_loss)
    assert engine.optim_step().grad_norm == 0
    return {"norms": norms, "weights": whole_weights(engine)}


def trainer_state(processes: int) -> TrainerState:
    """State of a run after two steps, for checkpoints."""
    return TrainerState(
        steps_done=2,
        data={},
        pending=[],
        num_tokens=0,
        seconds=0,
        micro_batch_tokens=1,
        micro_batch_tokens_wanted=1,
        processes=processes,
        control={},
    )


def whole_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return get_model_state_dict(engine.policy.model, options=StateDictOptions(full_state_dict=True))


def run_out_of_memory(ranks: Ranks, model: str, reference: str, key: str) -> dict[str, Any]:
    """Memory runs out on one rank, at every place of forward and backward; `key`: of the `model` section, set true.

    On rows of more than 30 tokens, whenever they come; and on the second row that comes, when the first has left its
    gradient.
    """
    precision = {"dtype": "float64", **({key: True} if key else {})}
    engine = make_engine(model, ranks, reference=reference, precision=precision)
    algorithm, sequences = step_sequences("grpo_kl", MANY[: 2 * ranks.world_size])

    def compute(budget: int) -> Computed:
        return gradient(engine, algorithm, sequences, ranks, budget)

    results: dict[str, Any] = {"expected": compute(10_000)[1]}
    unlucky = ranks.world_size - 1
    for place in places(engine):
        limits = [(10_000, 30, None), (32, 0, 2)]
        for budget, tokens, only in limits[
            : 1 if place == "forward reference" else 2
        ]:  # the whole step is one row there
            memory = out_of_memory_over(tokens, place, engine, only=only) if ranks.rank == unlucky else nothing()
            results[f"{place}/{budget}"] = begun_again(engine, compute, budget, memory)
    return results


def run_out_of_memory_in_a_stream(ranks: Ranks, model: str, reference: str, key: str) -> dict[str, Any]:
    """The same in a part of a stream, on one rank, while the others have streams of their own; no old logprobs."""
    precision = {"dtype": "float64", **({key: True} if key else {})}
    engine = make_engine(model, ranks, reference=reference, precision=precision)
    algorithm, sequences = step_sequences(
        "grpo_kl", [[30, 14, 25, 1, 31, 8, 12, 9, 2, 16, 19, 7]] * ranks.world_size, LONG
    )

    def compute(budget: int) -> Computed:
        batch = batches_of(engine, sequences, ranks, budget)[ranks.rank]
        result = engine.forward_backward(batch, algorithm.policy_loss)
        return result, whole_gradients(engine) | {f"old {n}": x for n, x in engine.old_outputs.items()}

    results: dict[str, Any] = {"expected": compute(10_000)[1]}
    unlucky = ranks.world_size - 1
    assert any(batch.split_groups for batch in batches_of(engine, sequences, ranks, 340))
    cases = {"forward mlp 0": 2, "forward self_attn 1": None, "backward mlp 0": 2, "backward self_attn 1": None}
    for place, only in cases.items():
        limited = out_of_memory_over(30, place, engine, most=200, only=only)
        memory = limited if ranks.rank == unlucky else nothing()
        results[f"{place}/{only}"] = begun_again(engine, compute, 340, memory)
    return results


def run_out_of_memory_on_nothing(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """Memory runs out once on a rank that only keeps step, while the first has a stream of three parts.

    Its rows of one token are: the prompt forward, three micro-batches, the prompt backward.
    """
    engine = make_engine(model, ranks, reference=reference)
    algorithm, sequences = step_sequences("dapo", [[12, 8, 9]], (300, 301))
    old = {s.index: old_logprobs_of(s) for s in sequences}

    def compute(budget: int) -> Computed:
        if budget == 310:
            (batch,) = batches_of(engine, sequences if ranks.is_rank0 else [], SINGLE_PROCESS, budget)
            assert len(batch.split_groups) == ranks.is_rank0 and all(len(parts) == 3 for parts in batch.split_groups)
        else:
            batch = batches_of(engine, sequences, ranks, budget)[ranks.rank]
        result = engine.forward_backward(batch, algorithm.policy_loss, old_logprobs=old)
        return result, whole_gradients(engine)

    results: dict[str, Any] = {}
    for way, number in (("forward", 1), ("forward", 3), ("backward", 2), ("backward", 4)):
        limited = out_of_memory_over(0, f"{way} mlp 1", engine, most=1, only=number)
        memory = limited if ranks.rank == ranks.world_size - 1 else nothing()
        results[f"{way}/{number}"] = begun_again(engine, compute, 310, memory)
    return results


def run_out_of_memory_later(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """In the second pass over a batch, whose old logprobs are the first's: they follow their sequences."""

    def second(budget: int, memory: AbstractContextManager[None] | None = None) -> tuple[int, Any]:
        engine = make_engine(model, ranks, reference=reference, learning_rate=0.01)
        algorithm, sequences = step_sequences("grpo_kl", MANY)
        engine.forward_backward(batches_of(engine, sequences, ranks, 10_000)[ranks.rank], algorithm.policy_loss)
        engine.optim_step()
        engine.budget.tokens = budget
        unlucky = memory is None and ranks.rank == ranks.world_size - 1
        with out_of_memory_over(30, "backward mlp 0", engine) if unlucky else nothing():
            result = engine.forward_backward(None, algorithm.policy_loss)
        return engine.budget.tokens, (result, whole_gradients(engine), engine.policy.layout)

    budget, (result, actual, layout) = second(10_000)
    _, (expected_result, expected, _) = second(budget, nothing())
    return {
        "layout": layout,
        "out of memory": result.num_out_of_memory,
        "different": differences((result, actual), (expected_result, expected)),
    }


class StoppedAfter(StopSignals):
    """Asks the run to end when it was asked so many times whether it should."""

    def __init__(self, times: float):
        super().__init__()
        self._turns, self._times = itertools.count(), times

    @property
    def number(self) -> signal.Signals | None:
        return signal.SIGTERM if next(self._turns) >= self._times else None

    @number.setter
    def number(self, value: signal.Signals | None) -> None:
        pass


def run_stop(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """The run is asked to end before every pass of a step, prompts of streams being open at some of them.

    Returns:
        by the number of passes before it, what is not bit for bit as before: weights, and the next pass's gradient.
    """
    precision = {"dtype": "float32", "compute_dtype": "bfloat16"}  # what is gathered is not what is saved
    engine = make_engine(model, ranks, reference=reference, precision=precision)
    algorithm, sequences = step_sequences("dapo", [[30, 14, 25]] * ranks.world_size, LONG)
    batch = batches_of(engine, sequences, ranks, 340)[ranks.rank]
    assert batch.split_groups

    def compute(passes: float) -> Computed:
        with mock.patch.object(engine, "ranks", replace(ranks, stop=StoppedAfter(passes))):
            result = engine.forward_backward(batch, algorithm.policy_loss, may_stop=True)
        return result, whole_gradients(engine)

    expected, weights = compute(math.inf), dict(stream_weights(engine.policy))
    different = {}
    for passes in range(expected[0].num_micro_batches + 2):
        with pytest.raises(StopRequested):
            compute(passes)
        held = dict(stream_weights(engine.policy))
        changed = [name for name in weights if not torch.equal(weights[name], held[name])]
        different[str(passes)] = changed + differences(compute(math.inf), expected)
    return different


Computed = tuple[TrainResult, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class BegunAgain:
    """A pass whose memory ran out."""

    num_out_of_memory: int
    budget: int  # that it found
    gradient: dict[str, torch.Tensor]
    different: list[str]  # from a pass that had that budget from the start


def begun_again(
    engine: TrainEngine, compute: Callable[[int], Computed], budget: int, memory: AbstractContextManager[None]
) -> BegunAgain:
    """A pass from a budget on, with memory that runs out; and one with the budget that it found, and enough memory."""
    engine.budget.tokens = budget
    with memory:
        actual = compute(budget)
    found = engine.budget.tokens
    different = differences(actual, compute(found))
    return BegunAgain(actual[0].num_out_of_memory, found, actual[1], different)


def differences(actual: Computed, expected: Computed) -> list[str]:
    """What is not the same to the last bit: counts, metrics and tensors."""
    counts = replace(actual[0], num_out_of_memory=0, metrics=expected[0].metrics) == expected[0]
    metrics = actual[0].metrics == expected[0].metrics
    tensors = [n for n in {**actual[1], **expected[1]} if not torch.equal(actual[1][n], expected[1][n])]
    return [*(() if counts else ("counts",)), *(() if metrics else ("metrics",)), *tensors]


def places(engine: TrainEngine) -> list[str]:
    """Where memory may run out: before, in and after every layer, forward and backward, and in the reference."""
    parts = [
        f"{part} {n}"
        for n, layer in enumerate(engine.policy.model.model.layers)
        for part in ("mlp", "self_attn", "linear_attn")
        if hasattr(layer, part)
    ]
    names = [f"{way} {part}" for part in parts for way in ("forward", "backward")]
    return [*names, "forward embedding", "forward reference", "backward head"]


@contextmanager
def out_of_memory_over(
    tokens: int, place: str, engine: TrainEngine, *, most: int = 10_000, only: int | None = None
) -> Iterator[None]:
    """An allocator that has no room for rows of more than `tokens` tokens, to `most`, at one place.

    With `only` it fails once: when such a row comes for that time.
    """
    way, part, *number = place.split()
    body = engine.policy.model.model if part != "reference" else engine._reference_forward.policy.model.model
    module = {"embedding": lambda: body.embed_tokens, "reference": lambda: body, "head": lambda: body.norm}.get(
        part, lambda: getattr(body.layers[int(number[0])], part)
    )()

    times = itertools.count(1)

    def check(length: int) -> None:
        if tokens < length <= most and (next(times) == only or only is None):
            raise torch.OutOfMemoryError(f"injected: {length} tokens")

    def forward(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        check(first.shape[0] * first.shape[1])

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        check(grad_output[0].shape[0] * grad_output[0].shape[1])

    hook = module.register_forward_hook(forward) if way == "forward" else module.register_full_backward_hook(backward)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def run_checkpoint(ranks: Ranks, model: str, reference: str, root: str, resume: str, optim: str) -> dict[str, Any]:
    """Two updates, a checkpoint, two more; or the last two from it. The reference follows."""
    folder = Path(root) / optim / "step-2"
    source = str(folder) if resume == "resume" else model
    engine = make_engine(
        source,
        ranks,
        reference=reference,
        reference_changes=True,
        precision={"dtype": "float32"},
        optim=OPTIMIZERS[optim],
        learning_rate=0.01,
    )
    if resume == "resume":
        resume_engine(engine, ranks, folder)
    for update in range(engine.updates_done, 4):
        algorithm, sequences = step_sequences("grpo_kl", *STEPS["uneven"], seed=update)
        engine.forward_backward(batches_of(engine, sequences, ranks, 30)[ranks.rank], algorithm.policy_loss)
        engine.optim_step()
        engine.refresh_reference(0.5)
        if update == 1 and resume != "resume":
            save_engine(engine, ranks, Path(root) / optim, model)
    return {"weights": whole_weights(engine)}


SHARD = WorstCaseShard(prompt_tokens=10, completion_tokens=31, num_generations=4, num_sequences=100)


def run_budget(ranks: Ranks, model: str, reference: str) -> dict[str, Any]:
    """`auto` with an allocator that has no room for more than 300 tokens at a time, on one rank."""
    engine = make_engine(model, ranks, reference=reference)
    algorithm, _ = step_sequences("grpo_kl", *STEPS["uneven"])
    before = {name: weight.clone() for name, weight in whole_weights(engine).items()}
    unlucky = ranks.world_size - 1
    with out_of_memory_over(300, "backward mlp 1", engine) if ranks.rank == unlucky else nothing():
        limited = find_budget(engine, algorithm.policy_loss, shard=SHARD, max_tokens=2000)
    unlimited = find_budget(engine, algorithm.policy_loss, shard=SHARD, max_tokens=2000)
    after = whole_weights(engine)
    return {
        "limited": limited,
        "unlimited": unlimited,
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "no_gradient": all(p.grad is None for p in engine.policy.model.parameters()),
    }


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the sections `model` and `train`
    "float64": ({"dtype": "float64"}, {}),
    "checkpointing": ({"dtype": "float64", "gradient_checkpointing": True}, {}),
    "selective": ({"dtype": "float64", "gradient_checkpointing": "selective"}, {}),
    "offload": ({"dtype": "float64", "activation_offload": True}, {}),
    "gradients in forward": ({"dtype": "float64"}, {"gradients_in_forward": True}),
    "mixed": ({"dtype": "float32", "compute_dtype": "bfloat16"}, {}),
}


def run_precision(ranks: Ranks, model: str, reference: str, way: str) -> tuple[list[Any], set[torch.dtype]]:
    """Another way to compute, such as activations computed again in backward, of micro-batches and of streams.

    Gradients, and the dtypes of parameters and moments.
    """
    precision, train = WAYS[way]
    with mock.patch.object(
        activation_checkpointing, "enable_offload", partial(enable_offload, device_type="cpu", min_bytes=1)
    ):
        engine = make_engine(model, ranks, reference=reference, precision=precision, learning_rate=0.01, **train)
        gradients = []
        for step, budget in (("long prompts", 20), ("one prompt", 10_000), ("uneven", 20)):
            algorithm, sequences = step_sequences("grpo_kl", *STEPS[step])
            gradients.append(gradient(engine, algorithm, sequences, ranks, budget)[1])
        engine.forward_backward(batches_of(engine, sequences, ranks, 20)[ranks.rank], algorithm.policy_loss)
        engine.optim_step()
    state = engine.state_dict()["optimizer"]["state"].values()
    return gradients, {p.dtype for p in engine.policy.model.parameters()} | {s["exp_avg"].dtype for s in state}


JOBS = {
    "gradients": run_gradients,
    "updates": run_updates,
    "collectives": run_collectives,
    "out_of_memory": run_out_of_memory,
    "out_of_memory_in_a_stream": run_out_of_memory_in_a_stream,
    "out_of_memory_on_nothing": run_out_of_memory_on_nothing,
    "out_of_memory_later": run_out_of_memory_later,
    "stop": run_stop,
    "checkpoint": run_checkpoint,
    "budget": run_budget,
    "precision": run_precision,
}
