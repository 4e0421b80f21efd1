"""Typed calls of worker methods on every rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from cohort.errors import RankDesyncError, TrainingError
from cohort.metrics.resources import PhaseClock
from cohort.ranks.collectives import Ranks

W = TypeVar("W")  # the worker class
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")  # the argument that differs by rank

Message = tuple[str, bool, tuple[Any, ...], dict[str, Any]]  # method, whether shards follow, arguments


class WorkerGroup(Generic[W]):
    """The workers of all ranks. Rank 0 calls, for example `workers.call(Worker.optim_step)`; other ranks `serve`.

    A call returns one result per rank, and raises the TrainingError that any rank raised. With one process it is a
    plain method call.
    """

    def __init__(self, local: W, ranks: Ranks):
        """Create the group; every rank does.

        Args:
            local: this rank's worker.
            ranks: all ranks.
        """
        self.local = local
        self.ranks = ranks
        self._communication = PhaseClock()
        self._called_at = time.monotonic()

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank with the same arguments."""
        self._send(method, False, args, kwargs)
        return self._results(method, args, kwargs)

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `method` on every rank; the first argument is the rank's shard.

        There is one shard and one result per position on the `dp` axis: ranks at the same position get the same shard.
        """
        self._send(method, True, args, kwargs)
        with self._communication.phase("communication"):
            shard = self.ranks.scatter(shards)
        results = self._results(method, (shard, *args), kwargs)
        return [results[rank] for rank in self.ranks.dp_leaders]

    def call_with_local(
        self, method: Callable[Concatenate[W, S | None, P], R], local: S, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `method` on every rank; the first argument is `local` on rank 0 and None elsewhere (it is not sent)."""
        self._send(method, False, (None, *args), kwargs)
        return self._results(method, (local, *args), kwargs)

    def serve(self) -> None:
        """Run the calls of rank 0 until `Ranks.end_commands`, on ranks other than 0."""
        message: Message | None
        while (message := self.ranks.command()) is not None:
            self.answer(message)

    def answer(self, message: Message) -> None:
        """Run a call of rank 0, on ranks other than 0."""
        name, has_shards, args, kwargs = message
        with self._communication.phase("communication"):
            shard: tuple[Any, ...] = (self.ranks.scatter(),) if has_shards else ()
        self._run(name, (*shard, *args), kwargs)

    def seconds_idle(self) -> float:
        """Seconds since the last call."""
        return time.monotonic() - self._called_at

    def communication_seconds(self) -> float:
        """Seconds spent on communicating arguments and results since this was last called."""
        return self._communication.take().get("time/communication_s", 0.0)

    def _send(
        self, method: Callable[..., object], has_shards: bool, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        if self.ranks.world_size > 1:
            self.ranks.command((method.__name__, has_shards, args, kwargs))
        self._called_at = time.monotonic()

    def _results(self, method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[R]:
        results = self._run(method.__name__, args, kwargs)
        assert results is not None, "rank 0 gathers"
        for result in results:
            if isinstance(result, TrainingError):
                raise result
        return results

    def _run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Run a method on this rank; return the results of all ranks on rank 0, None elsewhere."""
        try:
            result = getattr(self.local, name)(*args, **kwargs)
        except RankDesyncError:
            raise  # the other ranks are still inside the method: this process must exit
        except TrainingError as error:
            result = error  # rank 0 raises it
        self.ranks.all_reduce_max(0)  # wait for the slowest rank before timing communication
        with self._communication.phase("communication"):
            return self.ranks.gather(result)
