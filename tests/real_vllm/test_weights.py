"""Weights reach a server that samples, and nothing else does."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cohort.models.saving import TensorSpec, stream_weights, weight_specs
from cohort.rollout.engines.servers.channels import send_to_servers
from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.vllm.weight_channel import WeightChannel
from serving import (
    LONG_PROMPT,
    SECRET,
    Server,
    engine_of,
    largest_difference,
    num_running,
    random_prompt,
    send,
    serving_model,
    slow_steps,
)
from tiny import policy_of
from waiting import until

CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.fixture(autouse=True)
def known_weights(request: pytest.FixtureRequest) -> None:
    """Version 100 is served at the beginning of every test."""
    server = request.getfixturevalue("server" if "server" in request.fixturenames else "untied")
    server.publish(serving_model(tie=server.tie, seed=100), 100)


def test_every_update_is_served_exactly(server: Server):
    """A head that is tied to the embedding too, and prompts whose keys and values were cached before the update."""
    for version in (101, 102):
        model = serving_model(tie=server.tie, seed=version)
        server.publish(model, version)
        server.assert_serves(model, version)
        assert server.api.weight_version() == server.channel.version == version
    old = serving_model(tie=server.tie, seed=101)
    prompt = random_prompt(LONG_PROMPT)
    (choice,) = server.generate(prompt, n=1, max_tokens=12, seed=3)
    assert largest_difference(old, prompt, choice) > 0.1  # the comparison can fail


def test_a_completion_that_spans_an_update_says_which_version_made_each_token(untied: Server):
    """Of the server whose engine is its own worker: an engine and a worker that wait for each other keep two cores busy
    until a tiny model's completions are done, and what is asked of the server meanwhile waits."""
    old, new = serving_model(tie=False, seed=100), serving_model(tie=False, seed=9)
    prompt = random_prompt(LONG_PROMPT)
    with slow_steps(engine_of(untied.process.log_file)), ThreadPoolExecutor(1) as pool:
        request = pool.submit(untied.generate, prompt, n=2, max_tokens=600, seed=1)
        until(lambda: num_running(untied.process.url) == 2 or request.done())
        untied.publish(new, 109)
        choices = request.result()
    assert len(choices) == 2
    for choice in choices:
        (before, start, change), (after, change_too, end) = choice.versions
        assert (before, after) == ("100", "109") and start == 0 and change == change_too and end == 600
        assert 0 < change < 600
        assert largest_difference(old, prompt, choice, slice(0, change)) < 1e-4
        assert largest_difference(new, prompt, choice, slice(change, 600)) < 1e-4
        assert largest_difference(old, prompt, choice, slice(change, 600)) > 0.1


def test_an_update_that_is_given_up_makes_the_server_refuse_requests(server: Server):
    new = serving_model(tie=server.tie, seed=10)
    policy = policy_of(new)
    specs = weight_specs(policy, FP32)
    server.channel.begin(specs)
    for (name, tensor), _ in zip(stream_weights(policy, FP32), range(len(specs) // 2), strict=False):
        send(server.channel, name, tensor)
    server.channel.abort()
    assert_refuses(server)
    server.publish(new, 110)
    server.assert_serves(new, 110)


def test_committing_half_an_update_is_refused(server: Server):
    policy = policy_of(serving_model(tie=server.tie, seed=10))
    specs = weight_specs(policy, FP32)
    server.channel.begin(specs)
    send(server.channel, *next(stream_weights(policy, FP32)))
    with pytest.raises(ServerError, match=f"{specs[1].name} was declared but not sent"):
        server.channel.finish(110)
    assert_refuses(server)


def assert_refuses(server: Server) -> None:
    """It says why, and cannot be resumed."""

    def refusal(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:
            return str(error)
        return ""

    said = "weights is incomplete"
    until(lambda: said in refusal(server.api.resume))
    until(lambda: said in refusal(lambda: server.generate(random_prompt(8), n=1, max_tokens=2, seed=1)))


def malformed(specs: list[TensorSpec]) -> dict[str, tuple[list[TensorSpec], str]]:
    """Announcements that do not fit the model, and what is said of them."""
    first, *rest = specs
    wide = TensorSpec(first.name, (*first.shape[:-1], first.shape[-1] + 1), FP32)
    return {
        "shape": ([wide, *rest], rf"{first.name} has shape \[.*\] instead of \[.*\]"),
        "missing": (rest, f"{first.name} is missing"),
        "unknown": ([*specs, TensorSpec("model.nothing.weight", (1,), FP32)], "model.nothing.weight is not in"),
        "twice": ([*specs, first], "a name is duplicated"),
        "empty": ([], r"is missing.* and \d+ more"),
    }


@pytest.mark.parametrize("fault", malformed([TensorSpec("a", (1,), FP32)]))
def test_what_does_not_fit_the_model_is_refused_before_anything_is_sent(server: Server, fault: str):
    specs, said = malformed(weight_specs(policy_of(serving_model(tie=server.tie)), FP32))[fault]
    with pytest.raises(ServerError, match=said):
        server.channel.begin(specs)
    server.assert_serves(serving_model(tie=server.tie, seed=100), 100)


def test_a_trainer_that_falls_silent_is_given_up(untied: Server):
    """Its own deadline passes, and the server's: neither hangs, and the server takes the next update."""
    new = serving_model(tie=False, seed=12)
    specs = weight_specs(policy_of(new), FP32)
    untied.connect(timeout_s=5)
    untied.channel.begin(specs)
    stream = stream_weights(policy_of(new), FP32)
    send(untied.channel, *next(stream))
    until(lambda: untied.channel._transfer.received.done())
    with pytest.raises(ServerError, match="/update_weights: "):  # whichever deadline is first
        for name, tensor in stream:
            send(untied.channel, name, tensor)
    assert_refuses(untied)
    untied.publish(new, 112)
    untied.assert_serves(new, 112)
    untied.connect()


KILLED = """
import sys, torch
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.vllm.weight_channel import TensorSpec, WeightChannel
secret = Secret(sys.stdin.readline().strip())
channel = WeightChannel(sys.argv[1], secret=secret, device=torch.device("cpu"), num_workers=1, timeout_s=20)
specs = [TensorSpec(name, tuple(shape), torch.float32) for name, shape in eval(sys.argv[2])]
channel.begin(specs)
for spec in specs[: len(specs) // 2]:
    channel.post(spec.name, torch.zeros(spec.shape))
    channel.flush()
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_killed_in_an_update_makes_the_server_refuse_requests(untied: Server):
    new = serving_model(tie=False, seed=13)
    specs = [(s.name, s.shape) for s in weight_specs(policy_of(new), FP32)]
    command = [sys.executable, "-c", KILLED, untied.process.url, repr(specs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        print(SECRET.text, file=trainer.stdin, flush=True)
        assert trainer.stdout.readline() == "sent\n"
        trainer.kill()
    untied.connect()
    assert_refuses(untied)
    untied.publish(new, 113)
    untied.assert_serves(new, 113)


def test_a_server_that_is_gone_stops_neither_the_stream_nor_the_others(untied: Server):
    policy, came = policy_of(serving_model(tie=False, seed=14)), []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream_weights(policy, FP32):
            came.append(name)
            yield name, tensor

    gone = WeightChannel("http://127.0.0.1:9", secret=SECRET, device=CPU, num_workers=1, timeout_s=5)
    specs = weight_specs(policy, FP32)
    failed = send_to_servers([gone, untied.channel], stream(), specs, 114)
    assert list(failed) == [gone] and "http://127.0.0.1:9" in str(failed[gone])
    untied.assert_serves(policy.model, 114)
    assert list(send_to_servers([gone], stream(), specs, 115)) == [gone]
    assert came == 2 * [spec.name for spec in specs]
    gone.close()


def test_an_error_in_the_stream_gives_the_update_up(untied: Server):
    policy = policy_of(serving_model(tie=False, seed=15))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(stream_weights(policy, FP32))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send_to_servers([untied.channel], broken(), weight_specs(policy, FP32), 116)
    assert_refuses(untied)
