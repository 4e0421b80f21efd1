"""The `vllm` rollout engine: what of its servers is vLLM's."""

from cohort.rollout.vllm.adapter import AdapterChannel, publish_adapter
from cohort.rollout.vllm.api import VllmApi
from cohort.rollout.vllm.client import GenerateClient
from cohort.rollout.vllm.lending import Lender
from cohort.rollout.vllm.options import server_options
from cohort.rollout.vllm.publish import publish
from cohort.rollout.vllm.server import POLICY_NAME, ServerOptions, ServerProcess, check_version, check_vllm
from cohort.rollout.vllm.transfer import WeightChannel
from cohort.rollout.vllm.worker.cohort_weight_group import describe_device

__all__ = [
    "POLICY_NAME",
    "AdapterChannel",
    "GenerateClient",
    "Lender",
    "ServerOptions",
    "ServerProcess",
    "VllmApi",
    "WeightChannel",
    "check_version",
    "check_vllm",
    "describe_device",
    "publish",
    "publish_adapter",
    "server_options",
]
