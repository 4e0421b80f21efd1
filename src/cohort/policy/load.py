"""Loading a policy and its tokenizer from a model folder or a hub."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from cohort.config import ModelConfig
from cohort.distributed import ALONE, Ranks
from cohort.errors import UserError
from cohort.plan import defaults
from cohort.policy.activations import prepare_activations
from cohort.policy.adapter import Adapter, AdapterStart, adapter_start
from cohort.policy.adapter_folder import AdapterSpec, adapter_spec, is_adapter_folder
from cohort.policy.critic import Critic
from cohort.policy.masters import Masters, round_weights
from cohort.policy.policy import ModelTraits, Policy
from cohort.policy.sharding import Collectives, Sharding
from cohort.policy.skeleton import (
    VALUE_HEAD,
    empty_model,
    fill_model,
    keep_first_layers,
    local_weights,
    match,
    quiet_transformers,
    rows_to_read,
)
from cohort.policy.weights import StoredTensor, check_embedding, digest, read_rows, stored_weights

_Kind = TypeVar("_Kind", bound=Policy)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def resolve_device(device: str) -> torch.device:
    """`auto` takes the first GPU where there is one.

    Raises:
        UserError: the device does not exist on this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device: {device!r}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return resolved


def check_model_folder(path: str, *, field: str = "model.path") -> None:
    """Look at a local model folder without loading it. An id of a hub passes.

    Raises:
        UserError: the folder does not exist or lacks config.json, weights or a tokenizer, or a file of weights is
            broken, going by its header and size.
    """
    folder = Path(path)
    if not folder.exists():
        looks_like_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        if looks_like_id:
            return
        raise UserError(f"{field}: {path!r}: no such folder. Give a model folder, or a Hugging Face id like org/name")
    if not folder.is_dir():
        raise UserError(f"{field}: {path!r} is a file; give the folder that holds config.json")
    if is_adapter_folder(folder):
        raise UserError(
            f"{field}: {path!r} is an adapter and no model; give the folder of its base, and this one as "
            f"model.adapter.path"
        )
    if not (folder / "config.json").is_file():
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise UserError(f"{field}: {path!r} has no config.json, so it is not a model folder. It holds: {inside}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{field}: {path}/config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{field}: {path}/config.json is not a model's configuration: it has to be a JSON object")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"{field}: {path!r} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{field}: {path!r} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); copy the tokenizer files of the "
            f"model into it (tokenizer.save_pretrained)"
        )
    check_embedding(stored_weights(folder, field=field), config, field=field)


def load_tokenizer(config: ModelConfig, *, field: str = "model.path") -> Any:
    """The model's tokenizer.

    Raises:
        UserError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_model_folder(config.path, field=field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the loader raises many types; all mean the same to the user
        raise UserError(f"{field}: {config.path!r}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer


def load_policy(
    config: ModelConfig,
    *,
    device: torch.device,
    tokenizer: Any,
    trainable: bool = True,
    ranks: Ranks = ALONE,
    collectives: Collectives | None = None,
    longest_sequence_tokens: int | None = None,
    adapter_checkpoint: Path | None = None,
    keep_reference: bool = False,
    seed: int = 0,
    masters_on_host: bool = False,
) -> Policy:
    """Load the weights, straight to their device and dtype. With several ranks every rank reads its shards.

    Where the library has to convert what the files hold, it loads the whole model first: on rank 0, with several ranks.

    Args:
        config: the `model` section.
        device: where the weights go.
        tokenizer: gives the padding token; rank 0's is looked at.
        trainable: False freezes every weight (reference model, evaluation).
        ranks: this process among those of the run.
        collectives: of the run, where there are several ranks.
        longest_sequence_tokens: of the run, where it is known: windows of attention matter to longer ones only.
        adapter_checkpoint: folder of the adapter that the run goes on with, where it trains one.
        keep_reference: `as_reference` will be asked for.
        seed: of a new adapter.
        masters_on_host: the device gets the weights in the compute dtype; those that are trained are in host memory.

    Raises:
        UserError: the model cannot be loaded, or some of its weights are missing from the files; or the adapter does
            not go with it.
        Stopped: on the other ranks then.
    """
    return _load(
        Policy,
        config,
        device=device,
        tokenizer=tokenizer,
        trainable=trainable,
        ranks=ranks,
        collectives=collectives,
        longest_sequence_tokens=longest_sequence_tokens,
        adapter_checkpoint=adapter_checkpoint,
        keep_reference=keep_reference,
        seed=seed,
        masters_on_host=masters_on_host,
    )


def load_critic(config: ModelConfig, **how: Any) -> Critic:
    """Load a critic to train: a causal language model without its head, or a critic that was saved.

    Args:
        config: the `model` section, its path that of the critic.
        how: the keyword arguments of `load_policy`, which says what is raised too.
    """
    return _load(Critic, config, **how)


def _load(
    kind: type[_Kind],
    config: ModelConfig,
    *,
    device: torch.device,
    tokenizer: Any,
    trainable: bool = True,
    ranks: Ranks = ALONE,
    collectives: Collectives | None = None,
    longest_sequence_tokens: int | None = None,
    adapter_checkpoint: Path | None = None,
    keep_reference: bool = False,
    seed: int = 0,
    masters_on_host: bool = False,
) -> _Kind:
    compute_dtype = getattr(torch, defaults.compute_dtype(config, on_gpu=device.type == "cuda"))
    start = None
    if config.adapter is not None:
        begin = partial(adapter_start, config, checkpoint=adapter_checkpoint, keep_reference=keep_reference, seed=seed)
        start = ranks.first(lambda: begin(model=empty_model(config)))
    if ranks.world_size > 1:
        assert collectives is not None, "several ranks need to count their collectives"
        look = partial(_look_at_model, kind, config, tokenizer, start, device, compute_dtype, longest_sequence_tokens)
        return _load_sharded(
            kind, config, start, look, trainable, ranks, collectives, device, compute_dtype, masters_on_host
        )
    model = _load_whole(kind, config, device)
    adapter = _prepare(model, config, start, trainable=trainable)
    if adapter is not None:
        adapter.fill()
    masters = _narrow(model, compute_dtype, trainable=trainable) if masters_on_host else None
    return kind(
        model,
        device=device,
        compute_dtype=compute_dtype,
        pad_token_id=_padding(model, tokenizer),
        adapter=adapter,
        masters=masters,
        longest_sequence_tokens=longest_sequence_tokens,
    )


def _load_sharded(
    kind: type[_Kind],
    config: ModelConfig,
    start: AdapterStart | None,
    look: Callable[[list[Any]], tuple[ModelTraits, int, str | None]],
    trainable: bool,
    ranks: Ranks,
    collectives: Collectives,
    device: torch.device,
    compute_dtype: torch.dtype,
    masters_on_host: bool,
) -> _Kind:
    """The policy with this rank's shards; `look`: of `_look_at_model`."""
    whole: list[Any] = []  # on rank 0, where the files do not hold the weights as the model has them
    traits, pad, files = ranks.first(lambda: look(whole))
    model = _empty(kind, config)
    model.set_attn_implementation(traits.attention)
    places = _agreed_places(config, model, files, ranks)
    if places is None:
        ranks.first(lambda: whole.extend([] if whole else [_read_adapted(kind, config, start)]))
    adapter = _prepare(model, config, start, trainable=trainable)
    sharding = Sharding(model, collectives, device=device, compute_dtype=compute_dtype)
    sharding.allocate(device)
    if places is None:
        sharding.load(whole[0].state_dict() if whole else {}, dict(whole[0].named_buffers()) if whole else {})
    else:
        _read_together(sharding, places, ranks)
    if adapter is not None:
        adapter.fill()
    masters = _narrow(model, compute_dtype, trainable=trainable) if masters_on_host else None
    sharding.ready()
    return kind(
        model,
        device=device,
        compute_dtype=compute_dtype,
        pad_token_id=pad,
        traits=traits,
        sharding=sharding,
        adapter=adapter,
        masters=masters,
    )


def check_adapter(config: ModelConfig) -> AdapterSpec | None:
    """Compare `model.adapter` with the model, none of whose weights are loaded.

    Returns:
        its shape; None where there is none.

    Raises:
        UserError: they do not go together.
    """
    return None if config.adapter is None else adapter_spec(config, empty_model(config))


def _empty(kind: type[Policy], config: ModelConfig) -> Any:
    """The model without memory for its weights, as its kind has it."""
    model = empty_model(config)
    kind.adapt(model)
    return model


def _load_whole(kind: type[Policy], config: ModelConfig, device: torch.device) -> Any:
    """The model with its weights on `device`, read one tensor after another where the files allow it."""
    model = _empty(kind, config)
    places = match(model, local_weights(config.path, download=True))
    if places is None:
        return _read_model(kind, config).to(device)
    fill_model(model, places, device)
    return model


def _look_at_model(
    kind: type[Policy],
    config: ModelConfig,
    tokenizer: Any,
    start: AdapterStart | None,
    device: torch.device,
    compute_dtype: torch.dtype,
    longest_sequence_tokens: int | None,
    whole: list[Any],
) -> tuple[ModelTraits, int, str | None]:
    """On rank 0, before any rank reads: traits, padding token, and the files' digest if every rank can read its part.

    The traits are found by computing with the model's first layers, with their own weights, on the run's device: as
    many as it takes to have one of each kind. If the files cannot be read in parts, the whole model is read here, and
    put into `whole`.
    """
    model = _empty(kind, config)
    places = match(model, local_weights(config.path, download=True))
    if places is None:
        model, device = _read_adapted(kind, config, start), torch.device("cpu")
        whole.append(model)
    else:
        keep_first_layers(model)
        fill_model(model, places, device)
        if start is not None:
            Adapter(model, start, trainable=False)
    pad = _padding(model, tokenizer)
    policy = kind(
        model,
        device=device,
        compute_dtype=compute_dtype,
        pad_token_id=pad,
        longest_sequence_tokens=longest_sequence_tokens,
    )
    return policy.traits, pad, None if places is None else digest(places)


def _agreed_places(config: ModelConfig, model: Any, files: str | None, ranks: Ranks) -> dict[str, StoredTensor] | None:
    """Where the weights lie, if every rank sees the files whose digest rank 0 gave; on all ranks or on none.

    A rank on a machine without them, as in the cache of a hub, has rank 0 read them for all.
    """
    places = None
    if files is not None:
        with suppress(UserError):  # of the files that rank 0 sees, it has said what is wrong
            places = match(model, local_weights(config.path))
    same = places is not None and digest(places) == files
    return places if ranks.smallest(same) else None


def _read_together(sharding: Sharding, places: dict[str, StoredTensor], ranks: Ranks) -> None:
    """Every rank reads its own rows.

    Raises:
        UserError: on rank 0, where any rank could not.
        Stopped: on the other ranks then.
    """
    problem = None
    try:
        read_rows(rows_to_read(places, sharding.own_rows()))
    except UserError as error:
        problem = str(error)
    problems = ranks.gather(problem)

    def tell() -> None:
        for rank, said in enumerate(problems or []):
            if said is not None:
                raise UserError(f"{said} (on rank {rank})")

    ranks.first(tell)


def _read_model(kind: type[Policy], config: ModelConfig) -> Any:
    """The model as the library loads it, in host memory, as its kind has it."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # the loader raises many types; all mean the same to the user
        raise UserError(f"model.path: {config.path!r}: cannot be loaded: {type(error).__name__}: {error}") from error
    before = set(model.state_dict())
    kind.adapt(model)
    gone = before - set(model.state_dict())  # a critic that was saved has no head for tokens
    missing = sorted(set(info["missing_keys"]) - gone)
    if missing:
        raise UserError(
            f"model.path: {config.path!r}: {len(missing)} weights are missing from its files and would be random: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    own = [(name, place) for name, place in model.named_parameters() if name.startswith(f"{VALUE_HEAD}.")]
    if own:  # of a critic, and what it was saved with
        stored = local_weights(config.path)
        read_rows((stored[name], place, 0) for name, place in own if name in stored)
    return model


def _read_adapted(kind: type[Policy], config: ModelConfig, start: AdapterStart | None) -> Any:
    """The model as the library loads it, with the tensors that the adapter adds and no values in them."""
    model = _read_model(kind, config)
    if start is not None:
        Adapter(model, start, trainable=False)
    return model


def _prepare(model: Any, config: ModelConfig, start: AdapterStart | None, *, trainable: bool) -> Adapter | None:
    """Have the model compute gradients of what is trained, if anything is; its adapter, still without values."""
    model.requires_grad_(trainable)
    adapter = None if start is None else Adapter(model, start, trainable=trainable)
    model.train(trainable)
    if trainable:
        prepare_activations(model, config)
    return adapter


def _narrow(model: Any, compute_dtype: torch.dtype, *, trainable: bool) -> Masters | None:
    """Leave the model with weights in the dtype that it computes in; what is trained moves to the host first."""
    if trainable:
        return Masters(model, compute_dtype)
    round_weights(model, compute_dtype)
    return None


def _padding(model: Any, tokenizer: Any) -> int:
    """Never attended to, so any token does where the tokenizer has none or one that the model has no embedding for."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None and pad < len(model.get_input_embeddings().weight) else 0
