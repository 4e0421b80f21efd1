"""Run methods of a worker on every rank, with arguments and results that a type checker sees."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from cohort.distributed import Ranks
from cohort.errors import OutOfStepError, TrainingError
from cohort.metrics import PhaseClock

W = TypeVar("W")  # the worker class
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")  # the argument that differs by rank


class WorkerGroup(Generic[W]):
    """The workers of all ranks. Rank 0 calls, the other ranks `serve`.

    Methods are named as in `workers.call(Worker.optim_step)`. Every call returns the results by rank, and raises the
    TrainingError that a rank raised. With one process a call is a plain call.
    """

    def __init__(self, local: W, ranks: Ranks):
        """Make the group. Every rank does.

        Args:
            local: this rank's worker.
            ranks: all of them.
        """
        self.local = local
        self.ranks = ranks
        self._moving = PhaseClock()
        self._called_at = time.monotonic()

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank with the same arguments."""
        self._send(method, False, args, kwargs)
        return self._results(method, args, kwargs)

    def scatter(
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `method` on every rank; its first argument is that rank's entry of `shards`, one per position of `dp`.

        Ranks at one position get the same shard and compute the same, so that there is one result for each shard.
        """
        self._send(method, True, args, kwargs)
        with self._moving.phase("move"):
            shard = self.ranks.scatter(shards)
        results = self._results(method, (shard, *args), kwargs)
        return [results[rank] for rank in self.ranks.dp_leaders]

    def call_with_local(
        self, method: Callable[Concatenate[W, S | None, P], R], local: S, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `method` on every rank; its first argument is `local` on rank 0, which is never sent, else None."""
        self._send(method, False, (None, *args), kwargs)
        return self._results(method, (local, *args), kwargs)

    def serve(self) -> None:
        """On the ranks other than 0: run what rank 0 calls, until `Ranks.end_commands`."""
        message: tuple[str, bool, tuple[Any, ...], dict[str, Any]] | None
        while (message := self.ranks.command()) is not None:
            name, has_shards, args, kwargs = message
            with self._moving.phase("move"):
                shard: tuple[Any, ...] = (self.ranks.scatter(),) if has_shards else ()
            self._run(name, (*shard, *args), kwargs)

    def seconds_idle(self) -> float:
        """Seconds since the last call, in which the other ranks have been waiting."""
        return time.monotonic() - self._called_at

    def seconds_moving(self) -> float:
        """Seconds that this rank has spent on moving arguments and results since `seconds_moving` was last called."""
        return self._moving.take().get("time/move_s", 0.0)

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
        """Run a method on this rank. The results of all ranks on rank 0; None elsewhere."""
        try:
            result = getattr(self.local, name)(*args, **kwargs)
        except OutOfStepError:
            raise  # the other ranks are waiting inside the method: this process has to end
        except TrainingError as error:
            result = error  # rank 0 raises it and ends the run in good order
        self.ranks.largest(0)  # waiting for the slowest rank is not moving data
        with self._moving.phase("move"):
            return self.ranks.gather(result)
