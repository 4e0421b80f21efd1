"""A server whose model is split over two workers, which on GPUs have one each."""

from collections.abc import Iterator

import pytest
import torch

from cohort.models.saving import stream_weights, weight_specs
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm.server import EXECUTOR
from serving import AS_ON_GPUS, Server, send, serve, serving_model
from tiny import policy_of

TWO_WORKERS = {
    "kv_cache_memory_bytes": 64 << 20,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": EXECUTOR,  # as on GPUs; on CPU Cohort starts a single worker
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Server]:
    environment = AS_ON_GPUS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    folder = tmp_path_factory.mktemp("parallel")
    yield from serve(folder, vllm_python, tie=False, environment=environment, extra=TWO_WORKERS)


def test_each_worker_loads_its_part_of_the_weights(server: Server):
    """As one that shares its GPUs is sent them, too: it sleeps, and wakes up for them."""
    assert server.api.world_size() == 2
    server.channel.sleeps = True
    for version in (1, 2):
        server.channel.sleep()
        model = serving_model(tie=False, seed=version)
        server.publish(model, version)
        server.assert_serves(model, version)


def test_after_an_error_on_all_workers_the_server_takes_the_next_update(server: Server):
    """vLLM reads the first worker's error only: that of the second would be the answer to the next call."""
    server.channel.sleeps = False
    policy = policy_of(serving_model(tie=False, seed=3))
    with pytest.raises(ServerError, match="init_weight_transfer_engine"):
        server.api.init_weight_transfer({"ipc_handles": {}})  # as where memory of GPUs cannot be shared
    server.channel.begin(weight_specs(policy, torch.float32))
    send(server.channel, *next(stream_weights(policy, torch.float32)))
    server.channel.abort()
    server.publish(policy.model, 4)
    server.assert_serves(policy.model, 4)
