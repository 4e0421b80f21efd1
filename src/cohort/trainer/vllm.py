"""The `vllm` rollout engine of a run: its servers, how the weights reach them, and that they do."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.config import Config, VllmRolloutConfig
from cohort.errors import UserError
from cohort.placement import Placement, server_placement
from cohort.plan.defaults import serving_dtype
from cohort.plan.rollout_engine import why_not_sampled
from cohort.policy import Policy, end_token_ids, resolve_device, weight_specs
from cohort.rollout import RolloutCollector, SamplingParams
from cohort.rollout.servers import Fleet, FleetLimits, RemoteServer, ServerEngine, ServerError, ServerHandle
from cohort.rollout.vllm import (
    POLICY_NAME,
    AdapterChannel,
    GenerateClient,
    ServerOptions,
    ServerProcess,
    VllmApi,
    WeightChannel,
    check_version,
    check_vllm,
    publish,
    publish_adapter,
    server_options,
)
from cohort.rollout.vllm.root_cause import root_cause
from cohort.run_folder import ADAPTERS, LOGS
from cohort.trainer.engines import StartedEngine
from cohort.trainer.inputs import Inputs
from cohort.trainer.parity import ParityGate, make_probe
from cohort.trainer.worker import Worker
from cohort.trainer.worker_calls import keep_waiting
from cohort.trainer.worker_group import WorkerGroup

Engine = ServerEngine[WeightChannel] | ServerEngine[AdapterChannel]
_MEET_TIMEOUT_S = 60.0  # making and trying a way of weights takes seconds where it works


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What a run samples with: servers that it starts, or someone else's."""

    options: tuple[ServerOptions, ...]  # of each server that the run starts
    urls: tuple[str, ...]  # of each that someone else has
    placement: Placement | None  # of the former
    dtype: torch.dtype  # of their weights

    @property
    def shares_gpus(self) -> bool:
        """Whether they take turns with training on its GPUs."""
        return self.placement is not None and self.placement.shared

    def start(
        self,
        config: Config,
        inputs: Inputs,
        workers: WorkerGroup[Worker],
        *,
        folder: Path,
        note: Callable[[str], None],
    ) -> StartedEngine:
        """Start them, as `start_engine` has it."""
        engine = start_engine(config, self, workers, tokenizer=inputs.tokenizer, folder=folder, note=note)
        return StartedEngine(engine=engine, gate=partial(make_parity_gate, config, self, inputs, workers, engine))

    def handles(self, logs: Path) -> list[ServerHandle]:
        """One for each server, not started yet."""
        ours = [ServerProcess(o, log_file=logs / f"vllm-{i}.log") for i, o in enumerate(self.options)]
        return [*ours, *map(RemoteServer, self.urls)]


def find_servers(config: Config, inputs: Inputs) -> Servers:
    """Which servers the run samples with.

    Raises:
        UserError: there is no vLLM that Cohort knows, or no GPU for it, or it cannot sample what the run asks for.
    """
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    if (reason := why_not_sampled(config, inputs.adapter)) is not None:
        raise UserError(f"{reason}, or rollout.engine: local")
    placement = None if rollout.urls else server_placement(config)
    options = []
    if placement is not None:
        # no longer than what there is: a cache has room for so much more then
        longest = inputs.longest_path_tokens + 1
        options = [
            replace(server_options(config, gpus=gpus, shared=placement.shared), max_model_len=longest)
            for gpus in placement.gpus
        ]
        check_vllm(options[0].python)
        if placement.shared and rollout.max_staleness:
            raise UserError(
                f"rollout.max_staleness: {rollout.max_staleness} needs GPUs that only sample, and here vLLM sleeps "
                f"while the policy trains ({placement.reason}); use max_staleness: 0"
            )
    # a server elsewhere computes as `cohort serve` says there, by the same rule, on the same kind of device
    trains_on_gpu = resolve_device(config.hardware.device).type == "cuda"
    dtype = options[0].dtype if options else serving_dtype(config, on_gpu=trains_on_gpu)
    return Servers(options=tuple(options), urls=rollout.urls, placement=placement, dtype=getattr(torch, dtype))


def start_engine(
    config: Config,
    servers: Servers,
    workers: WorkerGroup[Worker],
    *,
    tokenizer: object,
    folder: Path,
    note: Callable[[str], None],
) -> Engine:
    """Start the servers. They get the trainer's weights when they are up.

    Args:
        config: of the run.
        servers: that it samples with.
        workers: whose weights.
        tokenizer: of the model.
        folder: of the run; the servers' logs go into it.
        note: told how the start goes, and later what becomes of servers.

    Raises:
        TrainingError: no server can be started.
    """
    policy, logs, shared = workers.local.policy, folder / LOGS, servers.shares_gpus
    for text in _announcements(servers, logs):
        note(text)
    fleet = _start_fleet(config, servers, policy, tokenizer=tokenizer, logs=logs)
    common: dict[str, Any] = {
        "note": note,
        "while_waiting": partial(keep_waiting, workers),
        "sleeps": shared,
        "make_room": partial(workers.call, Worker.free_cache),
    }
    engine: Engine
    if policy.adapter is None:
        lenders = frozenset(gpu for gpu in workers.call(Worker.gpu) if gpu) if shared else frozenset()
        connect = partial(_connect, config, policy.device, sleeps=shared, lenders=lenders, note=note)
        send = partial(_publish, workers, servers.dtype, note)
        engine = ServerEngine(fleet, connect=connect, publish=send, **common)
    else:
        share = partial(_publish_adapter, workers, folder / ADAPTERS)
        engine = ServerEngine(fleet, connect=partial(_connect_adapter, config), publish=share, **common)
    try:
        engine.load_weights(policy_version=workers.local.engine.updates_done)
        engine.release_gpus()  # training finds the memory of shared GPUs free from here on
    except BaseException:
        engine.close()
        raise
    return engine


def _start_fleet(config: Config, servers: Servers, policy: Policy, *, tokenizer: object, logs: Path) -> Fleet:
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    client = partial(
        GenerateClient,
        model=POLICY_NAME,
        end_token_ids=end_token_ids(policy, tokenizer),
        vocab_size=policy.model.config.get_text_config().vocab_size,
        timeout_s=rollout.request_timeout_s,
    )
    limits = FleetLimits(
        max_num_seqs=rollout.max_num_seqs,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        max_server_failures=rollout.max_server_failures,
    )
    return Fleet(servers.handles(logs), client, limits, server_name=rollout.server_name, find_cause=root_cause)


def _announcements(servers: Servers, logs: Path) -> Iterator[str]:
    if servers.placement is not None:
        yield servers.placement.reason
        count = len(servers.options)
        yield f"starting {count} vLLM server{'s' if count > 1 else ''}; what they say is in {logs}/vllm-*.log"
    else:
        yield f"sampling with the vLLM servers at {', '.join(servers.urls)}"


def _connect(
    config: Config, device: torch.device, url: str, *, sleeps: bool, lenders: Set[str], note: Callable[[str], None]
) -> WeightChannel:
    """The way of the weights from rank 0's device to a server that is up, made and tried.

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
            meet_timeout_s=min(_MEET_TIMEOUT_S, timeout_s),
            sleeps=sleeps,
            lenders=lenders,
        )
    try:
        channel.open()
    except BaseException:
        channel.close()
        raise
    _tell([channel], note)
    return channel


def _connect_adapter(config: Config, url: str) -> AdapterChannel:
    """The way of adapters to a server that is up.

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


def _publish_adapter(
    workers: WorkerGroup[Worker], folder: Path, channels: Sequence[AdapterChannel], version: int
) -> Mapping[AdapterChannel, ServerError]:
    """Hand the adapter as it is to servers. All ranks take part."""

    def save(path: Path) -> None:
        workers.call(Worker.save_adapter, path)

    return publish_adapter(channels, save, folder, version)


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

    lend = any(channel.may_borrow for channel in channels)
    workers.call_with_local(Worker.send_weights, send, dtype, lend=lend)
    _tell(channels, note)
    return failed


def _tell(channels: Sequence[WeightChannel], note: Callable[[str], None]) -> None:
    for channel in channels:
        for text in channel.notes:
            note(text)
        channel.notes.clear()


def make_parity_gate(
    config: Config,
    servers: Servers,
    inputs: Inputs,
    workers: WorkerGroup[Worker],
    engine: Engine,
    collector: RolloutCollector,
) -> ParityGate | None:
    """The gate of a run; None where it has none."""
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    if rollout.parity_every == 0:
        return None
    tolerance = rollout.parity_tolerance
    if tolerance == "auto":
        policy = workers.local.policy
        rounds = torch.bfloat16 in (servers.dtype, policy.dtype, policy.compute_dtype)
        tolerance = 0.05 if rounds else 1e-3
    sampling = SamplingParams(
        num_generations=rollout.num_generations,
        max_completion_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
    )
    return ParityGate(
        sample_on_each=partial(engine.sample_on_each_server, collector),
        workers=workers,
        probe=make_probe(inputs.prompts.prompts, sampling, seed=config.train.seed),
        every=rollout.parity_every,
        tolerance=tolerance,
    )
