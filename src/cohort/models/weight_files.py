"""Write a model's weights as safetensors files, on all ranks together.

Every rank gathers every tensor and writes its own files of whole tensors, in a thread, while the next tensors are
gathered. No file is written by two ranks, which would not be safe on network file systems. A rank holds the tensor that
is being gathered and the one before it, which it may be writing.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from cohort.errors import TrainingError
from cohort.models.loading.safetensors_files import (
    INDEX,
    SHARD,
    SINGLE,
    TensorInfo,
    write_header,
    write_index,
    write_tensor,
)
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks, first_line
from cohort.run.atomic import disk_errors

MIN_SHARD_BYTES = 10**9  # of files that are only split so that more ranks write


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file to write."""

    name: str
    rank: int  # that writes it
    tensors: Sequence[TensorInfo]


def plan_files(
    tensors: Iterable[TensorInfo],
    max_shard_bytes: int,
    *,
    writers: Sequence[int] = (0,),
    min_shard_bytes: int = MIN_SHARD_BYTES,
    on_rank0: Collection[str] = (),
) -> list[WeightFile]:
    """Assign tensors to files and files to ranks. Each tensor goes to the writer that has the fewest bytes.

    Args:
        tensors: all tensors to write, in order.
        max_shard_bytes: maximum size of a file's tensors; a larger tensor gets its own file.
        writers: ranks that can write to the folder, rank 0 first. If there are more than needed, those that write are
            evenly spaced, so that they are on different nodes.
        min_shard_bytes: use so few writers that each has at least as many bytes.
        on_rank0: names of the tensors that rank 0 writes.
    """
    tensors = list(tensors)
    num_writers = max(1, min(len(writers), sum(t.num_bytes for t in tensors) // min_shard_bytes))
    chosen = [writers[n * len(writers) // num_writers] for n in range(num_writers)]
    num_bytes = dict.fromkeys(chosen, 0) | {0: sum(t.num_bytes for t in tensors if t.name in on_rank0)}
    files: list[tuple[int, list[TensorInfo]]] = []
    latest: dict[int, tuple[list[TensorInfo], int]] = {}  # rank -> its last file, and how many bytes fit into it
    for tensor in tensors:
        rank = 0 if tensor.name in on_rank0 else min(chosen, key=num_bytes.__getitem__)
        num_bytes[rank] += 0 if tensor.name in on_rank0 else tensor.num_bytes
        own, room = latest.get(rank, ([], 0))
        if not own or tensor.num_bytes > room:
            own, room = [], max_shard_bytes
            files.append((rank, own))
        own.append(tensor)
        latest[rank] = own, room - tensor.num_bytes
    if len(files) == 1:
        return [WeightFile(SINGLE, *files[0])]
    return [WeightFile(SHARD.format(n, len(files)), *file) for n, file in enumerate(files, start=1)]


def write_weights(
    folder: Path,
    files: Sequence[WeightFile],
    tensors: Iterator[tuple[str, Tensor]],
    ranks: Ranks = SINGLE_PROCESS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the files, and an index if there are several. Call on every rank.

    Args:
        folder: an existing folder, which all ranks that write see.
        files: from `plan_files`, the same on every rank.
        tensors: names and full tensors in the order of the plan; exhausted on every rank, even if writing fails.
        ranks: all of them call this.
        on_progress: called on rank 0 with bytes written and total.

    Raises:
        Exception: of any kind on a rank that failed to write.
        TrainingError: on the other ranks then.
    """
    own = {tensor.name: (file, tensor) for file in files if file.rank == ranks.rank for tensor in file.tensors}
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    done = 0
    problem: BaseException | None = None
    with _Writer(folder) as writer:
        try:
            for name, weights in tensors:
                done += weights.nbytes
                try:
                    if problem is None:
                        if name in own:
                            writer.write(*own[name], weights)
                        if ranks.is_rank0:
                            on_progress(done, total)
                except BaseException as error:
                    problem = error  # the other ranks gather with this one to the end
                del weights  # free it before the next one is gathered
            writer.finish()
        except BaseException as error:  # such as a tensor that rank 0 alone cannot read any more
            problem = problem or error
    _agree(ranks, folder, problem)
    on_rank0(ranks, folder, lambda: _finish(folder, files))


def _finish(folder: Path, files: Sequence[WeightFile]) -> None:
    """Write the index, and delete the weights of a model that was saved here before in other files."""
    names = {file.name for file in files}
    if len(files) > 1:
        write_index(folder, {file.name: file.tensors for file in files})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in names:
            old.unlink()


@dataclass(slots=True)
class _Writer:
    """This rank's files, each open from its first tensor to its last; a thread writes one tensor at a time."""

    folder: Path
    _open: dict[str, BinaryIO] = field(default_factory=dict)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="weights"))
    _pending: "Future[None] | None" = None

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for file in self._open.values():  # left open by a failure, which is known
            with suppress(OSError):
                file.close()

    def write(self, file: WeightFile, tensor: TensorInfo, weights: Tensor) -> None:
        """Start writing the next tensor of a file, once the one before it is written."""
        self.finish()
        if file.name not in self._open:
            self._open[file.name] = (self.folder / file.name).open("wb")
            write_header(self._open[file.name], file.tensors)
        self._pending = self._thread.submit(self._write, file, tensor, weights.cpu())

    def finish(self) -> None:
        """Wait until what was passed to `write` is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, file: WeightFile, tensor: TensorInfo, weights: Tensor) -> None:
        write_tensor(self._open[file.name], weights)
        if tensor is file.tensors[-1]:
            self._open.pop(file.name).close()


def on_rank0(ranks: Ranks, folder: Path, write: Callable[[], None]) -> None:
    """Call `write`, which writes files into `folder`, on rank 0. If it fails, raise on all ranks."""
    problem: BaseException | None = None
    try:
        if ranks.is_rank0:
            write()
    except BaseException as error:
        problem = error
    _agree(ranks, folder, problem)


def ranks_that_see(folder: Path, ranks: Ranks) -> list[int]:
    """Return the ranks for which a file that rank 0 writes into the folder exists: those that share its file system."""
    name = ranks.broadcast(f".seen-{uuid.uuid4().hex}" if ranks.is_rank0 else None)
    on_rank0(ranks, folder, (folder / name).touch)
    seen = ranks.gather((folder / name).exists())
    on_rank0(ranks, folder, (folder / name).unlink)
    return ranks.broadcast(None if seen is None else [rank for rank, sees in enumerate(seen) if sees])


def _agree(ranks: Ranks, folder: Path, problem: BaseException | None) -> None:
    """Raise on all ranks if writing failed on one: its own error there, elsewhere that of the first such rank."""
    said = ranks.gather(None if problem is None else _explain(folder, problem))
    failed = ranks.broadcast(None if said is None else [(rank, text) for rank, text in enumerate(said) if text])
    if problem is not None:
        raise problem
    if failed:
        rank, text = failed[0]
        raise TrainingError(f"rank {rank} failed to write {folder}: {text}")


def _explain(folder: Path, problem: BaseException) -> str:
    try:
        with disk_errors(folder):
            raise problem
    except BaseException as error:
        return first_line(error)
