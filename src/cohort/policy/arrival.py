"""How weights arrive in a model: read from its files, tensor after tensor, or with the model as the library loads it.

Of a model on one rank the tensors are whole; of a sharded one every rank gets the rows that it has.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from cohort.config import ModelConfig
from cohort.distributed import Ranks
from cohort.errors import UserError
from cohort.policy.policy import Policy
from cohort.policy.sharding import Sharding
from cohort.policy.skeleton import VALUE_HEAD, Source, digest, local_weights, match, quiet_transformers, saved_tensors
from cohort.policy.weights import StoredTensor, read_rows


def fill_model(model: Any, places: Mapping[str, Source], device: torch.device) -> None:
    """Give an empty model its weights, one after another, with the model's dtype.

    Args:
        model: from `empty_model`; it may have lost layers since.
        places: of at least its tensors; one without a place becomes 0.
        device: where the weights and the buffers go.

    Raises:
        UserError: a file ends too early.
    """
    for parameter in model.parameters():  # tied ones once, and they stay tied
        memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, memory)
    model.to(device)
    _arrive(places, ((name, tensor, 0) for name, tensor in saved_tensors(model)))


def fill_shards(sharding: Sharding, places: Mapping[str, Source], ranks: Ranks) -> None:
    """Every rank reads its own rows.

    Raises:
        UserError: on rank 0, where any rank could not.
        Stopped: on the other ranks then.
    """
    problem = None
    try:
        _arrive(places, sharding.own_rows())
    except UserError as error:
        problem = str(error)
    problems = ranks.gather(problem)

    def tell() -> None:
        for rank, said in enumerate(problems or []):
            if said is not None:
                raise UserError(f"{said} (on rank {rank})")

    ranks.first(tell)


def _arrive(places: Mapping[str, Source], rows: Iterable[tuple[str, Tensor, int]]) -> None:
    """All that is read of a model's weights comes through here.

    Args:
        places: where each tensor is stored, by name in the model.
        rows: of a tensor its name, where its rows go, and the number of the first; stored nowhere, they become 0.
    """
    for name, into, first_row in rows:
        source = places.get(name)
        if source is None:
            into.detach().zero_()
        elif isinstance(source, StoredTensor):
            read_rows(source, into, first_row)
        else:
            source.read_rows(into, first_row)


def agreed_places(config: ModelConfig, model: Any, files: str | None, ranks: Ranks) -> dict[str, Source] | None:
    """Where the weights lie, if every rank sees the files whose digest rank 0 gave; on all ranks or on none.

    A rank on a machine without them, as in the cache of a hub, has rank 0 read them for all.
    """
    places = None
    if files is not None:
        with suppress(UserError):  # of the files that rank 0 sees, it has said what is wrong
            places = match(model, local_weights(config.path))
    same = places is not None and digest(places) == files
    return places if ranks.smallest(same) else None


def library_model(kind: type[Policy], config: ModelConfig, **options: Any) -> Any:
    """The model as the library loads it, as its kind has it; in host memory, unless told otherwise.

    Args:
        kind: what to make of it.
        config: the `model` section.
        options: of the library's `from_pretrained`, besides.

    Raises:
        UserError: it cannot be loaded, or some of its weights are missing from the files.
    """
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **options,
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
    stored = local_weights(config.path)
    for name, place in model.named_parameters():
        if name.startswith(f"{VALUE_HEAD}.") and name in stored:  # of a critic, and what it was saved with
            read_rows(stored[name], place, 0)
    return model
