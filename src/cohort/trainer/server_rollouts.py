"""What every engine over servers needs of a run, whatever program its servers are: `ServersSetup`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.config import Config, ServersConfig
from cohort.errors import UserError
from cohort.models import resolve_device
from cohort.placement import server_placement
from cohort.plan.defaults import serving_dtype
from cohort.rollout.engines.servers import (
    Client,
    Fleet,
    FleetLimits,
    RemoteServer,
    ServerEngine,
    ServerError,
    ServerHandle,
)
from cohort.run_folder import LOGS
from cohort.trainer.parity import make_parity_gate
from cohort.trainer.rollout_engines import StartedEngine
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import keep_waiting
from cohort.trainer.worker_group import WorkerGroup

# Opens a channel to the server at an address, and publishes a version of the weights through channels; as
# `ServerEngine` has them.
Connect = Callable[[str], Any]
Publish = Callable[[Sequence[Any], int], Mapping[Any, ServerError]]


class ServersSetup(ABC):
    """Set up an engine over servers (`EngineSetup`): those that the run starts, or someone else's.

    A subclass says how one of its servers is started, asked for completions, and given the weights.
    """

    def __init__(self, config: Config, inputs: Inputs):
        """Decide which GPUs the servers get, and in which dtype they compute.

        Raises:
            UserError: there is no GPU for them, or they cannot sample ahead there.
        """
        rollout = config.rollout
        assert isinstance(rollout, ServersConfig)
        self.config = config
        self.inputs = inputs
        self.rollout: ServersConfig = rollout
        self.placement = None if rollout.urls else server_placement(config)
        if self.placement is None:
            # a server elsewhere computes as it is told there, by the same rule, on the same kind of device
            on_gpu = resolve_device(config.hardware.device).type == "cuda"
        else:
            on_gpu = any(self.placement.gpus)
            if self.placement.shared and rollout.samples_ahead:
                raise UserError(
                    f"rollout.max_staleness: {rollout.max_staleness} needs GPUs that only sample, and here the "
                    f"{rollout.server_name}s sleep while the policy trains ({self.placement.reason}); use "
                    f"max_staleness: 0"
                )
        self.dtype: torch.dtype = getattr(torch, serving_dtype(config, on_gpu=on_gpu))

    @property
    def shares_gpus(self) -> bool:
        """Whether servers take turns with training on its GPUs."""
        return self.placement is not None and self.placement.shared

    @property
    def max_model_len(self) -> int:
        """Tokens of the run's longest prompt and completion. A server for no more has room for more of them."""
        return self.inputs.longest_path_tokens + 1

    @abstractmethod
    def own_server(self, gpus: str, log_file: Path) -> ServerHandle:
        """Make the handle of a server that the run starts.

        Args:
            gpus: of the server, as CUDA_VISIBLE_DEVICES takes them; "" on CPU.
            log_file: for what it says.
        """

    @abstractmethod
    def make_client(self, worker: Worker) -> Callable[[], Client]:
        """Return a function that makes the servers' client; the fleet calls it in its thread."""

    @abstractmethod
    def make_channels(
        self, workers: WorkerGroup[Worker], *, folder: Path, note: Callable[[str], None]
    ) -> tuple[Connect, Publish]:
        """Return the functions that connect to a server, and that publish the workers' weights.

        Args:
            workers: all of them take part in publishing.
            folder: of the run.
            note: told what a person should know.
        """

    def find_cause(self, log: str) -> str | None:
        """Find in a server's log why it ended; None where the log does not tell."""
        return None

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, note: Callable[[str], None]) -> StartedEngine:
        """Start the servers. They get the trainer's weights when they are up.

        Raises:
            TrainingError: no server can be started.
        """
        for text in self._announcements(folder / LOGS):
            note(text)
        connect, publish = self.make_channels(workers, folder=folder, note=note)
        engine = ServerEngine(
            self._start_fleet(workers.local, folder / LOGS),
            connect=connect,
            publish=publish,
            note=note,
            while_waiting=partial(keep_waiting, workers),
            sleeps=self.shares_gpus,
            make_room=partial(workers.call, Worker.free_cache),
        )
        try:
            engine.load_weights(policy_version=workers.local.engine.updates_done)
            engine.release_gpus()  # training finds the memory of shared GPUs free from here on
        except BaseException:
            engine.close()
            raise
        return StartedEngine(
            engine=engine,
            gate=lambda collector: make_parity_gate(
                self.config,
                self.inputs.prompts.prompts,
                workers,
                sample_on_each=partial(engine.sample_on_each_server, collector),
                servers_dtype=self.dtype,
            ),
        )

    def _start_fleet(self, worker: Worker, logs: Path) -> Fleet:
        rollout = self.rollout
        gpus = () if self.placement is None else self.placement.gpus
        own = [self.own_server(of, logs / f"{self.config.rollout.engine}-{i}.log") for i, of in enumerate(gpus)]
        limits = FleetLimits(
            max_num_seqs=rollout.max_num_seqs,
            start_timeout_s=rollout.start_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
            max_server_failures=rollout.max_server_failures,
        )
        return Fleet(
            [*own, *map(RemoteServer, rollout.urls)],
            self.make_client(worker),
            limits,
            server_name=rollout.server_name,
            find_cause=self.find_cause,
        )

    def _announcements(self, logs: Path) -> Iterator[str]:
        name = self.rollout.server_name
        if self.placement is None:
            yield f"sampling with the {name}s at {', '.join(self.rollout.urls)}"
        else:
            yield self.placement.reason
            count = len(self.placement.gpus)
            where = f"{logs}/{self.config.rollout.engine}-*.log"
            yield f"starting {count} {name}{'s' if count > 1 else ''}; what they say is in {where}"
