"""What is kept from forward to backward: how much, where, and that no gradient changes by it."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from cohort.config import ModelConfig, config_from_dict
from cohort.errors import UserError
from cohort.models import Policy, check_offload
from cohort.models.activation_checkpointing import (
    ActivationOffload,
    enable_gradient_checkpointing,
    enable_offload,
    hooks_are_outside_of_checkpoints,
    prepare_activations,
)
from cohort.packing import collate
from cohort.packing.batch import MicroBatch
from cohort.packing.to_device import to_device
from test_flops import make_moe
from tiny import gradients, make_model, policy_of, random_sequences, relative_error

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 192}  # a row of 100 tokens has no weight's shape
LAYERS, HIDDEN, BYTES = 2, 64, 4


def make_row(policy: Policy) -> MicroBatch:
    sequences = random_sequences([(30, [20, 31]), (7, [4, 12])])
    return to_device(collate(sequences, share_prompts=True), policy.device, policy.dtype)


def make_trained(checkpointing: bool | str = False, *, kind: str = "qwen3", **overrides: Any) -> Policy:
    policy = policy_of(make_model(kind, **SHAPE, **overrides))
    policy.model.train()
    if checkpointing:
        enable_gradient_checkpointing(policy.model, selective=checkpointing == "selective")
    return policy


def gradient(policy: Policy) -> dict[str, torch.Tensor]:
    logprobs, _ = policy.logprobs(make_row(policy), temperature=0.9)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return gradients(policy.model)


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of those of their outputs that are alive."""

    def __init__(self, model: Any):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.counts[operation.name()] += 1
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self._weights:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def attention(self) -> int:
        return sum(n for name, n in self.counts.items() if "attention" in name and "backward" not in name)

    def bytes_alive(self) -> int:
        gc.collect()
        return sum(nbytes for storage, nbytes in self._storages.values() if not storage.expired())


# Checkpointing


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_selective_checkpointing_changes_no_bit_of_a_gradient(kind: str):
    expected, actual = gradient(make_trained(kind=kind)), gradient(make_trained("selective", kind=kind))
    assert all(torch.equal(actual[name], expected[name]) for name in expected) and expected


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_what_is_computed_twice(checkpointing: bool | str):
    """Products of a layer with weights: four around attention, two into the MLP, and one out of it."""
    policy = make_trained(checkpointing)
    with Operations(policy.model) as forward:
        loss = policy.logprobs(make_row(policy), temperature=1.0)[0].sum()
    with Operations(policy.model) as backward:
        loss.backward()
    again = backward.counts["aten::mm"] - 2 * forward.counts["aten::mm"]
    assert forward.counts["aten::mm"] == 7 * LAYERS and forward.attention() > 0
    assert again == {False: 0, True: 6, "selective": 2}[checkpointing] * LAYERS
    assert backward.attention() == (forward.attention() if checkpointing is True else 0)


def test_selective_lies_between_all_and_the_inputs():
    kept = {}
    for checkpointing in (False, True, "selective"):
        policy = make_trained(checkpointing, num_hidden_layers=6)
        row = make_row(policy)
        with Operations(policy.model) as operations:
            out = policy.logprobs(row, temperature=1.0)
            kept[checkpointing] = operations.bytes_alive()
        del out
    assert 1.5 * kept[True] < kept["selective"] < 0.5 * kept[False]


# Offloading


def make_offloaded(checkpointing: bool | str = False, **settings: Any) -> tuple[Policy, ActivationOffload]:
    policy = make_trained(checkpointing)
    return policy, enable_offload(policy.model, **{"device_type": "cpu", "min_bytes": 1, **settings})


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_offloading_changes_no_bit_of_a_gradient(checkpointing: bool | str):
    expected = gradient(make_trained())
    policy, offload = make_offloaded(checkpointing)
    for _ in range(2):
        actual = gradient(policy)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert offload.num_bytes_moved > 0


def test_what_comes_back_is_what_the_gradient_is_made_of():
    """The negative control: other numbers in host memory are another gradient."""
    expected = gradient(make_trained())
    policy, offload = make_offloaded(True)
    logprobs, _ = policy.logprobs(make_row(policy), temperature=0.9)
    for moved in offload._moved.values():
        for piece in moved._host:
            piece.view(torch.float32).mul_(-2)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    actual = gradients(policy.model)
    assert max(relative_error(actual[name], expected[name]) for name in expected) > 0.1


def test_a_transformers_that_checkpoints_hooks_too_is_refused(monkeypatch: pytest.MonkeyPatch):
    config = ModelConfig(path="m", gradient_checkpointing=True, activation_offload=True)
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", nn.Module.__call__, raising=False)  # as in 5.22
    with pytest.raises(UserError, match=r"model\.activation_offload: true with .* needs transformers 5\.23 or newer"):
        prepare_activations(make_trained().model, config)


@pytest.mark.skipif(not hooks_are_outside_of_checkpoints(), reason="refused with transformers before 5.23")
def test_with_checkpointing_the_inputs_of_layers_move_and_nothing_else():
    policy, offload = make_offloaded(True)
    row = make_row(policy)
    policy.logprobs(row, temperature=1.0)
    assert offload.num_bytes_moved == LAYERS * len(row.input_ids) * HIDDEN * BYTES


class Watched(ActivationOffload):
    """Remembers what it has moved."""

    def __init__(self, model: Any, **settings: Any):
        super().__init__({tuple(p.shape) for p in model.parameters() if p.ndim >= 2}, device_type="cpu", **settings)
        self.moved: list[torch.Tensor] = []
        for layer in model.base_model.layers:
            layer.register_forward_pre_hook(self.enter)
            layer.register_forward_hook(self.leave)

    def _move(self, tensor):
        self.moved.append(tensor)
        return super()._move(tensor)


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_and_small_tensors_are_never_moved(autocast: bool):
    """Whole, transposed, and as autocast's copies in bfloat16."""
    policy = make_trained()
    if autocast:
        policy.compute_dtype = torch.bfloat16
    offload = Watched(policy.model, min_bytes=2000)
    policy.logprobs(make_row(policy), temperature=1.0)
    assert offload.moved and all(t.nbytes >= 2000 for t in offload.moved)
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    shapes = {tuple(p.shape) for p in policy.model.parameters()}
    assert not weights & {t.untyped_storage().data_ptr() for t in offload.moved}
    assert not {tuple(t.shape) for t in offload.moved} & (shapes | {s[::-1] for s in shapes})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_are_weights_too(experts: str, autocast: bool):
    """One expert is a part of a storage that holds all of them."""
    model = make_moe(experts_implementation=experts).train()
    offload = Watched(model, min_bytes=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=torch.arange(47).unsqueeze(0), use_cache=False)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert offload.moved and not weights & {t.untyped_storage().data_ptr() for t in offload.moved}
    assert not {(32, 32), (32, 16), (16, 32), (8, 32, 32)} & {tuple(t.shape) for t in offload.moved}


def test_a_storage_moves_once_however_often_it_is_saved():
    x = torch.arange(12.0).view(4, 3)
    offload = ActivationOffload(set(), device_type="cpu", min_bytes=1)
    handles = [offload.pack(t) for t in (x, x.t(), x[1:, :2])]
    assert offload.num_bytes_moved == x.nbytes
    for handle, tensor in zip(handles, (x, x.t(), x[1:, :2]), strict=True):
        back = handle.tensor()
        assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.data_ptr() != tensor.data_ptr()
    x += 1  # another version is another tensor
    assert torch.equal(offload.pack(x).tensor(), x) and offload.num_bytes_moved == 2 * x.nbytes


def test_a_storage_at_the_address_of_a_freed_one_is_another():
    offload = ActivationOffload(set(), device_type="cpu", min_bytes=1)
    handles = [offload.pack(torch.full((100,), float(n))) for n in range(50)]
    assert [h.tensor()[0].item() for h in handles] == list(range(50))


def test_a_layer_that_fails_ends_its_hooks():
    policy, offload = make_offloaded()
    policy.model.base_model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.logprobs(make_row(policy), temperature=1.0)
    moved = offload.num_bytes_moved
    x = torch.ones(500, requires_grad=True)
    (x * x).sum().backward()
    assert offload.num_bytes_moved == moved


def test_offloading_on_a_cpu_is_refused():
    config = ModelConfig(path="m", activation_offload=True)
    with pytest.raises(UserError, match=r"model.activation_offload: true has no effect on CPU.*selective"):
        check_offload(config, torch.device("cpu"))
    check_offload(config, torch.device("cuda"))
    check_offload(ModelConfig(path="m"), torch.device("cpu"))


def test_neither_way_of_checkpointing():
    with pytest.raises(UserError) as caught:
        config_from_dict({"model": {"path": "m", "gradient_checkpointing": "full"}})
    assert "model.gradient_checkpointing: 'full': must be auto, true, false or selective" in str(caught.value)


def test_a_model_without_known_layers_is_refused():
    model = make_model()
    model._no_split_modules = None
    with pytest.raises(UserError, match="does not name its layers"):
        prepare_activations(model, ModelConfig(path="m", activation_offload=True))
