"""Fingerprints of base models, to check that an adapter is used with the base it was trained on.

Names and shapes cannot tell, since they are the same in every fine-tuned copy of a model. A fingerprint depends on the
weights and not on their path or sharding, so a model that is moved, copied or re-sharded keeps it.
"""

import hashlib
from pathlib import Path

from cohort.errors import UserError
from cohort.models.loading.meta_device import local_weights
from cohort.models.loading.safetensors_files import read_bytes

BASE_FINGERPRINT = "base_fingerprint"  # key in the metadata of a saved adapter's weights; peft has no field for it
_MAX_TENSORS, _SAMPLE_BYTES = 512, 4096  # at most 2 MiB of a model: fine-tuning changes all weights


def base_fingerprint(path: str, *, download: bool = False) -> str | None:
    """Hash names, shapes and dtypes of a model's weights, and bytes from the middle of up to 512 of them.

    Args:
        path: a model folder or a hub id.
        download: fetch missing files from the hub.

    Returns:
        32 hexadecimal digits; None if there are no safetensors files on this machine.

    Raises:
        UserError: a file is damaged or cannot be read.
    """
    stored = sorted(local_weights(path, download=download).items())
    if not stored:
        return None
    sha256 = hashlib.sha256()
    for name, tensor in stored:
        sha256.update(f"{name} {tensor.shape} {tensor.stored_dtype}\n".encode())
    for _, tensor in stored[:: -(-len(stored) // _MAX_TENSORS)]:
        size = min(tensor.num_bytes, _SAMPLE_BYTES)
        sha256.update(read_bytes(tensor, (tensor.num_bytes - size) // 2, size).numpy().data)
    return sha256.hexdigest()[:32]


def check_base(
    folder: Path, saved: str | None, named: str | None, *, base: str, fingerprint: str | None, field: str
) -> None:
    """Check that a saved adapter was trained on this base model.

    Passes if that cannot be determined: the adapter has no fingerprint, and its base is not on this machine.

    Args:
        folder: adapter folder.
        saved: fingerprint in the adapter; None if it was saved by another program.
        named: path or id of the base in the adapter; None if it has none.
        base: path or id of the model.
        fingerprint: fingerprint of the model; None if its weights are not on this machine, or not in safetensors.
        field: configuration key that the message starts with.

    Raises:
        UserError: the adapter was trained on another model.
    """
    if saved is None and named is not None and named != base:
        saved = _known(named)
        if (saved is None or fingerprint is None) and _is_id(named) and _is_id(base):
            raise UserError(
                f"{field}: {str(folder)!r} is an adapter for {named!r}, but model.path is {base!r}; use "
                f"model.path={named}, or if both are the same model, set base_model_name_or_path to {base!r} in its "
                f"adapter_config.json"
            )
    if saved is not None and fingerprint is not None and saved != fingerprint:
        origin = repr(named) if named is not None and named != base else f"an earlier model at {base!r}"
        use = f"model.path={named}" if named is not None and named != base else "the model it was trained on"
        raise UserError(
            f"{field}: {str(folder)!r} is an adapter for a different model, not {base!r}: it was trained on {origin}, "
            f"which has other weights of the same shapes (fingerprint {saved[:8]}, here {fingerprint[:8]}); use {use}"
        )


def _known(path: str) -> str | None:
    try:
        return base_fingerprint(path)
    except UserError:  # damaged or partial files: unknown
        return None


def _is_id(path: str) -> bool:
    """Whether `path` is a hub id like org/name rather than a folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
