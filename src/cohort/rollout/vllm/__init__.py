"""The `vllm` rollout engine: what of its servers is vLLM's."""

from cohort.rollout.vllm.adapter import AdapterChannel, publish_adapter
from cohort.rollout.vllm.api import VllmApi
from cohort.rollout.vllm.client import GenerateClient
from cohort.rollout.vllm.options import server_options, vllm_python
from cohort.rollout.vllm.publish import publish
from cohort.rollout.vllm.server import POLICY_NAME, ServerOptions, ServerProcess, check_version, check_vllm
from cohort.rollout.vllm.transfer import WeightChannel

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
