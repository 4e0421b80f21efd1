"""Whether an adapter belongs to a base: names and shapes are the same in every fine-tuned copy of a model.

A fingerprint is of what a base's files hold and not of where they lie or how many they are, so that a model that is
moved, copied or saved again in other files stays the same base.
"""

import hashlib
from pathlib import Path

from cohort.errors import UserError
from cohort.policy.skeleton import local_weights
from cohort.policy.weights import StoredTensor

BASE_FINGERPRINT = "base_fingerprint"  # in the metadata of a saved adapter's weights: peft has no place for it
_MOST_TENSORS, _SAMPLE_BYTES = 512, 4096  # 2 MiB of any model: fine-tuning moves numbers everywhere


def base_fingerprint(path: str, *, download: bool = False) -> str | None:
    """A digest of names, shapes and dtypes of a model's weights, and of bytes from the middle of up to 512 of them.

    Args:
        path: a folder or an id of a hub.
        download: fetch from the hub what this machine lacks.

    Returns:
        32 hexadecimal digits; None where there are no safetensors files here.

    Raises:
        UserError: a file is broken or cannot be read.
    """
    stored = sorted(local_weights(path, download=download).items())
    if not stored:
        return None
    described = hashlib.sha256()
    for name, tensor in stored:
        described.update(f"{name} {tensor.shape} {tensor.stored_dtype}\n".encode())
    for _, tensor in stored[:: -(-len(stored) // _MOST_TENSORS)]:
        described.update(_sample(tensor))
    return described.hexdigest()[:32]


def check_base(
    folder: Path, saved: str | None, named: str | None, *, base: str, fingerprint: str | None, field: str
) -> None:
    """Compare the base that a saved adapter was trained on with the model that it is to be added to.

    What cannot be known passes: an adapter without a fingerprint whose base is not on this machine.

    Args:
        folder: of the adapter.
        saved: fingerprint of its base; None: it has none, as those of other programs.
        named: path or id of its base; None: it does not say.
        base: path or id of the model.
        fingerprint: of the model; None: its weights are not here, or in other files.
        field: that the message begins with.

    Raises:
        UserError: they are two models.
    """
    if saved is None and named is not None and named != base:
        saved = _known(named)
        if (saved is None or fingerprint is None) and _is_id(named) and _is_id(base):
            raise UserError(
                f"{field}: {str(folder)!r} is an adapter of {named!r}, and model.path is {base!r}; use "
                f"model.path={named}, or where both are the same model write {base!r} as base_model_name_or_path into "
                f"its adapter_config.json"
            )
    if saved is not None and fingerprint is not None and saved != fingerprint:
        origin = repr(named) if named is not None and named != base else f"what was at {base!r} when it was trained"
        use = f"model.path={named}" if named is not None and named != base else "the model it was trained on"
        raise UserError(
            f"{field}: {str(folder)!r} is an adapter of another model than {base!r}: its base was {origin}, with "
            f"other weights of the same shapes (fingerprint {saved[:8]}, here {fingerprint[:8]}); use {use}"
        )


def _known(path: str) -> str | None:
    try:
        return base_fingerprint(path)
    except UserError:  # files that are broken or half copied are no base that can be compared
        return None


def _is_id(path: str) -> bool:
    """Whether it is an id like org/name and no folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def _sample(tensor: StoredTensor) -> bytes:
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start + max(0, tensor.num_bytes - _SAMPLE_BYTES) // 2)
            return file.read(min(tensor.num_bytes, _SAMPLE_BYTES))
    except OSError as error:
        raise UserError(f"model.path: {tensor.file}: cannot be read: {error}") from error
