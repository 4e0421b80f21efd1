"""Loading a policy or a critic."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cohort.config import ModelConfig
from cohort.distributed import ALONE, Ranks, join_oneself
from cohort.errors import UserError
from cohort.plan import defaults
from cohort.policy.activations import prepare_activations
from cohort.policy.adapter import Adapter, AdapterStart, adapter_start
from cohort.policy.adapter_folder import AdapterSpec, adapter_spec
from cohort.policy.arrival import agreed_places, fill_model, fill_shards, library_model
from cohort.policy.critic import Critic
from cohort.policy.frozen import freeze
from cohort.policy.masters import Masters, round_weights
from cohort.policy.policy import ModelTraits, Policy
from cohort.policy.quantization import adopt, check_quantization, loading_options
from cohort.policy.sharding import Collectives, Sharding
from cohort.policy.skeleton import digest, empty_model, keep_first_layers, local_weights, match

_Kind = TypeVar("_Kind", bound=Policy)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load, and how. One model of a run differs from another in a few fields: see `dataclasses.replace`."""

    config: ModelConfig  # the `model` section; of a critic the path is the critic's
    _: KW_ONLY
    device: torch.device  # where the weights go
    tokenizer: Any  # gives the padding token; rank 0's is looked at
    trainable: bool = True  # False freezes every weight (reference model, evaluation)
    ranks: Ranks = ALONE
    collectives: Collectives | None = None  # of the run, where there are several ranks
    # of the run, where it is known: windows of attention matter to longer ones only
    longest_sequence_tokens: int | None = None
    adapter_checkpoint: Path | None = None  # of the adapter that the run goes on with, where it trains one
    keep_reference: bool = False  # `as_reference` will be asked for
    seed: int = 0  # of a new adapter
    masters_on_host: bool = False  # what is trained is in host memory, and on the device a copy in the compute dtype
    reshard_after_forward: bool | int = True  # of sharded layers, see `Sharding`

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the weights. Of one rank too, where they wait in host memory."""
        return self.ranks.world_size > 1 or self.config.parameter_offload

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes in."""
        name = defaults.compute_dtype(self.config, on_gpu=self.device.type == "cuda")
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def resolve_device(device: str) -> torch.device:
    """The device with its index: what names none takes the first GPU, and `auto` the CPU where there is no GPU.

    Raises:
        UserError: the device does not exist on this machine.
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
    """Compare `model.adapter` with the model, none of whose weights are loaded.

    Returns:
        its shape; None where there is none.

    Raises:
        UserError: they do not go together.
    """
    return None if config.adapter is None else adapter_spec(config, empty_model(config))


def load_policy(request: LoadRequest) -> Policy:
    """Load the weights, straight to their device and dtype. With several ranks every rank reads its shards.

    What the files hold in another form is converted as it is read. Where only the library can do that, as of weights
    that are no safetensors, it loads the whole model first: on rank 0, with several ranks.

    Raises:
        UserError: the model cannot be loaded, or some of its weights are missing from the files; or the adapter does
            not go with it.
        Stopped: on the other ranks then.
    """
    return _load(Policy, request)


def load_critic(request: LoadRequest) -> Critic:
    """Load a critic to train: a causal language model without its head, or a critic that was saved.

    Raises:
        UserError: like `load_policy`.
        Stopped: on the other ranks then.
    """
    return _load(Critic, request)


def _load(kind: type[_Kind], request: LoadRequest) -> _Kind:
    start = None
    if request.config.adapter is not None:
        start = request.ranks.first(lambda: _adapter_start(request))
    if request.is_sharded:
        return _load_sharded(kind, request, start)
    model = _whole(kind, request) if request.config.quantization is None else _quantized(kind, request)
    adapter = _prepare(model, request, start)
    if adapter is not None:
        adapter.fill()
    masters = _narrow(model, request)
    return kind(
        model,
        device=request.device,
        compute_dtype=request.compute_dtype,
        pad_token_id=_padding(model, request.tokenizer),
        adapter=adapter,
        masters=masters,
        longest_sequence_tokens=request.longest_sequence_tokens,
    )


def _load_sharded(kind: type[_Kind], request: LoadRequest, start: AdapterStart | None) -> _Kind:
    """The policy with this rank's shards."""
    ranks, device = request.ranks, request.device
    assert ranks.world_size == 1 or request.collectives is not None, "several ranks need to count their collectives"
    if ranks.world_size == 1:
        join_oneself(device)
    whole: list[Any] = []  # on rank 0, where the files do not hold the weights as the model has them
    traits, pad, files = ranks.first(lambda: _look_at_model(kind, request, start, whole))
    model = _empty(kind, request.config)
    model.set_attn_implementation(traits.attention)
    places = agreed_places(request.config, model, files, ranks)
    if places is None:
        ranks.first(lambda: whole.extend([] if whole else [_adapted(kind, request, start)]))
    adapter = _prepare(model, request, start)
    sharding = Sharding(
        model,
        request.collectives or Collectives(),
        mesh=ranks.device_mesh(device.type),
        device=device,
        compute_dtype=request.compute_dtype,
        on_host=request.config.parameter_offload,
        reshard_after_forward=request.reshard_after_forward,
    )
    sharding.allocate()
    if places is None:
        sharding.load(whole[0].state_dict() if whole else {}, dict(whole[0].named_buffers()) if whole else {})
    else:
        fill_shards(sharding, places, ranks)
    if adapter is not None:
        adapter.fill()
    masters = _narrow(model, request)
    sharding.ready()
    return kind(
        model,
        device=device,
        compute_dtype=request.compute_dtype,
        pad_token_id=pad,
        traits=traits,
        sharding=sharding,
        adapter=adapter,
        masters=masters,
    )


def _look_at_model(
    kind: type[Policy], request: LoadRequest, start: AdapterStart | None, whole: list[Any]
) -> tuple[ModelTraits, int, str | None]:
    """On rank 0, before any rank reads: traits, padding token, and the files' digest if every rank can read its part.

    The traits are found by computing with the model's first layers, with their own weights, on the run's device: as
    many as it takes to have one of each kind. If the files cannot be read in parts, the whole model is read here, and
    put into `whole`.
    """
    device = request.device
    model = _empty(kind, request.config)
    places = match(model, local_weights(request.config.path, download=True))
    if places is None:
        model, device = _adapted(kind, request, start), torch.device("cpu")
        whole.append(model)
    else:
        keep_first_layers(model)
        fill_model(model, places, device)
        if start is not None:
            Adapter(model, start, trainable=False)
    pad = _padding(model, request.tokenizer)
    policy = kind(
        model,
        device=device,
        compute_dtype=request.compute_dtype,
        pad_token_id=pad,
        longest_sequence_tokens=request.longest_sequence_tokens,
    )
    return policy.traits, pad, None if places is None else digest(places)


def _whole(kind: type[Policy], request: LoadRequest) -> Any:
    """The model with its weights, read one tensor after another where the files allow it."""
    model = _empty(kind, request.config)
    places = match(model, local_weights(request.config.path, download=True))
    if places is None:
        return library_model(kind, request.config).to(request.device)
    fill_model(model, places, request.device)
    return model


def _quantized(kind: type[Policy], request: LoadRequest) -> Any:
    """The model with its layers' weights in fewer bits. The library reads and quantizes one tensor after another."""
    assert request.config.quantization is not None and request.ranks.world_size == 1, "it has been checked"
    check_quantization(request.config.quantization)
    options = loading_options(request.config.quantization, request.device, request.compute_dtype)
    model = library_model(kind, request.config, **options)
    adopt(model, request.compute_dtype)
    return model


def _empty(kind: type[Policy], config: ModelConfig) -> Any:
    """The model without memory for its weights, as its kind has it."""
    model = empty_model(config)
    kind.adapt(model)
    return model


def _adapter_start(request: LoadRequest) -> AdapterStart:
    return adapter_start(
        request.config,
        checkpoint=request.adapter_checkpoint,
        keep_reference=request.keep_reference,
        seed=request.seed,
        model=empty_model(request.config),
        download=True,
    )


def _adapted(kind: type[Policy], request: LoadRequest, start: AdapterStart | None) -> Any:
    """The model as the library loads it, with the tensors that the adapter adds and no values in them."""
    model = library_model(kind, request.config)
    if start is not None:
        Adapter(model, start, trainable=False)
    return model


def _prepare(model: Any, request: LoadRequest, start: AdapterStart | None) -> Adapter | None:
    """Have the model compute gradients of what is trained, if anything is; its adapter, still without values."""
    model.requires_grad_(request.trainable and start is None)
    if request.trainable:
        freeze(model, request.config.freeze)
    adapter = None if start is None else Adapter(model, start, trainable=request.trainable)
    model.train(request.trainable)
    if request.trainable:
        prepare_activations(model, request.config)
    return adapter


def _narrow(model: Any, request: LoadRequest) -> Masters | None:
    """Where masters are wanted, leave the model with rounded weights; what is trained moves to the host first."""
    if not request.masters_on_host:
        return None
    if request.trainable:
        return Masters(model, request.compute_dtype)
    round_weights(model, request.compute_dtype)
    return None


def _padding(model: Any, tokenizer: Any) -> int:
    """Never attended to, so any token does where the tokenizer has none or one that the model has no embedding for."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None and pad < len(model.get_input_embeddings().weight) else 0
