"""The vLLM-specific parts of the `vllm` rollout engine."""

from cohort.rollout.engines.vllm.api import VllmApi
from cohort.rollout.engines.vllm.client import GenerateClient
from cohort.rollout.engines.vllm.lora_transfer import AdapterChannel, publish_adapter
from cohort.rollout.engines.vllm.server import POLICY_NAME, ServerOptions, ServerProcess, check_version, check_vllm
from cohort.rollout.engines.vllm.server_options import server_options, vllm_python
from cohort.rollout.engines.vllm.weight_stream import publish
from cohort.rollout.engines.vllm.weight_transfer import WeightChannel

__all__ = [
    "POLICY_NAME",
    "AdapterChannel",
    "GenerateClient",
    "ServerOptions",
    "ServerProcess",
    "VllmApi",
    "WeightChannel",
    "check_version",
    "check_vllm",
    "publish",
    "publish_adapter",
    "server_options",
    "vllm_python",
]
