"""What Cohort uses of vLLM's servers, endpoint by endpoint and field by field: a version without it fails here."""

import asyncio
import re
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from cohort.records import ModelCall
from cohort.rollout import SamplingParams
from cohort.rollout.engines.servers.handles import GenerateRequest, ServerError
from cohort.rollout.engines.vllm.api import GenerateClient
from cohort.rollout.stop_strings import cut_at_stop
from processed import completion_log_p
from serving import (
    HEADERS,
    SECRET,
    Server,
    healthy,
    models,
    processes_of,
    random_prompt,
    serving_model,
)
from tiny import VOCAB_SIZE, make_tokenizer

PARAMETERS = {
    ("get", "/health"): set(),
    ("get", "/v1/models"): set(),
    ("get", "/version"): set(),
    ("get", "/get_world_size"): {"include_dp"},  # true where it is not given: workers are told apart by both
    ("post", "/pause"): {"mode"},
    ("post", "/resume"): set(),
    ("post", "/init_weight_transfer_engine"): set(),
    ("post", "/start_weight_update"): set(),
    ("post", "/update_weights"): set(),
    ("post", "/finish_weight_update"): set(),
    ("post", "/update_weight_version"): set(),
    ("get", "/weight_info"): set(),
    ("post", "/reset_prefix_cache"): {"reset_running_requests"},
    ("post", "/sleep"): {"level", "mode"},
    ("post", "/release_kv_cache_memory"): set(),
    ("post", "/wake_up"): set(),  # reads its tags past the declaration
    ("post", "/inference/v1/generate"): set(),
}
BODIES = {
    "/init_weight_transfer_engine": {"init_info"},
    "/update_weights": {"update_info"},
    "/finish_weight_update": {"weight_version"},
    "/update_weight_version": {"new_version"},
    "/inference/v1/generate": {"token_ids", "sampling_params", "model", "request_id"},
}
SAMPLING = {
    *("n", "temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "stop_token_ids", "ignore_eos"),
    *("stop", "skip_special_tokens", "detokenize", "min_p", "repetition_penalty"),
}


@pytest.fixture(scope="module")
def schema(untied: Server) -> Any:
    return httpx.get(f"{untied.process.url}/openapi.json", headers=HEADERS, timeout=60).json()


def properties(schema: Any, endpoint: str) -> dict[str, Any]:
    """The fields of an endpoint's request."""
    of = schema["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in of:
        of = schema["components"]["schemas"][of["$ref"].rsplit("/", 1)[-1]]
    return of["properties"]


@pytest.mark.parametrize(("method", "endpoint"), PARAMETERS)
def test_endpoints_and_their_parameters_exist(schema: Any, method: str, endpoint: str):
    operation = schema["paths"][endpoint][method]
    assert PARAMETERS[method, endpoint] <= {p["name"] for p in operation.get("parameters", [])}
    if endpoint in BODIES:
        assert BODIES[endpoint] <= properties(schema, endpoint).keys()


def test_sampling_parameters_exist(schema: Any):
    """Unknown ones are ignored without a word, so their names have to be looked up."""
    assert properties(schema, "/inference/v1/generate")["sampling_params"]["properties"].keys() >= SAMPLING


def test_the_lifecycle_answers_as_the_client_reads_it(untied: Server):
    api = untied.api
    assert healthy(api.url)
    assert api.version().startswith("0.32.")
    assert models(api.url) == ["policy"]
    assert api.world_size() == 1
    api.pause()
    api.reset_prefix_cache()
    api.resume()
    api.sleep(2)  # nothing on CPU, but answered
    api.wake_up(["weights"])
    api.wake_up(["kv_cache"])
    api.resume()
    api.set_weight_version(41)
    assert api.weight_version() == 41
    with pytest.raises(ServerError, match=r"/release_kv_cache_memory: HTTP 500: .*requires a completed pause first"):
        api.release_kv_cache()
    with pytest.raises(ServerError, match="/update_weights: HTTP 500"):
        api.update_weights({"step": "declare", "specs": []})  # no update was begun
    with pytest.raises(ServerError, match=r"/v1/load_lora_adapter: HTTP 404"):
        api.load_lora_adapter("adapter", "/nowhere")  # only where it was started with a rank


def test_every_route_demands_the_secret(untied: Server):
    """Of those that the server lists when it starts, which its schema does not all have."""
    url, log_file = untied.process.url, untied.process.log_file
    listed = re.findall(r"Route: (\S+), Methods: (.+)", untied.process.log())
    routes = [(method, path) for path, methods in listed for method in methods.split(", ")]
    assert {path for _, path in routes} >= {"/openapi.json", "/ping", *(path for _, path in PARAMETERS)}
    before = untied.api.weight_version()
    for method, path in [*routes, ("GET", "/metrics"), ("GET", "/nowhere"), ("OPTIONS", "/pause"), ("PUT", "/pause")]:
        for headers in ({}, {"Authorization": "Bearer another"}, {"Origin": "http://a"}):
            answer = httpx.request(method, f"{url}{path}", headers=headers, timeout=20)
            assert answer.status_code == 401, (method, path, headers)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "MDEyMzQ1Njc4OWFiY2RlZg=="
    assert httpx.get(f"{url}/v1/realtime", headers=upgrade, timeout=20).status_code == 403
    assert healthy(url) and untied.api.weight_version() == before
    assert httpx.get(f"{url}/metrics", headers=HEADERS, timeout=20).status_code == 200
    for process in processes_of(log_file):
        assert SECRET.text not in f"{process.environ()} {process.cmdline()}"
    assert SECRET.text not in log_file.read_text()


def test_generation_gives_tokens_logprobs_and_versions(untied: Server):
    untied.api.set_weight_version(42)
    body = {
        "token_ids": random_prompt(9),
        "model": "policy",
        "request_id": "mine",
        "sampling_params": {"n": 3, "seed": 5, "max_tokens": 4, "temperature": 0.8, "logprobs": 0, "ignore_eos": True},
    }
    answer = httpx.post(f"{untied.process.url}/inference/v1/generate", json=body, headers=HEADERS, timeout=60).json()
    assert answer["request_id"].endswith("mine")
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2]
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == 4
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert all(-20 < entry["logprob"] <= 0 for entry in content)
        assert choice["weight_versions"] == [{"version": "42", "start": 0, "end": 4}]


def sample(server: Server, prompt: list[int], *, version: int, **changes: Any) -> list[ModelCall]:
    """Completions of one prompt, twelve by default, through Cohort's client."""
    server.api.set_weight_version(version)
    settings: dict[str, Any] = {"num_generations": 12, "max_completion_tokens": 30, "temperature": 1.0, **changes}
    request = GenerateRequest(
        prompt_id=0,
        token_ids=np.array(prompt),
        num_completions=settings["num_generations"],
        sampling=SamplingParams(**settings),
        seed=64,
        urgent=False,
    )

    async def ask() -> list[ModelCall]:
        client = GenerateClient(end_token_ids=frozenset({1}), vocab_size=VOCAB_SIZE, secret=SECRET, timeout_s=60)
        async with client:
            return await client.generate(server.process.url, request, allows=lambda label: label == version)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "parameters",
    [
        {"min_p": 0.1, "top_p": 0.8},  # their order counts
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.0, "num_generations": 1},
        {"repetition_penalty": 0.7, "temperature": 1.3, "min_p": 0.02, "top_k": 15, "top_p": 0.9},
    ],
)
def test_logprobs_are_those_of_the_sampled_distribution(untied: Server, parameters: dict[str, Any]):
    """As the local engine's are, of the same processors."""
    model, prompt = serving_model(tie=False), random_prompt(9)
    untied.publish(model, 44)
    settings: dict[str, Any] = {"num_generations": 12, "max_completion_tokens": 30, "temperature": 1.0, **parameters}
    for call in sample(untied, prompt, version=44, **parameters):
        expected = completion_log_p(model, prompt, call.token_ids.tolist(), SamplingParams(**settings))
        np.testing.assert_allclose(call.sampling_logprobs, expected, rtol=0, atol=2e-4)


def test_stop_strings_keep_the_tokens_that_complete_them(untied: Server):
    """Through Cohort's client, against what the same seeds sample without them."""
    tokenizer, prompt = make_tokenizer(), random_prompt(9)
    whole = sample(untied, prompt, version=43)
    texts = [tokenizer.decode(call.token_ids) for call in whole]
    spanning = tokenizer.decode(whole[0].token_ids[5:8])
    stop = (spanning, "e", "<system>", "longer than any completion of thirty tokens")
    num_cut = 0
    for before, text, after in zip(whole, texts, sample(untied, prompt, version=43, stop=stop), strict=True):
        expected = cut_at_stop(before, stop, tokenizer)
        assert after.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(after.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-5)
        assert after.finish_reason == expected.finish_reason
        num_cut += any(one in text for one in stop)
    assert num_cut >= 3


def test_child_i_of_n_has_the_seed_plus_i(untied: Server):
    prompt = random_prompt(9)
    choices = untied.generate(prompt, n=3, seed=70, max_tokens=20)
    alone = [untied.generate(prompt, n=1, seed=70 + i, max_tokens=20)[0] for i in range(3)]
    assert [c.token_ids for c in choices] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in choices}) == 3
