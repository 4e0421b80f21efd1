"""The `vllm` rollout engine of a run: what of its servers is vLLM's, and how the weights reach them."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.config import Config, VllmRolloutConfig
from cohort.errors import UserError
from cohort.models import end_token_ids, weight_specs
from cohort.plan.rollout_engine import vllm_sampling_limit
from cohort.rollout.engines.servers import Client, ServerError
from cohort.rollout.engines.vllm import (
    POLICY_NAME,
    AdapterChannel,
    GenerateClient,
    ServerProcess,
    VllmApi,
    WeightChannel,
    check_version,
    check_vllm,
    publish,
    publish_adapter,
    server_options,
    vllm_python,
)
from cohort.rollout.engines.vllm.root_cause import root_cause
from cohort.run_folder import ADAPTERS
from cohort.trainer.run_inputs import Inputs
from cohort.trainer.server_rollouts import Connect, Publish, ServersSetup
from cohort.trainer.worker import Worker
from cohort.trainer.worker_group import WorkerGroup

_RENDEZVOUS_TIMEOUT_S = 60.0  # setting up and testing a transport takes seconds if it works


class VllmSetup(ServersSetup):
    """Set up sampling by vLLM servers."""

    def __init__(self, config: Config, inputs: Inputs):
        """As `ServersSetup`.

        Raises:
            UserError: there is no vLLM that Cohort knows, or no GPU for it, or it cannot sample what the run asks for.
        """
        assert isinstance(config.rollout, VllmRolloutConfig)
        if (reason := vllm_sampling_limit(config, inputs.adapter)) is not None:
            raise UserError(f"{reason}, or rollout.engine: local")
        super().__init__(config, inputs)
        if self.placement is not None:
            check_vllm(vllm_python(config.rollout.vllm_python))

    def own_server(self, gpus: str, log_file: Path) -> ServerProcess:
        """Make the handle of a vLLM server."""
        options = server_options(self.config, gpus=gpus, shared=self.shares_gpus)
        return ServerProcess(replace(options, max_model_len=self.max_model_len), log_file=log_file)

    def make_client(self, worker: Worker) -> Callable[[], Client]:
        """Return a function that makes the client of vLLM's endpoint for tokens."""
        return partial(
            GenerateClient,
            model=POLICY_NAME,
            end_token_ids=end_token_ids(worker.policy, self.inputs.tokenizer),
            vocab_size=worker.policy.model.config.get_text_config().vocab_size,
            timeout_s=self.rollout.request_timeout_s,
        )

    def make_channels(
        self, workers: WorkerGroup[Worker], *, folder: Path, note: Callable[[str], None]
    ) -> tuple[Connect, Publish]:
        """Return how an adapter reaches vLLM servers where one is trained, else how all weights do."""
        policy = workers.local.policy
        if policy.adapter is not None:
            save = lambda path: workers.call(Worker.save_adapter, path)  # noqa: E731
            share = partial(publish_adapter, save=save, folder=folder / ADAPTERS)
            return partial(_connect_adapter, self.config), share
        ipc_gpus = frozenset(gpu for gpu in workers.call(Worker.gpu) if gpu) if self.shares_gpus else frozenset()
        connect = partial(_connect, self.config, policy.device, sleeps=self.shares_gpus, ipc_gpus=ipc_gpus, note=note)
        return connect, partial(_publish, workers, self.dtype, note)

    def find_cause(self, log: str) -> str | None:
        """Find the exception that ended a server in its log."""
        return root_cause(log)


def _connect(
    config: Config, device: torch.device, url: str, *, sleeps: bool, ipc_gpus: Set[str], note: Callable[[str], None]
) -> WeightChannel:
    """Open a channel that sends weights from rank 0 to a running server.

    Raises:
        UserError: it is of another version of vLLM than Cohort knows.
        ServerError: it does not answer, or its workers do not come.
    """
    timeout_s = config.hardware.timeout_s / 8  # a server that hangs costs several; the other ranks wait meanwhile
    with closing(VllmApi(url, timeout_s=timeout_s)) as api:
        check_version(api.version(), f"rollout.urls: {url}")  # of the run's own servers it is known
        num_workers = api.world_size()
        channel = WeightChannel(
            api,
            device=device,
            num_workers=num_workers,
            timeout_s=timeout_s,
            rendezvous_timeout_s=min(_RENDEZVOUS_TIMEOUT_S, timeout_s),
            sleeps=sleeps,
            ipc_gpus=ipc_gpus,
        )
    try:
        channel.open()
    except BaseException:
        channel.close()
        raise
    _tell([channel], note)
    return channel


def _connect_adapter(config: Config, url: str) -> AdapterChannel:
    """Open a channel that sends adapters to a running server.

    Raises:
        UserError: it is of another version of vLLM than Cohort knows, or was started without room for an adapter.
        ServerError: it does not answer.
    """
    api = VllmApi(url, timeout_s=config.hardware.timeout_s / 8)
    try:
        check_version(api.version(), f"rollout.urls: {url}")
        if POLICY_NAME in (names := api.model_names()) and f"{POLICY_NAME}-base" not in names:
            raise UserError(
                f"rollout.urls: {url} serves the model without an adapter, and this run trains one; start it by "
                f"`cohort serve` with this run's configuration"
            )
    except BaseException:
        api.close()
        raise
    return AdapterChannel(api)


def _publish(
    workers: WorkerGroup[Worker],
    dtype: torch.dtype,
    note: Callable[[str], None],
    channels: Sequence[WeightChannel],
    version: int,
) -> Mapping[WeightChannel, ServerError]:
    """Hand the weights as they are to servers. All ranks take part."""
    failed: dict[WeightChannel, ServerError] = {}
    specs = weight_specs(workers.local.policy, dtype)

    def send(weights: Iterator[tuple[str, Tensor]], handles: Mapping[str, Any]) -> None:
        failed.update(publish(channels, weights, specs, version, handles))

    share = any(channel.may_use_ipc for channel in channels)
    workers.call_with_local(Worker.send_weights, send, dtype, share=share)
    _tell(channels, note)
    return failed


def _tell(channels: Sequence[WeightChannel], note: Callable[[str], None]) -> None:
    for channel in channels:
        for text in channel.notes:
            note(text)
        channel.notes.clear()
