"""Set up the `vllm` rollout engine: servers, client, and channels for weights or adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from cohort.config import Config, VllmRolloutConfig
from cohort.errors import UserError
from cohort.models import Policy, end_token_ids, weight_specs
from cohort.rollout.engines.servers.channels import Channel, Channels, send_to_servers
from cohort.rollout.engines.servers.cuda_ipc import IpcHandle
from cohort.rollout.engines.servers.handles import Client, ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.servers.setup import ServersSetup
from cohort.rollout.engines.setup import TrainingProcesses
from cohort.rollout.engines.vllm.api import GenerateClient, VllmApi
from cohort.rollout.engines.vllm.server import (
    POLICY_NAME,
    ServerProcess,
    check_version,
    check_vllm,
    root_cause,
    server_command,
    server_options,
    vllm_python,
)
from cohort.rollout.engines.vllm.weight_channel import AdapterChannel, WeightChannel, send_adapter
from cohort.run.folder import ADAPTERS
from cohort.run.provenance import newer_than_tested


class VllmSetup(ServersSetup):
    """Set up sampling by vLLM servers."""

    @classmethod
    def find_program(cls, config: Config) -> str:
        """Return the version of vLLM in its environment.

        Raises:
            UserError: there is none, or an unsupported version.
        """
        assert isinstance(config.rollout, VllmRolloutConfig)
        return check_vllm(vllm_python(config.rollout.vllm_python))

    @classmethod
    def serve_command(cls, config: Config, *, gpus: str, host: str, port: int) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a server, and the environment variables that it adds."""
        return server_command(replace(server_options(config, gpus=gpus), host=host), port)

    def make_server(self, gpus: str, log_file: Path) -> ServerProcess:
        """Create the handle of a vLLM server."""
        options = server_options(self.config, gpus=gpus, shared=self.shares_gpus)
        assert self.secret is not None
        options = replace(options, max_model_len=self.max_model_len)
        return ServerProcess(options, secret=self.secret, log_file=log_file)

    def make_client(self, policy: Policy) -> Callable[[], Client]:
        """Return a function that creates a client of vLLM's token endpoint."""
        return partial(
            GenerateClient,
            end_token_ids=end_token_ids(policy, self.inputs.tokenizer),
            vocab_size=policy.model.config.get_text_config().vocab_size,
            secret=self.secret,
            timeout_s=self.rollout.request_timeout_s,
        )

    def make_channels(
        self, processes: TrainingProcesses, *, folder: Path, notify: Callable[[str], None]
    ) -> Channels[Channel]:
        """Return channels for adapters if one is trained, else for all weights."""
        notify_once = cache(notify)
        if processes.policy.adapter is not None:
            return Channels(
                partial(_connect_adapter, self.config, self.secret, keeps_base=self.keeps_base, notify=notify_once),
                partial(send_adapter, save=processes.save_adapter, folder=folder / ADAPTERS),
            )
        connect = partial(
            _connect,
            self.config,
            self.secret,
            processes.policy.device,
            sleeps=self.shares_gpus,
            ipc_gpus=processes.gpus() if self.shares_gpus else frozenset(),
            notify=notify_once,
        )
        return Channels(connect, partial(_publish, processes, self.dtype, notify))

    def find_cause(self, log: str) -> str | None:
        """Return the exception that ended a server, from its log."""
        return root_cause(log)


def _connect(
    config: Config,
    secret: Secret | None,
    device: torch.device,
    url: str,
    *,
    sleeps: bool,
    ipc_gpus: Set[str],
    notify: Callable[[str], None],
) -> WeightChannel:
    """Open a channel that sends weights from rank 0 to a running server.

    Raises:
        UserError: the server's version of vLLM is not supported.
        ServerError: the server or its workers do not answer.
    """
    timeout_s = config.hardware.timeout_s / 8  # a hanging server uses up several, while the other ranks wait
    with closing(VllmApi(url, secret=secret, timeout_s=timeout_s)) as api:
        _check_version(api, url, notify)
        num_workers = api.world_size()
    channel = WeightChannel(
        url,
        secret=secret,
        device=device,
        num_workers=num_workers,
        timeout_s=timeout_s,
        sleeps=sleeps,
        ipc_gpus=ipc_gpus,
    )
    try:
        channel.open()
    except BaseException:
        channel.close()
        raise
    _show_notes([channel], notify)
    return channel


def _connect_adapter(
    config: Config, secret: Secret | None, url: str, *, keeps_base: bool = False, notify: Callable[[str], None]
) -> AdapterChannel:
    """Open a channel that sends adapters to a running server.

    Raises:
        UserError: the server's version of vLLM is not supported, or it was started without adapters.
        ServerError: the server does not answer.
    """
    api = VllmApi(url, secret=secret, timeout_s=config.hardware.timeout_s / 8)
    try:
        _check_version(api, url, notify)
        if POLICY_NAME in (names := api.model_names()) and f"{POLICY_NAME}-base" not in names:
            raise UserError(
                f"rollout.urls: {url} serves the model without an adapter, but this run trains one; start it with "
                f"`cohort serve` and this run's configuration"
            )
    except BaseException:
        api.close()
        raise
    return AdapterChannel(api, keeps_base=keeps_base)


def _check_version(api: VllmApi, url: str, notify: Callable[[str], None]) -> None:
    """Refuse a vLLM that is too old, which the run's own servers are known not to be, and name one that is too new."""
    version = api.version()
    check_version(version, f"rollout.urls: {url}")
    if (note := newer_than_tested("vllm", version)) is not None:
        notify(note)


def _publish(
    processes: TrainingProcesses,
    dtype: torch.dtype,
    notify: Callable[[str], None],
    channels: Sequence[WeightChannel],
    version: int,
) -> Mapping[WeightChannel, ServerError]:
    """Send the current weights to servers, and return those that failed. All ranks take part."""
    failed: dict[WeightChannel, ServerError] = {}
    specs = weight_specs(processes.policy, dtype)

    def send(weights: Iterator[tuple[str, Tensor]], handles: Mapping[str, IpcHandle]) -> None:
        failed.update(send_to_servers(channels, weights, specs, version, handles))

    processes.send_weights(send, dtype, share=any(channel.may_use_ipc for channel in channels))
    _show_notes(channels, notify)
    return failed


def _show_notes(channels: Sequence[WeightChannel], notify: Callable[[str], None]) -> None:
    for channel in channels:
        for text in channel.notes:
            notify(text)
        channel.notes.clear()
