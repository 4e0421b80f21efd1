"""Memory of reward models on the policy's device."""

import json
from pathlib import Path
from typing import Any

from cohort.config import Config
from cohort.plan.defaults import BYTES
from cohort.plan.shape import try_read_shape

_BYTES = {**BYTES, "float16": 2}


def reward_model_bytes(config: Config, *, on_gpu: bool) -> int:
    """Weights of the rewards `model` on the policy's device; 0 for a model of unknown size.

    They are on rank 0 only, whose memory decides whether a run fits.
    """
    return sum(
        _model_bytes(reward.args, on_gpu=on_gpu)
        for reward in config.rewards
        if reward.use == "model" and "path" in reward.args and _is_on_policy_device(reward.args, on_gpu=on_gpu)
    )


def _is_on_policy_device(args: dict[str, Any], *, on_gpu: bool) -> bool:
    """Whether a model is on the device of rank 0."""
    device = args.get("device")
    return device in (None, "train") or (on_gpu and device in ("cuda", "cuda:0"))


def _model_bytes(args: dict[str, Any], *, on_gpu: bool) -> int:
    """Bytes of one model: of its files, if it is here, converted to its dtype."""
    path, dtype = Path(str(args["path"])), str(args.get("dtype", "auto"))
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    stored = _stored_dtype(path) if files else "bfloat16"
    if dtype == "auto":
        dtype = stored if on_gpu else "float32"
    each = _BYTES.get(dtype, _BYTES["float32"])
    if files:
        return files * each // _BYTES.get(stored, each)
    shape = try_read_shape(str(args["path"]))
    return 0 if shape is None else each * shape.as_critic().num_parameters


def _stored_dtype(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "float32"
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
