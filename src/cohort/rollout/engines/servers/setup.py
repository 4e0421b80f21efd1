"""Set up rollout engines that sample on servers, independent of the server program."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from cohort.config import Config, ServersConfig
from cohort.errors import UserError
from cohort.models import AdapterSpec, Policy, resolve_device
from cohort.plan.adapter import RequestedAdapter
from cohort.plan.defaults import serving_dtype
from cohort.plan.rollout_engine import sampling_limit
from cohort.rollout.engines.servers.channels import Channel, Channels
from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import Client, FleetLimits, RemoteServer, ServerHandle
from cohort.rollout.engines.servers.http_api import trusted_certificates
from cohort.rollout.engines.servers.placement import server_placement
from cohort.rollout.engines.servers.secret import Secret, read_key, read_or_create_secret, read_secret
from cohort.rollout.engines.servers.server_engine import ServerEngine
from cohort.rollout.engines.setup import EngineInputs, StartedEngine, TrainingProcesses
from cohort.run.folder import LOGS


class ServersSetup(ABC):
    """Base class for the setup of engines on servers (`EngineSetup`), started by the run or listed in `rollout.urls`.

    Subclasses provide the server process, the client for completions, and the channels for weights.
    """

    def __init__(self, inputs: EngineInputs):
        """Choose the servers' GPUs, dtype and secret.

        Raises:
            UserError: the servers do not support this run, there is no GPU for them, their GPUs do not allow sampling
                ahead, the secret cannot be read, or the server program is missing.
        """
        config, rollout = inputs.config, inputs.config.rollout
        assert isinstance(rollout, ServersConfig)
        if (reason := sampling_limit(config, _requested(inputs.adapter), servers=type(rollout))) is not None:
            raise UserError(f"{reason}, or rollout.engine: local")
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
        if any(url.startswith("https:") for url in rollout.urls):
            trusted_certificates()
        if self.placement is not None:
            self.find_program(config)

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

    @classmethod
    def find_program(cls, config: Config) -> str:
        """Find the server program that a run would start, and return its version; "" if it is part of the engine.

        Raises:
            UserError: it is missing, or of an unsupported version.
        """
        return ""

    @classmethod
    def serve_command(cls, config: Config, *, gpus: str, host: str, port: int) -> tuple[list[str], dict[str, str]]:
        """Return the command line of `cohort serve`'s server, and the environment variables that it adds.

        Args:
            config: configuration of the run, whose servers say `has_serve_command`.
            gpus: CUDA_VISIBLE_DEVICES of the server; "" on CPU.
            host: address to listen on.
            port: port to listen on.
        """
        raise NotImplementedError

    @abstractmethod
    def make_server(self, gpus: str, log_file: Path) -> ServerHandle:
        """Create the handle of a server that the run starts and that demands `secret` of every request.

        Args:
            gpus: CUDA_VISIBLE_DEVICES of the server; "" on CPU.
            log_file: receives its output.
        """

    @abstractmethod
    def make_client(self, policy: Policy) -> Callable[[], Client]:
        """Return a function that creates the servers' client; the fleet calls it in its own thread."""

    @abstractmethod
    def make_channels(
        self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]
    ) -> Channels[Channel]:
        """Return the channels through which weights are sent.

        Args:
            processes: have the weights.
            folder: run folder.
            notify: shows a message to the user.
        """

    def find_cause(self, log: str) -> str | None:
        """Return why a server exited, from its log; None if the log does not say."""
        return None

    def start(self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]) -> StartedEngine:
        """Start the servers and publish the weights to them.

        Raises:
            TrainingError: no server can be started.
        """
        for text in self._announcements(folder / LOGS):
            notify(text)
        channels = self.make_channels(processes, folder=folder, notify=notify)
        if self.shares_gpus:
            processes.empty_cache()  # a server does not start unless its share of the GPU is free
        engine = ServerEngine(
            self._start_fleet(processes.policy, folder / LOGS),
            channels=channels,
            notify=notify,
            while_waiting=processes.keep_alive,
            sleeps=self.shares_gpus,
            make_room=processes.empty_cache,
        )
        try:
            engine.update_weights(policy_version=processes.num_updates)
            engine.release_gpus()  # free the memory of shared GPUs for training
        except BaseException:
            engine.close()
            raise
        return StartedEngine(
            engine=engine,
            sample_on_each_server=engine.sample_on_each_server,
            servers_dtype=self.dtype,
            start_workers=engine.start_workers,
            num_own_servers=0 if self.rollout.urls else len(engine.fleet.handles),
        )

    def _start_fleet(self, policy: Policy, logs: Path) -> Fleet:
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
            self.make_client(policy),
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


def _requested(adapter: AdapterSpec | None) -> RequestedAdapter | None:
    return None if adapter is None else RequestedAdapter(rank=adapter.rank, dora=adapter.dora, targets=adapter.modules)


def _secret(rollout: ServersConfig) -> Secret | None:
    """Return the secret of the run's servers; None for servers elsewhere that have none.

    Raises:
        UserError: `rollout.secret_file` cannot be read or created, or `rollout.api_key_env` is not set.
    """
    if rollout.api_key_env is not None:
        return read_key(rollout.api_key_env)
    if rollout.urls:  # may be behind a proxy, which cannot prove anything
        return None if rollout.secret_file is None else read_secret(rollout.secret_file)
    secret = Secret.new() if rollout.secret_file is None else read_or_create_secret(rollout.secret_file)
    return replace(secret, mutual=True)  # anyone may take a port before the server does
