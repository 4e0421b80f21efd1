"""Handing a LoRA adapter to vLLM servers: only the adapter travels, as a folder that they read."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cohort.rollout.vllm.api import ServerError, VllmApi
from cohort.rollout.vllm.server import POLICY_NAME


def publish_adapter(apis: Sequence[VllmApi], model: Any, folder: Path, version: int) -> dict[VllmApi, ServerError]:
    """Write a model's adapter, and have servers sample with it.

    What a server samples is held while it loads, and goes on with the new adapter. A server that could not load it
    keeps holding it until one is loaded: it has lost the adapter before, and its engine would die of the next token.

    Args:
        apis: of servers with `ServerOptions.lora_rank`, which see `folder` under the same path.
        model: peft's, whose weights are whole.
        folder: of the run's adapters; the one of this version is left in it.
        version: of the adapter; tokens that are sampled with it will say so.

    Returns:
        What went wrong, by server.
    """
    path = folder / f"version-{version}"  # cached keys and values are told apart by path
    model.save_pretrained(path)
    failed = {}
    for api in apis:
        try:
            _load(api, path, version)
        except ServerError as error:
            failed[api] = error
    for old in folder.glob("version-*"):
        if old != path:
            shutil.rmtree(old)
    return failed


def _load(api: VllmApi, path: Path, version: int) -> None:
    api.pause()
    api.load_lora_adapter(POLICY_NAME, str(path.absolute()))
    api.set_weight_version(version)
    api.reset_prefix_cache()
    api.resume()
