"""Set up the `vllm` rollout engine: servers, client, and channels for weights or adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.config import Config, VllmRolloutConfig
from cohort.errors import UserError
from cohort.models import end_token_ids, weight_specs
from cohort.plan.rollout_engine import vllm_sampling_limit
from cohort.plan.shape import RequestedAdapter
from cohort.ranks.worker_group import WorkerGroup
from cohort.rollout.engines.servers.handles import Client, ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.client import GenerateClient
from cohort.rollout.engines.vllm.lora_transfer import AdapterChannel, send_adapter
from cohort.rollout.engines.vllm.server import (
    POLICY_NAME,
    ServerProcess,
    check_version,
    check_vllm,
    root_cause,
    server_options,
    vllm_python,
)
from cohort.rollout.engines.vllm.weight_channel import WeightChannel, send_to_servers
from cohort.run.folder import ADAPTERS
from cohort.run.provenance import newer_than_tested
from cohort.trainer.inputs import Inputs
from cohort.trainer.server_setup import Connect, Publish, ServersSetup
from cohort.trainer.worker import Worker


class VllmSetup(ServersSetup):
    """Set up sampling by vLLM servers."""

    def __init__(self, config: Config, inputs: Inputs):
        """Check that vLLM is installed and supports this run.

        Raises:
            UserError: vLLM is missing, of an unsupported version, does not support this run, or has no GPU.
        """
        assert isinstance(config.rollout, VllmRolloutConfig)
        adapter = None
        if (spec := inputs.adapter) is not None:
            adapter = RequestedAdapter(rank=spec.rank, dora=spec.dora, targets=spec.modules)
        if (reason := vllm_sampling_limit(config, adapter)) is not None:
            raise UserError(f"{reason}, or rollout.engine: local")
        super().__init__(config, inputs)
        if self.placement is not None:
            check_vllm(vllm_python(config.rollout.vllm_python))

    def make_server(self, gpus: str, log_file: Path) -> ServerProcess:
        """Create the handle of a vLLM server."""
        options = server_options(self.config, gpus=gpus, shared=self.shares_gpus)
        assert self.secret is not None
        options = replace(options, max_model_len=self.max_model_len)
        return ServerProcess(options, secret=self.secret, log_file=log_file)

    def make_client(self, worker: Worker) -> Callable[[], Client]:
        """Return a function that creates a client of vLLM's token endpoint."""
        return partial(
            GenerateClient,
            end_token_ids=end_token_ids(worker.policy, self.inputs.tokenizer),
            vocab_size=worker.policy.model.config.get_text_config().vocab_size,
            secret=self.secret,
            timeout_s=self.rollout.request_timeout_s,
        )

    def make_channels(
        self, workers: WorkerGroup[Worker], *, folder: Path, notify: Callable[[str], None]
    ) -> tuple[Connect, Publish]:
        """Return functions that connect and publish: adapters if one is trained, else all weights."""
        policy, notify_once = workers.local.policy, cache(notify)
        if policy.adapter is not None:
            save = lambda path: workers.call(Worker.save_adapter, path)  # noqa: E731
            share = partial(send_adapter, save=save, folder=folder / ADAPTERS)
            to_adapter = partial(
                _connect_adapter, self.config, self.secret, keeps_base=self.keeps_base, notify=notify_once
            )
            return to_adapter, share
        ipc_gpus = frozenset(gpu for gpu in workers.call(Worker.gpu) if gpu) if self.shares_gpus else frozenset()
        connect = partial(
            _connect,
            self.config,
            self.secret,
            policy.device,
            sleeps=self.shares_gpus,
            ipc_gpus=ipc_gpus,
            notify=notify_once,
        )
        return connect, partial(_publish, workers, self.dtype, notify)

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
    workers: WorkerGroup[Worker],
    dtype: torch.dtype,
    notify: Callable[[str], None],
    channels: Sequence[WeightChannel],
    version: int,
) -> Mapping[WeightChannel, ServerError]:
    """Send the current weights to servers, and return those that failed. All ranks take part."""
    failed: dict[WeightChannel, ServerError] = {}
    specs = weight_specs(workers.local.policy, dtype)

    def send(weights: Iterator[tuple[str, Tensor]], handles: Mapping[str, Any]) -> None:
        failed.update(send_to_servers(channels, weights, specs, version, handles))

    share = any(channel.may_use_ipc for channel in channels)
    workers.call_with_local(Worker.send_weights, send, dtype, share=share)
    _show_notes(channels, notify)
    return failed


def _show_notes(channels: Sequence[WeightChannel], notify: Callable[[str], None]) -> None:
    for channel in channels:
        for text in channel.notes:
            notify(text)
        channel.notes.clear()
