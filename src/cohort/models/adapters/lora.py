"""LoRA adapters, through peft.

The base weights are frozen in `model.dtype` and never merged into. Adapter weights are float32 (float64 in a float64
model); their products are computed in the dtype of the input.

R LoRA rank.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.adapter_folder import (
    BASE_FINGERPRINT,
    BASE_QUANTIZATION,
    PREFIX,
    WEIGHTS_FILE,
    AdapterSpec,
    adapter_spec,
    key_prefix,
    read_adapter,
)
from cohort.models.fsdp import local_rows
from cohort.models.loading.multimodal import outer_name

_CURRENT, _START = "default", "start"  # the trained adapter and a frozen copy of its initial weights, in peft


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInit:
    """An adapter and its initial weights. Every rank holds all of them: they are small."""

    spec: AdapterSpec
    seed: int  # for new weights
    weights: dict[str, Tensor] | None  # by name in a saved adapter; None: initialize new ones, a no-op at first
    reference: dict[str, Tensor] | None  # of the adapter that the run started from; None: reference is the base alone


class Adapter:
    """A LoRA adapter, added in place to the layers of a model."""

    def __init__(self, model: Any, init: AdapterInit, *, trainable: bool):
        """Add the adapter with uninitialized weights. Call `initialize` once the base weights are loaded.

        Args:
            model: a model on any device, including meta; its weights are frozen. Layers that it lacks are skipped.
            init: the adapter and its initial weights.
            trainable: whether the adapter requires gradients.
        """
        self.model = model
        self.spec = init.spec
        self._values: AdapterInit | None = init  # until `initialize`
        self._keeps_start = init.reference is not None
        model.requires_grad_(False)
        self._inject(_CURRENT)
        if self._keeps_start:
            self._inject(_START)
        self._switch(_CURRENT)
        for tensor in self.tensors().values():
            tensor.requires_grad_(trainable)

    def tensors(self, name: str = _CURRENT) -> dict[str, Tensor]:
        """Return the adapter's parameters, sharded or not, by name in a saved adapter."""
        from peft import get_peft_model_state_dict

        parameters = dict(self.model.named_parameters())
        named = get_peft_model_state_dict(self.model, parameters, adapter_name=name, save_embedding_layers=False)
        return {PREFIX + outer_name(self.model, key): tensor for key, tensor in named.items()}

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the initial weights. The base weights must be loaded. With a sharded model, call on every rank.

        Raises:
            UserError: DoRA cannot normalize a row of the base weight that is 0.
        """
        values, self._values = self._values, None
        assert values is not None, "initialize is called once"
        for key, tensor in self.tensors().items():
            saved = values.weights
            _assign(tensor, self._initial_value(key, tensor, values.seed) if saved is None else saved[key])
        if values.reference is not None:
            for key, tensor in self.tensors(_START).items():
                _assign(tensor, values.reference[key])

    def full_weights(self) -> dict[str, Tensor]:
        """Gather the adapter's weights in host memory, by name in a saved adapter. Call on every rank."""
        own = {key: tensor.detach() for key, tensor in self.tensors().items()}
        return {k: (t.full_tensor() if isinstance(t, DTensor) else t).cpu().contiguous() for k, t in own.items()}

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Save the adapter in the format of `PeftModel.from_pretrained`.

        Args:
            folder: created if missing.
            weights: result of `full_weights`.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        base = {BASE_QUANTIZATION: self.spec.quantization, BASE_FINGERPRINT: self.spec.fingerprint}
        known = {key: value for key, value in base.items() if value is not None}
        save_file(dict(weights), folder / WEIGHTS_FILE, metadata={"format": "pt", **known})
        config = _peft_config(self.spec, self.spec.names)
        config.inference_mode = True
        config.save_pretrained(str(folder))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Context in which the model is the reference: the base, or the base with the initial adapter."""
        was_training = self.model.training
        self.model.eval()
        self._switch(_START if self._keeps_start else None)
        try:
            yield
        finally:
            self._switch(_CURRENT)
            self.model.train(was_training)

    def _switch(self, name: str | None) -> None:
        """Activate an adapter, or none. (peft's own methods would also change `requires_grad`.)"""
        for layer in self._layers().values():
            layer._disable_adapters = name is None
            layer._active_adapter = [name or _CURRENT]

    def _inject(self, name: str) -> None:
        from peft import inject_adapter_in_model

        existing = {name for name, _ in self.model.named_modules()}
        modules = [m for m in self.spec.modules if m in existing or f"{m}.base_layer" in existing]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied embeddings: they matter only when merging in place
            try:
                inject_adapter_in_model(
                    _peft_config(self.spec, modules), self.model, adapter_name=name, low_cpu_mem_usage=True
                )
            except ValueError as error:  # e.g. layers of a state-space model, whose kernels read the weights directly
                raise UserError(f"model.adapter.targets: not supported by peft: {error}") from error
        for layer in self._layers().values():
            _make_parameters(layer, name, dora=self.spec.dora)

    def _layers(self) -> dict[str, Any]:
        from peft.tuners.lora import LoraLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, LoraLayer)}

    def _initial_value(self, key: str, tensor: Tensor, seed: int) -> Tensor:
        """Initial value of a parameter as in peft: A is random and B is 0 (for embeddings the reverse).

        It depends on the seed and the name only, not on the number of ranks.
        """
        start, _, part = key.rpartition(".lora_")
        if part in ("B.weight", "embedding_A"):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if part == "magnitude_vector":
            module = next(m for m in self.spec.modules if key_prefix(self.model, m) == f"{start}.lora_")
            layer = self.model.get_submodule(module).get_base_layer()
            squares = layer.weight.to(tensor.dtype).square().sum(0 if isinstance(layer, nn.Embedding) else 1)
            norms = (squares.full_tensor() if isinstance(squares, DTensor) else squares).sqrt()
            if not norms.all():
                raise UserError(
                    f"model.adapter.dora: true needs rows with a direction, but {int((norms == 0).sum())} rows of "
                    f"{module} are 0; remove {module.rpartition('.')[-1]} from model.adapter.targets"
                )
            return norms
        digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        if part == "embedding_B":
            return values.normal_(generator=generator)
        bound = 1 / math.sqrt(tensor.shape[1])
        return values.uniform_(-bound, bound, generator=generator)


class _Linear(nn.Linear):
    """A LoRA factor that casts its weight to the dtype of the input.

    peft would cast the input to float32 instead, and save that copy for backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


def adapter_init(
    config: ModelConfig, *, checkpoint: Path | None, keep_reference: bool, seed: int, model: Any, download: bool = False
) -> AdapterInit:
    """Resolve `model.adapter` to an adapter and its initial weights.

    Args:
        config: the `model` section, with an adapter.
        checkpoint: adapter to resume from, if any.
        keep_reference: also keep the weights that the run started from, for the reference policy.
        seed: seed of new weights.
        model: result of `meta_model`.
        download: fetch missing files of the base model from the hub.

    Raises:
        UserError: the adapter does not fit the model.
    """
    assert config.adapter is not None
    spec = adapter_spec(config, model, download=download)
    given = None if config.adapter.path is None else read_adapter(Path(config.adapter.path), spec, model)
    return AdapterInit(
        spec=spec,
        seed=seed,
        weights=given if checkpoint is None else read_adapter(checkpoint, spec, model, field="run.dir"),
        reference=given if keep_reference else None,
    )


def _make_parameters(layer: Any, name: str, *, dora: bool) -> None:
    """Create frozen float32 parameters for adapter `name` of a layer, on the device of the base weight."""
    weight = layer.get_base_layer().weight
    dtype = torch.promote_types(weight.dtype, torch.float32)

    def empty(old: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.zeros(old.shape, dtype=dtype, device=weight.device), requires_grad=False)

    for factors in (layer.lora_A, layer.lora_B):
        if name in factors:
            factor = _Linear(factors[name].in_features, factors[name].out_features, bias=False, device="meta")
            factor.weight = empty(factor.weight)
            factors[name] = factor
    for factors in (layer.lora_embedding_A, layer.lora_embedding_B):
        if name in factors:
            factors[name] = empty(factors[name])
    if name in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[name]
        magnitude.weight = empty(magnitude.weight)
    # DoRA computes norms of weights, which must not be rounded to the 16-bit dtype of the input
    layer.cast_input_dtype_enabled = dora


def _peft_config(spec: AdapterSpec, names: Any) -> Any:
    """Return the peft config of an adapter with these target modules."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,  # type: ignore[arg-type]
        target_modules=list(names),
        lora_dropout=spec.dropout,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.base,
    )


def _assign(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor to a (sharded) parameter."""
    rows, first = local_rows(tensor)
    rows.copy_(full[first : first + len(rows)])
