"""Set up rollout engines that sample on servers, independent of the server program."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.config import Config, ServersConfig
from cohort.errors import UserError
from cohort.models import resolve_device
from cohort.plan.defaults import serving_dtype
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import Client, FleetLimits, RemoteServer, ServerError, ServerHandle
from cohort.rollout.engines.servers.secret import Secret, read_or_create_secret, read_secret
from cohort.rollout.engines.servers.server_engine import ServerEngine
from cohort.run.folder import LOGS
from cohort.trainer.inputs import Inputs
from cohort.trainer.parity import make_parity_gate
from cohort.trainer.placement import server_placement
from cohort.trainer.rollout_engines import StartedEngine
from cohort.trainer.worker import Worker, keep_ranks_alive

# Opens a channel to the server at a URL; publishes a version of the weights over channels. See `ServerEngine`.
Connect = Callable[[str], Any]
Publish = Callable[[Sequence[Any], int], Mapping[Any, ServerError]]


class ServersSetup(ABC):
    """Base class for the setup of engines on servers (`EngineSetup`), started by the run or listed in `rollout.urls`.

    Subclasses provide the server process, the client for completions, and the channels for weights.
    """

    def __init__(self, config: Config, inputs: Inputs):
        """Choose the servers' GPUs, dtype and secret.

        Raises:
            UserError: there is no GPU for the servers, their GPUs do not allow sampling ahead, or the secret cannot be
                read.
        """
        rollout = config.rollout
        assert isinstance(rollout, ServersConfig)
        self.config = config
        self.inputs = inputs
        self.rollout: ServersConfig = rollout
        self.placement = None if rollout.urls else server_placement(config)
        if self.placement is None:
            # assume that servers elsewhere choose their dtype by the same rule, on the same kind of device
            on_gpu = resolve_device(config.hardware.device).type == "cuda"
        else:
            on_gpu = any(self.placement.gpus)
            if self.placement.shared and rollout.samples_ahead:
                raise UserError(
                    f"rollout.max_staleness: {rollout.max_staleness} needs dedicated rollout GPUs, but here the "
                    f"{rollout.server_name}s sleep during training ({self.placement.reason}); use max_staleness: 0, or "
                    f"set hardware.rollout_gpus"
                )
        self.dtype: torch.dtype = getattr(torch, serving_dtype(config, on_gpu=on_gpu))
        self.secret = _secret(rollout)

    @property
    def shares_gpus(self) -> bool:
        """Whether servers and training take turns on the same GPUs."""
        return self.placement is not None and self.placement.shared

    @property
    def keeps_base(self) -> bool:
        """Whether these servers keep their base model on the GPU during training."""
        return self.placement is not None and self.placement.keeps_base

    @property
    def max_model_len(self) -> int:
        """Context length that the servers need. A smaller one leaves more room in the KV cache."""
        return self.inputs.longest_sequence_tokens + 1

    @abstractmethod
    def make_server(self, gpus: str, log_file: Path) -> ServerHandle:
        """Create the handle of a server that the run starts and that demands `secret` of every request.

        Args:
            gpus: CUDA_VISIBLE_DEVICES of the server; "" on CPU.
            log_file: receives its output.
        """

    @abstractmethod
    def make_client(self, worker: Worker) -> Callable[[], Client]:
        """Return a function that creates the servers' client; the fleet calls it in its own thread."""

    @abstractmethod
    def make_channels(
        self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]
    ) -> tuple[Connect, Publish]:
        """Return a function that connects to a server, and one that publishes weights.

        Args:
            workers: all of them take part in publishing.
            folder: run folder.
            notify: shows a message to the user.
        """

    def find_cause(self, log: str) -> str | None:
        """Return why a server exited, from its log; None if the log does not say."""
        return None

    def start(self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Start the servers and publish the weights to them.

        Raises:
            TrainingError: no server can be started.
        """
        for text in self._announcements(folder / LOGS):
            notify(text)
        connect, publish = self.make_channels(workers, folder=folder, notify=notify)
        make_room: Callable[[], object] = partial(workers.call, Worker.empty_cache)
        if self.shares_gpus:
            make_room()  # a server does not start unless its share of the GPU is free
        engine = ServerEngine(
            self._start_fleet(workers.local, folder / LOGS),
            connect=connect,
            publish=publish,
            notify=notify,
            while_waiting=partial(keep_ranks_alive, workers),
            sleeps=self.shares_gpus,
            make_room=make_room,
        )
        try:
            engine.update_weights(policy_version=workers.local.engine.updates_done)
            engine.release_gpus()  # free the memory of shared GPUs for training
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
        own = [
            self.make_server(devices, logs / f"{self.config.rollout.engine}-{i}.log") for i, devices in enumerate(gpus)
        ]
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
            failures_pause_starts=self.shares_gpus,
        )

    def _announcements(self, logs: Path) -> Iterator[str]:
        name = self.rollout.server_name
        if self.placement is None:
            yield f"using the {name}s at {', '.join(self.rollout.urls)}"
        else:
            yield self.placement.reason
            count = len(self.placement.gpus)
            yield f"starting {count} {name}{'s' if count > 1 else ''}; logs: {logs}/{self.config.rollout.engine}-*.log"


def _secret(rollout: ServersConfig) -> Secret | None:
    """Return the secret of the run's servers; None for servers elsewhere that have none.

    Raises:
        UserError: `rollout.secret_file` cannot be read or created.
    """
    if rollout.urls:  # may be behind a proxy, which cannot prove anything
        return None if rollout.secret_file is None else read_secret(rollout.secret_file)
    secret = Secret.new() if rollout.secret_file is None else read_or_create_secret(rollout.secret_file)
    return replace(secret, mutual=True)  # anyone may take a port before the server does
