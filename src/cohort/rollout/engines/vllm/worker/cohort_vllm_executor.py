"""Executor that vLLM loads for servers of several GPUs: an error of a worker does not confuse later calls.

vLLM stops reading the workers' answers at the first error. Those of the other workers stay in their queues, and every
later call takes them for its own: it fails for an old reason, or returns before its workers are done, while the trainer
already overwrites what they read. After an update that broke off, a server could never be used again.
"""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_logger = init_logger("vllm.cohort_vllm_executor")


class CohortExecutor(MultiprocExecutor):
    """Target of `--distributed-executor-backend`: vLLM's own executor, but calls read the answers of all workers."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Call a method on all workers and return their results.

        Raises:
            RuntimeError: it failed on a worker; all of them have answered.
        """
        if not isinstance(method, str) or options:  # one worker answers, or later: steps of the model
            return super().collective_rpc(method, timeout, args, kwargs, **options)
        answers = super().collective_rpc(_attempt, timeout, (method, args, kwargs or {}))
        if errors := [error for _, error in answers if error is not None]:
            raise RuntimeError(f"Worker failed with error '{errors[0]}'")
        return [result for result, _ in answers]


def _attempt(worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    """Call a worker's method. Returns its result, and its error instead of raising it."""
    try:
        return getattr(worker, method)(*args, **kwargs), None
    except Exception as error:
        _logger.exception("%s failed.", method)
        return None, str(error)
