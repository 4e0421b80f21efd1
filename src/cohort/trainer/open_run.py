"""Open what a command needs of a run, and close it in order: `train`, `eval`, `rollout` and `reward`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

from cohort.config import Config
from cohort.data import OnProgress, no_progress
from cohort.models import LoadRequest, check_vocabulary, end_token_ids, load_policy, resolve_device, with_base
from cohort.processes.this_process import resume_gc
from cohort.ranks.worker_group import WorkerGroup
from cohort.records import Prompt
from cohort.rollout import LocalEngine, RolloutCollector, RolloutEngine, Sampler
from cohort.rollout.engines.setup import StartWorkers
from cohort.rollout.workers.load_rollout import collector_options, load_rollout
from cohort.trainer.inputs import Inputs, build_inputs
from cohort.trainer.parts import Parts
from cohort.trainer.rollout_workers import choose_workers, places_elsewhere, sendable_tokenizer, share_sandbox
from cohort.trainer.worker import Worker

T = TypeVar("T")


class OpenRun:
    """A run whose parts are loaded and opened as a command asks for them."""

    def __init__(self, config: Config, parts: Parts, notify: Callable[[str], None], on_close: ExitStack):
        """See `open_run`."""
        self.config = config
        self.parts = parts
        self.notify = notify
        self._on_close = on_close

    @cached_property
    def inputs(self) -> Inputs:
        """Prompts, rewards and evaluation of the training run.

        Raises:
            UserError: a part is missing or invalid.
        """
        return build_inputs(self.config, self.parts)

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that closes with the run, before everything that was opened earlier."""
        return self._on_close.enter_context(context)

    def collector(
        self,
        engine: RolloutEngine,
        *,
        while_waiting: Callable[[], None] = lambda: None,
        workers: WorkerGroup[Worker] | None = None,
        start_workers: StartWorkers | None = None,
        num_own_servers: int = 0,
    ) -> RolloutCollector:
        """Return what samples groups with an engine. It closes the engine and the environments.

        Args:
            engine: has the weights to sample with.
            while_waiting: called now and then while samples are awaited.
            workers: those of all ranks; on each of their nodes trajectories can run.
            start_workers: of the engine; None if trajectories can only run in this process.
            num_own_servers: servers of this run, which need cores of this machine too.
        """
        with ExitStack() as on_failure:
            on_failure.callback(engine.close)
            options = collector_options(self.config, self.parts.environments, notify=self.notify)
            if start_workers is not None and workers is not None:
                options = self._with_workers(options, workers, start_workers, num_own_servers)
            collector = RolloutCollector(engine, self.parts.tokenizer, while_waiting=while_waiting, **options)
            on_failure.pop_all()
        return self.enter(closing(collector))

    def _with_workers(
        self, options: dict[str, Any], workers: WorkerGroup[Worker], start: StartWorkers, num_own_servers: int
    ) -> dict[str, Any]:
        """Return the options of a collector whose groups rollout workers sample, if they pay."""
        free = {rank: cores for rank, cores in enumerate(workers.call(Worker.free_cores)) if cores is not None}
        free[0] -= num_own_servers
        numbers = choose_workers(self.config, self.parts, free_cores=free, notify=self.notify)
        if not numbers:
            return options
        if "close_environments" in options:  # those of this process
            self._on_close.callback(options["close_environments"])
        tokenizer = sendable_tokenizer(self.parts.tokenizer)
        load = partial(load_rollout, share_sandbox(self.config, max(numbers.values())), tokenizer)
        return options | start(load, num_workers=numbers[0], elsewhere=places_elsewhere(workers, numbers))

    def untrained_engine(self, prompts: Sequence[Prompt]) -> LocalEngine:
        """Load the model, which may be an adapter, and return an engine that samples from it in this process.

        Raises:
            UserError: the model is not supported, or has no embeddings for a token of `prompts`.
        """
        config, tokenizer = self.config, self.parts.tokenizer
        device = resolve_device(config.hardware.device)
        request = LoadRequest(with_base(config.model), device=device, tokenizer=tokenizer, trainable=False)
        policy = load_policy(request)
        check_vocabulary(policy, prompts, tokenizer)
        sampler = Sampler(
            policy,
            end_token_ids=end_token_ids(policy, tokenizer),
            max_num_seqs=config.rollout.max_num_seqs,
            tokenizer=tokenizer,
        )
        return LocalEngine(sampler.sample)


@contextmanager
def open_run(
    config: Config,
    parts: Parts | None = None,
    *,
    notify: Callable[[str], None] = lambda text: None,
    on_data_progress: OnProgress = no_progress,
) -> Iterator[OpenRun]:
    """Open a run; what its user opens closes with it, the last one first.

    Args:
        config: configuration of the run.
        parts: objects of the run. Default: those that the configuration names.
        notify: shows a message to the user.
        on_data_progress: called while data take long.
    """
    resume_gc()
    parts = Parts(config) if parts is None else parts
    parts.on_progress = on_data_progress
    with ExitStack() as on_close:
        yield OpenRun(config, parts, notify, on_close)
