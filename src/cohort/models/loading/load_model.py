"""Load a policy or a critic, after a check of its folder; and load tokenizers."""

import os
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models.activation_checkpointing import prepare_activations
from cohort.models.adapters.adapter_folder import AdapterSpec, adapter_spec, is_adapter_folder
from cohort.models.adapters.lora import Adapter, AdapterInit, adapter_init
from cohort.models.critic import Critic
from cohort.models.fsdp import CollectiveCounter, Sharding
from cohort.models.host_memory import MasterWeights, round_weights
from cohort.models.loading.load_weights import (
    load_model_weights,
    load_sharded_weights,
    load_with_transformers,
    sources_on_all_ranks,
)
from cohort.models.loading.meta_device import (
    keep_first_layers,
    local_weights,
    match_weights,
    meta_model,
    sources_digest,
)
from cohort.models.loading.multimodal import multimodal_of, processor_files
from cohort.models.loading.safetensors_files import stored_weights
from cohort.models.model_limits import freeze
from cohort.models.policy import ModelTraits, Policy
from cohort.models.quantization import check_quantization, loading_options, replace_quantized_layers
from cohort.plan import defaults
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.join import init_single_process_group

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_model_folder(path: str, *, field: str = "model.path") -> None:
    """Check a local model folder without loading it. Hub ids pass.

    Raises:
        UserError: the folder does not exist, cannot be read, lacks config.json, weights or a tokenizer, or has a
            weights file that is damaged, judging by header and size.
    """
    folder = Path(path)
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, ValueError):  # ValueError: a name that no folder can have
        looks_like_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        if looks_like_id:
            return
        raise UserError(
            f"{field}: {path!r}: no such folder; give a model folder, or a Hugging Face id like org/name"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{field}: {path!r} is a file; give the folder that holds config.json") from None
    except OSError as error:
        raise UserError(f"{field}: {path!r} cannot be read: {error.strerror}") from error
    if is_adapter_folder(folder):
        raise UserError(
            f"{field}: {path!r} is an adapter, not a model; give its base model, and this folder as model.adapter.path"
        )
    if "config.json" not in names:
        inside = ", ".join(names[:8]) or "nothing"
        raise UserError(f"{field}: {path!r} is not a model folder: it has no config.json. It contains: {inside}")
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UserError(f"{field}: {path!r} has no weights (*.safetensors)")
    if not any(name in names for name in _TOKENIZER_FILES):
        raise UserError(
            f"{field}: {path!r} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); copy the model's tokenizer files "
            f"into it (tokenizer.save_pretrained)"
        )
    stored_weights(folder, field=field)  # raises if a file is damaged


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer of a model.

    Raises:
        UserError: it is missing or cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_model_folder(config.path)
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"model.path: {config.path!r}: cannot load the tokenizer: {error}") from error


_Kind = TypeVar("_Kind", bound=Policy)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model to load, and how. Derive the request of another model with `dataclasses.replace`."""

    config: ModelConfig  # the `model` section; for a critic, with the critic's path
    _: KW_ONLY
    device: torch.device  # device of the weights
    tokenizer: Any  # for the padding token; used on rank 0 only
    trainable: bool = True  # False freezes all weights (reference model, evaluation)
    ranks: Ranks = SINGLE_PROCESS
    collectives: CollectiveCounter | None = None  # counter of the run; None with one rank
    # longest sequence of the run, None if unknown; sliding windows only matter for longer sequences
    longest_sequence_tokens: int | None = None
    adapter_checkpoint: Path | None = None  # adapter to resume from
    # multimodal model whose weights beside the language model are saved with it; None: `config.path`
    multimodal_path: str | None = None
    keep_reference: bool = False  # keep the initial adapter for `as_reference`
    seed: int = 0  # for a new adapter
    offload_master_weights: bool = False  # the device has a copy in the compute dtype
    reshard_after_forward: bool | int = True  # see `Sharding`
    sync_each_micro_batch: bool = True  # see `Sharding`

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 manages the weights, also with one rank if they are offloaded."""
        return self.ranks.world_size > 1 or self.config.parameter_offload

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        name = defaults.compute_dtype(self.config, on_gpu=self.device.type == "cuda")
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def resolve_device(device: str) -> torch.device:
    """Resolve a device name. Without an index it is the first GPU; `auto` is the CPU if there is no GPU.

    Raises:
        UserError: this machine has no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device: {device!r}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return torch.device("cuda", resolved.index or 0) if resolved.type == "cuda" else resolved


def check_adapter(config: ModelConfig) -> AdapterSpec | None:
    """Check `model.adapter` against the model, without loading weights.

    Returns:
        the adapter spec; None without an adapter.

    Raises:
        UserError: the adapter does not fit the model.
    """
    return None if config.adapter is None else adapter_spec(config, meta_model(config))


def load_policy(request: LoadRequest) -> Policy:
    """Load a policy directly to its device and dtype. With several ranks each rank reads its shards.

    Weights are converted while reading. If only transformers can do that, or the files are not safetensors, it first
    loads the whole model; with several ranks, on rank 0.

    Raises:
        UserError: the model cannot be loaded, weights are missing from its files, or the adapter does not fit.
        Rank0Failed: on the other ranks then.
    """
    return _load(Policy, request)


def load_critic(request: LoadRequest) -> Critic:
    """Load a critic from a causal language model, whose head is replaced, or from a saved critic.

    Raises:
        UserError: see `load_policy`.
        Rank0Failed: on the other ranks then.
    """
    return _load(Critic, request)


def _load(kind: type[_Kind], request: LoadRequest) -> _Kind:
    init = None
    if request.config.adapter is not None:
        init = request.ranks.run_on_rank0(lambda: _adapter_init(request))
    if request.is_sharded:
        return _load_sharded(kind, request, init)
    model = _load_unsharded(kind, request) if request.config.quantization is None else _load_quantized(kind, request)
    adapter = _prepare(model, request, init)
    return _wrap(kind, model, request, adapter, pad_token_id=_pad_token_id(model, request.tokenizer))


def _load_sharded(kind: type[_Kind], request: LoadRequest, init: AdapterInit | None) -> _Kind:
    """Load a sharded model."""
    ranks, device = request.ranks, request.device
    assert ranks.world_size == 1 or request.collectives is not None, "several ranks need a collective counter"
    if ranks.world_size == 1:
        init_single_process_group(device)
    whole: list[Any] = []  # the full model, on rank 0, if ranks cannot read their rows
    traits, pad, files = ranks.run_on_rank0(lambda: _inspect_model(kind, request, init, whole))
    model = _meta_model(kind, request.config)
    model.set_attn_implementation(traits.attention)
    sources = sources_on_all_ranks(request.config, model, files, ranks)
    if sources is None:
        ranks.run_on_rank0(lambda: whole.extend([] if whole else [_load_with_adapter(kind, request, init)]))
    adapter = _prepare(model, request, init)
    sharding = Sharding(
        model,
        request.collectives or CollectiveCounter(),
        mesh=ranks.device_mesh(device.type),
        device=device,
        compute_dtype=request.compute_dtype,
        on_host=request.config.parameter_offload,
        reshard_after_forward=request.reshard_after_forward,
        sync_each_micro_batch=request.sync_each_micro_batch,
    )
    sharding.allocate()
    if sources is None:
        sharding.load(whole[0].state_dict() if whole else {}, dict(whole[0].named_buffers()) if whole else {})
    else:
        load_sharded_weights(sharding, sources, ranks)
    return _wrap(kind, model, request, adapter, pad_token_id=pad, traits=traits, sharding=sharding)


def _wrap(
    kind: type[_Kind],
    model: Any,
    request: LoadRequest,
    adapter: Adapter | None,
    *,
    pad_token_id: int,
    traits: ModelTraits | None = None,
    sharding: Sharding | None = None,
) -> _Kind:
    """Initialize the adapter of a loaded model, split off its master weights, and wrap it."""
    _find_multimodal(model, request)
    if adapter is not None:
        adapter.initialize()
    master_weights = _split_master_weights(model, request)
    for parameter in model.parameters():
        if parameter.requires_grad:  # micro-batches add to gradients in float32 or wider, also those of 16-bit weights
            parameter.grad_dtype = torch.promote_types(parameter.grad_dtype, torch.float32)
    if sharding is not None:
        sharding.finalize()
    return kind(
        model,
        device=request.device,
        compute_dtype=request.compute_dtype,
        pad_token_id=pad_token_id,
        traits=traits,
        sharding=sharding,
        adapter=adapter,
        master_weights=master_weights,
        longest_sequence_tokens=request.longest_sequence_tokens,
        dropout=request.config.dropout,
    )


def _inspect_model(
    kind: type[Policy], request: LoadRequest, init: AdapterInit | None, whole: list[Any]
) -> tuple[ModelTraits, int, str | None]:
    """Inspect the model on rank 0: traits, padding token, and a digest of the files if ranks can read their rows.

    Traits are found by running the first layers, at least one of each kind, with their weights on the run's device. If
    ranks cannot read their rows, the full model is loaded here and appended to `whole`.
    """
    device = request.device
    model = _meta_model(kind, request.config)
    sources = match_weights(model, local_weights(request.config.path, download=True))
    if sources is None:
        model, device = _load_with_adapter(kind, request, init), torch.device("cpu")
        whole.append(model)
    else:
        keep_first_layers(model)
        load_model_weights(model, sources, device)
        if init is not None:
            Adapter(model, init, trainable=False)
    pad = _pad_token_id(model, request.tokenizer)
    policy = kind(
        model,
        device=device,
        compute_dtype=request.compute_dtype,
        pad_token_id=pad,
        longest_sequence_tokens=request.longest_sequence_tokens,
        dropout=request.config.dropout,
    )
    return policy.traits, pad, None if sources is None else sources_digest(sources)


def _load_unsharded(kind: type[Policy], request: LoadRequest) -> Any:
    """Load an unsharded model, tensor by tensor if the files allow it."""
    model = _meta_model(kind, request.config)
    sources = match_weights(model, local_weights(request.config.path, download=True))
    if sources is None:
        return load_with_transformers(kind, request.config).to(request.device)
    load_model_weights(model, sources, request.device)
    return model


def _load_quantized(kind: type[Policy], request: LoadRequest) -> Any:
    """Load a model with quantized linear layers. transformers quantizes tensor by tensor while loading."""
    assert request.config.quantization is not None and request.ranks.world_size == 1, "checked by the configuration"
    check_quantization(request.config.quantization)
    options = loading_options(request.config.quantization, request.device, request.compute_dtype)
    model = load_with_transformers(kind, request.config, **options)
    replace_quantized_layers(model, request.compute_dtype)
    return model


def _meta_model(kind: type[Policy], config: ModelConfig) -> Any:
    """Build the meta-device model of a policy or critic."""
    model = meta_model(config)
    kind.replace_head(model)
    return model


def _find_multimodal(model: Any, request: LoadRequest) -> None:
    """Find the files of a multimodal model that are saved with its language model."""
    multimodal = multimodal_of(model)
    if multimodal is not None:
        model.multimodal = replace(multimodal, path=request.multimodal_path or multimodal.path)
        processor_files(model.multimodal.path)  # downloads them now


def _adapter_init(request: LoadRequest) -> AdapterInit:
    return adapter_init(
        request.config,
        checkpoint=request.adapter_checkpoint,
        keep_reference=request.keep_reference,
        seed=request.seed,
        model=meta_model(request.config),
        download=True,
    )


def _load_with_adapter(kind: type[Policy], request: LoadRequest, init: AdapterInit | None) -> Any:
    """Load the full model with transformers, with uninitialized adapter weights."""
    model = load_with_transformers(kind, request.config)
    if init is not None:
        Adapter(model, init, trainable=False)
    return model


def _prepare(model: Any, request: LoadRequest, init: AdapterInit | None) -> Adapter | None:
    """Set up training: freezing, the (uninitialized) adapter, and activation memory."""
    model.requires_grad_(request.trainable and init is None)
    if request.trainable:
        freeze(model, request.config.freeze)
    adapter = None if init is None else Adapter(model, init, trainable=request.trainable)
    model.train(request.trainable)
    if request.trainable:
        prepare_activations(model, request.config)
    return adapter


def _split_master_weights(model: Any, request: LoadRequest) -> MasterWeights | None:
    """With offloaded master weights, move these to the host and round the model's weights to the compute dtype."""
    if not request.offload_master_weights:
        return None
    if request.trainable:
        return MasterWeights(model, request.compute_dtype)
    round_weights(model, request.compute_dtype)
    return None


def _pad_token_id(model: Any, tokenizer: Any) -> int:
    """The padding token, or 0 if there is none with an embedding: padding is never attended to."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None and pad < len(model.get_input_embeddings().weight) else 0
