"""LoRA adapters in a model: few weights that are trained in the place of the model's own, through peft.

The model's own weights are frozen, in `model.dtype`, and nothing is ever merged into them. An adapter's are float32 (in
a float64 model float64), whatever the model's are; its products are computed in the dtype of what comes in.

R rank.
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
from cohort.policy.adapter_folder import (
    BASE_QUANTIZATION,
    PREFIX,
    WEIGHTS_FILE,
    AdapterSpec,
    adapter_spec,
    read_adapter,
)
from cohort.policy.fingerprint import BASE_FINGERPRINT
from cohort.policy.sharding import own_part

_CURRENT, _START = "default", "start"  # peft's names of the adapter that is trained, and of what it started from


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStart:
    """An adapter, and the weights that it begins with. Small beside the model: every rank holds it whole."""

    spec: AdapterSpec
    seed: int  # of new weights
    weights: dict[str, Tensor] | None  # by name in a saved adapter; None: new ones, which change nothing yet
    reference: dict[str, Tensor] | None  # of the adapter that the run started from; None: the base alone


class Adapter:
    """The adapter of a model, which is added to the model's layers in place."""

    def __init__(self, model: Any, start: AdapterStart, *, trainable: bool):
        """Add it, without values yet: `fill` gives them once the model's own weights are there.

        Args:
            model: on any device, the meta device too; its weights are frozen. Layers that it lacks are left out.
            start: what to add.
            trainable: whether the adapter is to have gradients.
        """
        self.model = model
        self.spec = start.spec
        self._values: AdapterStart | None = start  # until they are filled in
        self._keeps_start = start.reference is not None
        model.requires_grad_(False)
        self._inject(_CURRENT)
        if self._keeps_start:
            self._inject(_START)
        self._switch(_CURRENT)
        for tensor in self.tensors().values():
            tensor.requires_grad_(trainable)

    def tensors(self, name: str = _CURRENT) -> dict[str, Tensor]:
        """The adapter's parameters as they are here, sharded or not, by name in a saved adapter."""
        from peft import get_peft_model_state_dict

        parameters = dict(self.model.named_parameters())
        named = get_peft_model_state_dict(self.model, parameters, adapter_name=name, save_embedding_layers=False)
        return {PREFIX + key: tensor for key, tensor in named.items()}

    @torch.no_grad()
    def fill(self) -> None:
        """Give the adapter its first values. The model's own weights are there; of sharded ones every rank calls this.

        Raises:
            UserError: DoRA is to turn a weight that is 0.
        """
        values, self._values = self._values, None
        assert values is not None, "it has been filled"
        for key, tensor in self.tensors().items():
            saved = values.weights
            _assign(tensor, self._first_values(key, tensor, values.seed) if saved is None else saved[key])
        if values.reference is not None:
            for key, tensor in self.tensors(_START).items():
                _assign(tensor, values.reference[key])

    def whole_weights(self) -> dict[str, Tensor]:
        """The adapter as it is saved, in host memory. Of a sharded one every rank takes part."""
        own = {key: tensor.detach() for key, tensor in self.tensors().items()}
        return {k: (t.full_tensor() if isinstance(t, DTensor) else t).cpu().contiguous() for k, t in own.items()}

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write what `PeftModel.from_pretrained` loads.

        Args:
            folder: made where it is missing.
            weights: from `whole_weights`.
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
        """The model is what the run started from inside: the base alone, or with the adapter that there was before."""
        was_training = self.model.training
        self.model.eval()
        self._switch(_START if self._keeps_start else None)
        try:
            yield
        finally:
            self._switch(_CURRENT)
            self.model.train(was_training)

    def _switch(self, name: str | None) -> None:
        """Compute with this adapter, or with none. peft's own switches change which parameters have gradients too."""
        for layer in self._layers().values():
            layer._disable_adapters = name is None
            layer._active_adapter = [name or _CURRENT]

    def _inject(self, name: str) -> None:
        from peft import inject_adapter_in_model

        there = {name for name, _ in self.model.named_modules()}
        modules = [m for m in self.spec.modules if m in there or f"{m}.base_layer" in there]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied embeddings, which only matter to those who merge in place
            try:
                inject_adapter_in_model(
                    _peft_config(self.spec, modules), self.model, adapter_name=name, low_cpu_mem_usage=True
                )
            except ValueError as error:  # such as layers of a state-space model, which its kernels read by themselves
                raise UserError(f"model.adapter.targets: peft refuses them: {error}") from error
        for layer in self._layers().values():
            _make_parameters(layer, name, dora=self.spec.dora)

    def _layers(self) -> dict[str, Any]:
        from peft.tuners.lora import LoraLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, LoraLayer)}

    def _first_values(self, key: str, tensor: Tensor, seed: int) -> Tensor:
        """What peft begins with: random numbers in the first factor and 0 in the second (in embeddings the reverse).

        They depend on the seed and the name alone, and so not on the number of ranks.
        """
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        if part in ("B.weight", "embedding_A"):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if part == "magnitude_vector":
            layer = self.model.get_submodule(module).get_base_layer()
            squares = layer.weight.to(tensor.dtype).square().sum(0 if isinstance(layer, nn.Embedding) else 1)
            norms = (squares.full_tensor() if isinstance(squares, DTensor) else squares).sqrt()
            if not norms.all():
                raise UserError(
                    f"model.adapter.dora: true: {int((norms == 0).sum())} rows of {module} are 0 and have no "
                    f"direction; leave {module.rpartition('.')[-1]} out of model.adapter.targets"
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
    """A factor of an adapter: the weight stays wide, the product has the dtype of what comes in.

    peft would make the input wide instead, and keep it for backward beside the one that the model keeps anyway.
    """

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


def adapter_start(
    config: ModelConfig, *, checkpoint: Path | None, keep_reference: bool, seed: int, model: Any, download: bool = False
) -> AdapterStart:
    """What `model.adapter` asks for.

    Args:
        config: the `model` section, with an adapter.
        checkpoint: whose weights the run goes on with.
        keep_reference: the policy that the run started from will be computed too.
        seed: of new weights.
        model: from `empty_model`.
        download: fetch files of the model that this machine lacks, since they are loaded next.

    Raises:
        UserError: it does not go with the model.
    """
    assert config.adapter is not None
    spec = adapter_spec(config, model, download=download)
    given = None if config.adapter.path is None else read_adapter(Path(config.adapter.path), spec, model)
    return AdapterStart(
        spec=spec,
        seed=seed,
        weights=given if checkpoint is None else read_adapter(checkpoint, spec, model, field="run.dir"),
        reference=given if keep_reference else None,
    )


def _make_parameters(layer: Any, name: str, *, dora: bool) -> None:
    """Give the adapter `name` of a layer parameters on the device of the layer's own weight, wide and not trained."""
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
    # DoRA compares norms of weights, which are not to be rounded to the input's 16 bits
    layer.cast_input_dtype_enabled = dora


def _peft_config(spec: AdapterSpec, names: Any) -> Any:
    """As peft describes it, with these layers as targets."""
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


def _assign(tensor: Tensor, whole: Tensor) -> None:
    """Take this rank's rows of a whole tensor."""
    rows, first = own_part(tensor)
    rows.copy_(whole[first : first + len(rows)])
