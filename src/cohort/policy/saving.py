"""A policy as a model folder, in files of a stated size, written one tensor after another.

Rank 0 writes. Every rank could write its rows into a common file, as it reads them; but where the folder is on a
network, what two machines write next to each other need not both arrive. Nothing but one tensor is gathered at a time
(or those that the files have in another form together), and that is all that a save takes of memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from cohort.distributed import ALONE, Ranks
from cohort.errors import TrainingError
from cohort.policy.export import TensorSpec, stream_weights, weight_specs
from cohort.policy.policy import Policy
from cohort.policy.skeleton import quiet_transformers
from cohort.policy.weights import SHARD, SINGLE, Written, write_index, write_tensors


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How weights are written."""

    max_shard_bytes: int = 5 * 10**9  # of the tensors of a file; a larger tensor has one by itself
    on_progress: Callable[[int, int], None] = _silent  # told on rank 0 how many bytes of all are written


def save_policy(
    policy: Policy, tokenizer: Any, folder: Path, ranks: Ranks = ALONE, saving: Saving | None = None
) -> None:
    """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included.

    Of a policy with an adapter, the adapter's folder, which `PeftModel.from_pretrained` loads. Every rank takes part;
    rank 0 writes, and only its tokenizer is looked at.

    Raises:
        Exception: of any kind on rank 0, where writing failed.
        TrainingError: on the other ranks then.
    """
    adapter = policy.adapter
    weights = {} if adapter is None else adapter.whole_weights()

    def describe() -> None:
        with quiet_transformers():
            if adapter is not None:
                adapter.save(folder, weights)
            else:  # all that the library puts into a model's folder but the weights
                policy.model.save_pretrained(folder, state_dict={})
                if policy.masters is not None:  # it has noted the dtype of their copies
                    policy.model.config.dtype = policy.masters.dtype
                    policy.model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    _on_first(ranks, folder, describe)
    if adapter is None:
        _save_weights(policy, folder, ranks, saving or Saving())


def plan_files(specs: Sequence[TensorSpec], max_shard_bytes: int) -> dict[str, list[Written]]:
    """Which file of a folder gets which tensors: in their order, as many as fit; of one file alone there is no index.

    Args:
        specs: of all tensors.
        max_shard_bytes: of a file's tensors.
    """
    files: list[list[Written]] = []
    room = 0
    for spec in specs:
        written = Written.of(spec.name, spec.shape, spec.dtype)
        if not files or written.num_bytes > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(written)
        room -= written.num_bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {SHARD.format(n, len(files)): tensors for n, tensors in enumerate(files, start=1)}


def _save_weights(policy: Policy, folder: Path, ranks: Ranks, saving: Saving) -> None:
    """The weights and their index."""
    files = plan_files(weight_specs(policy), saving.max_shard_bytes)
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    done = 0

    def told(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
        nonlocal done
        for _, tensor in weights:
            done += tensor.nbytes
            yield tensor
            del tensor  # the next one is not gathered beside it
            saving.on_progress(done, total)

    stream = stream_weights(policy)
    for file, tensors in files.items():
        part = islice(stream, len(tensors))
        # whatever becomes of a file, all ranks gather its tensors, and agree on going on
        write = partial(write_tensors, folder / file, tensors, told(part))
        _on_first(ranks, folder, write, meanwhile=partial(deque, part, maxlen=0))
    if len(files) > 1:
        _on_first(ranks, folder, partial(write_index, folder, files))


def _on_first(
    ranks: Ranks, folder: Path, write: Callable[[], None], *, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Have rank 0 write; where it could not, no rank goes on.

    Args:
        ranks: all of which call this.
        folder: that is written.
        write: what rank 0 does.
        meanwhile: what all do, rank 0 after `write`, and after its failure too.
    """
    problem: BaseException | None = None
    try:
        if ranks.is_first:
            write()
    except BaseException as error:
        problem = error
    meanwhile()
    is_well = ranks.smallest(problem is None)
    if problem is not None:
        raise problem
    if not is_well:
        raise TrainingError(f"{folder}: rank 0 could not write it")
