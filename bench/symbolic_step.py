"""Memory of a symbolic training step, without a GPU or weights.

Builds and shards the model as training does and runs one step on fake tensors: forward and backward of two
micro-batches and the clipped update. PyTorch's `MemTracker` counts bytes. Not included: CUDA context, NCCL buffers and
fragmentation.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cohort.config import ModelConfig
from cohort.models import Critic, Policy, attention
from cohort.models.activation_checkpointing import prepare_activations
from cohort.models.adapters.lora import Adapter, adapter_init
from cohort.models.fsdp import CollectiveCounter, Sharding
from cohort.models.lm_head import logprobs, tiled_softmax
from cohort.models.loading.meta_device import meta_model
from cohort.models.policy import ModelTraits
from cohort.packing import collate
from cohort.packing.batch import MicroBatch
from cohort.packing.to_device import to_device
from cohort.plan.backward import CPU_BLOCK
from cohort.ranks.collectives import Ranks
from cohort.records import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStep:
    """Peak memory of one rank in each stage of a step, in bytes."""

    state_bytes: int  # weights and optimizer state, between steps
    train_bytes: int  # peak of forward and backward, with accumulated gradients
    update_bytes: int  # peak of clipping and update


def track_step(
    model_config: dict[str, Any],
    *,
    world_size: int,
    prompt_tokens: int,
    completion_tokens: int,
    num_generations: int,
    critic: bool = False,
    reshard_after_forward: bool | int = True,
    **model: Any,
) -> TrackedStep:
    """Run a step symbolically, with one group per micro-batch.

    Args:
        model_config: content of config.json.
        world_size: number of training processes, at least 2, with fake collectives.
        prompt_tokens: length of the prompt.
        completion_tokens: length of each completion.
        num_generations: completions in the group.
        critic: whether to build a critic (value model).
        reshard_after_forward: as `hardware.reshard_after_forward`.
        **model: other keys of the `model` section. With `parameter_offload`, host memory is counted as well.
    """
    with tempfile.TemporaryDirectory() as folder, _fake_ranks(world_size):
        (Path(folder) / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
        settings = ModelConfig.model_validate({"path": folder, "compute_dtype": "bfloat16", **model})
        policy = _sharded_policy(settings, Critic if critic else Policy, reshard_after_forward)
        sequences = _group(prompt_tokens, completion_tokens, num_generations)
        micro_batch = collate(sequences, share_prompts=True)
        # which rows of the head have a gradient depends on values: here, all of them
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            patch.object(logprobs, "_live_rows", lambda _: None),
            patch.object(logprobs, "CPU_TILE_ELEMENTS", logprobs.TILE_ELEMENTS),  # as on a GPU
            patch.dict(tiled_softmax.BLOCK_ELEMENTS, cpu=CPU_BLOCK),  # fewer operations to trace
        ):
            assert policy.sharding is not None
            policy.sharding.allocate()
            policy.sharding.finalize()
            return _track(policy, to_device(micro_batch, torch.device("cpu"), torch.float32))


def _track(policy: Policy, micro_batch: MicroBatch) -> TrackedStep:
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def accumulate() -> None:
        logp, _ = policy.logprobs(micro_batch, temperature=1.0)
        (logp * micro_batch.loss_weights).sum().backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def earlier_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    earlier_gradients()
    update()  # creates the moments and per-shape caches
    earlier_gradients()
    tracker = _Tracker()
    tracker.track_external(policy.model, optimizer)
    update_bytes = _peak(tracker, update)
    gradients = sum(cast("DTensor", p.grad).to_local().nbytes for p in parameters)
    train_bytes = _peak(tracker, accumulate)
    return TrackedStep(state_bytes=update_bytes - gradients, train_bytes=train_bytes, update_bytes=update_bytes)


class _NoHook:
    """Placeholder for the hook of a frozen parameter."""

    def remove(self) -> None:
        """Do nothing."""


class _Tracker(MemTracker):
    """A `MemTracker` that skips gradient hooks of frozen parameters, which refuse them."""

    def _track_module_params_and_buffers(
        self, module: torch.nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


def _peak(tracker: MemTracker, operation: Callable[[], None]) -> int:
    tracker.reset_mod_stats()
    with tracker:
        operation()
    return sum(int(parts["Total"]) for parts in tracker.get_tracker_snapshot("peak").values())


def _sharded_policy(config: ModelConfig, kind: type[Policy], reshard_after_forward: bool | int) -> Policy:
    model = meta_model(config)
    kind.replace_head(model)
    if config.adapter is not None:
        start = adapter_init(config, checkpoint=None, keep_reference=False, seed=0, model=model)
        Adapter(model, start, trainable=True)
    model.set_attn_implementation(attention.NAME)
    model.train()
    prepare_activations(model, config)
    compute_dtype = getattr(torch, config.dtype if config.compute_dtype == "auto" else config.compute_dtype)
    sharding = Sharding(
        model,
        CollectiveCounter(),
        mesh=Ranks(world_size=dist.get_world_size()).device_mesh("cpu"),
        device=torch.device("cpu"),
        compute_dtype=compute_dtype,
        on_host=config.parameter_offload,
        reshard_after_forward=reshard_after_forward,
    )
    traits = ModelTraits(layout="shared", reason=None, has_plain_head=kind is Policy, attention=attention.NAME)
    return kind(
        model,
        device=torch.device("cpu"),
        compute_dtype=compute_dtype,
        pad_token_id=0,
        traits=traits,
        sharding=sharding,
    )


def _group(prompt_tokens: int, completion_tokens: int, num_generations: int) -> list[TrainSequence]:
    prompt, completion = np.ones(prompt_tokens, dtype=np.int64), np.ones(completion_tokens, dtype=np.int64)
    return [
        TrainSequence.single_turn(prompt, completion, index=index, group=0, loss_weights=1.0, advantages=1.0)
        for index in range(num_generations)
    ]


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
