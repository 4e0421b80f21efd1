"""What servers can do to a run, and what the run does then: every prompt has its completions, once, or it ends and
says why.
"""

import os
import re
import signal
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.errors import TrainingError, UserError
from cohort.rollout.engines.servers.handles import RemoteServer
from cohort.rollout.engines.vllm.api import GenerateClient
from fake_vllm import ProcessServer, ThreadServer
from selection import examples
from vllm_runs import IMPATIENT, KEY, LIMITS, SAMPLING, assert_right, prompts, run_with
from waiting import free_port, until

SPOILED = [
    *("wrong_n", "same_index", "nan_logprob", "no_logprob", "positive_logprob", "text_logprob", "few_logprobs"),
    *("other_tokens_logprobs", "outside_vocabulary", "negative_token", "text_tokens", "no_tokens", "null_tokens"),
    *("too_long", "end_in_the_midst", "shortened", "shortened_stop", "abort", "old_weights", "other_runs_weights"),
    *("files_weights", "gap_in_weights", "no_weights", "null", "html", "cut_off", "list", "500", "502", "not_found"),
    "reset",
]


@pytest.mark.parametrize("fault", SPOILED)
def test_a_wrong_answer_is_not_used(fault):
    server = ThreadServer([fault])
    with run_with(server) as run:
        assert_right(run.generate(1))
    assert len(server.fakes) == 2, "a server that answers wrongly is started again"
    assert run.published == [(run.published[0][0], 7), (server.url, 7)]
    assert any(note.endswith("its prompts will be resampled") for note in run.notes)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_completions_are_counted_whatever_the_client_makes_of_an_answer(monkeypatch, count):
    whole, spoils = GenerateClient.generate, [True]

    async def spoiled(self, url, request, *, allows):
        calls = await whole(self, url, request, allows=allows)
        if not spoils:
            return calls
        spoils.clear()
        return (calls * 2)[:count]

    monkeypatch.setattr(GenerateClient, "generate", spoiled)
    server = ThreadServer()
    with run_with(server) as run:
        assert_right(run.generate(1))
        assert any(f"prompt 0: {count} completions instead of 3" in note for note in run.notes)
    assert len(server.fakes) == 2, "a server that answers wrongly is started again"


def test_what_was_lost_comes_before_what_has_not_begun():
    server = ThreadServer(["", "html"])
    with run_with(server, limits=replace(LIMITS, max_num_seqs=3)) as run:  # one prompt at a time
        assert_right(run.generate(5))
    assert [fake.asked for fake in server.fakes] == [[0, 1], [1, 2, 3, 4]]


@pytest.mark.parametrize("fault", ["full", "too_many"])
def test_a_full_server_is_asked_again_and_not_started_again(fault):
    server = ThreadServer([fault] * 3)
    with run_with(server) as run:
        assert_right(run.generate(2))
    assert len(server.fakes) == 1
    assert server.fakes[0].calls["/inference/v1/generate"] == 5


def test_what_a_full_server_does_not_take_goes_to_another_one():
    full, free = ThreadServer(["full"] * 1000), ThreadServer()
    with run_with(full, free, limits=replace(LIMITS, first_pause_s=5.0)) as run:
        until(lambda: len(run.fleet.running()) == 2)
        assert_right(run.generate(6))
    assert full.fakes[0].calls["/inference/v1/generate"] <= 2
    assert free.fakes[0].calls["/inference/v1/generate"] == 6


def test_a_server_that_stays_full_has_failed():
    limits = replace(LIMITS, request_timeout_s=0.1, max_server_failures=1)
    with run_with(ThreadServer(["full"] * 1000), limits=limits) as run, pytest.raises(TrainingError, match="503"):
        run.generate(1)


def test_a_server_killed_in_the_midst_of_requests(tmp_path):
    servers = [ProcessServer(tmp_path / f"{i}.log", seconds=0.1) for i in range(2)]
    with run_with(*servers) as run:
        until(lambda: len(run.fleet.running()) == 2)
        groups = run.collector.submit(prompts(12), SAMPLING, KEY)
        run.collector.wait(groups, count=1)
        assert servers[0].process
        os.kill(servers[0].process.pid, signal.SIGKILL)
        run.collector.wait(groups, count=12)
        assert_right([g.result() for g in groups])
        until(lambda: len(run.fleet.running()) == 2)
    assert any("exit code -9" in note for note in run.notes)


def test_a_server_that_dies_of_a_request_is_started_again(tmp_path):
    server = ProcessServer(tmp_path / "log", ["die"])
    with run_with(server) as run:
        assert_right(run.generate(1))
    assert sum("engine core died" in note for note in run.notes) == 1


def test_a_hung_server_is_killed_and_started_again(tmp_path):
    server = ProcessServer(tmp_path / "log", ["hang"])
    with run_with(server, limits=IMPATIENT) as run:
        until(lambda: run.fleet.running())
        first = server.process
        assert_right(run.generate(1))
        assert first and first.poll() == -signal.SIGKILL
    assert any("no answer within 2 s" in note for note in run.notes)


def test_a_server_that_does_not_say_that_it_is_alive_is_started_again():
    server = ThreadServer([], [])
    with run_with(server, limits=IMPATIENT) as run:
        assert_right(run.generate(1))
        server.fakes[0].faults = ["deaf"]
        until(lambda: len(server.fakes) == 2 and run.fleet.running())
        assert_right(run.generate(1))
    assert any("has not answered for 2 s" in note for note in run.notes)


def test_a_server_that_dies_at_start_ends_the_run_with_its_last_words(tmp_path):
    server = ProcessServer(tmp_path / "log", *[["die_at_start"]] * 10)
    with run_with(server) as run:
        with pytest.raises(TrainingError, match=r"no vLLM server is left(.|\n)*this model has no weights") as error:
            run.generate(1)
        assert "failed 2 times without a completion in between" in str(error.value)
        assert "exit code 1" in str(error.value)
        with pytest.raises(TrainingError):
            run.generate(1)
    assert len(server.faults) == 8, "what has failed twice in the same way would fail a third time"


def test_the_cause_is_told_and_not_what_came_after_it(tmp_path):
    server = ProcessServer(tmp_path / "log", ["raise_at_start"], ["raise_at_start"])
    with run_with(server) as run, pytest.raises(TrainingError) as error:
        run.generate(1)
    assert re.search(r"exit code 1\)?; cause \(from its log\):\nRuntimeError: head_dim=16$", str(error.value))


def test_a_server_that_fails_now_and_then_goes_on():
    """Failures with completions between are not added up."""
    server = ThreadServer(*[["", "500"]] * 8)
    with run_with(server, limits=replace(LIMITS, max_server_failures=2)) as run:
        for _ in range(8):
            assert_right(run.generate(1))


def test_the_others_go_on_without_a_server_that_fails_too_often():
    bad, good = ThreadServer(*[["html"] * 100] * 10), ThreadServer(seconds=0.01)
    with run_with(bad, good) as run:
        until(lambda: len(run.fleet.running()) == 2)
        while not any("continuing without it" in note for note in run.notes):
            assert_right(run.generate(4))
        assert_right(run.generate(4))
    assert len(bad.fakes) == 3


def test_a_prompt_that_kills_every_server_ends_the_run():
    servers = [ThreadServer(*[["html"]] * 100) for _ in range(3)]
    limits = replace(LIMITS, max_server_failures=100)
    with run_with(*servers, limits=limits) as run, pytest.raises(TrainingError, match=r"10 servers .* at prompt 0"):
        run.generate(1)


def test_a_port_that_nobody_listens_on():
    gone = RemoteServer(f"http://127.0.0.1:{free_port()}")
    with run_with(gone, limits=replace(LIMITS, start_timeout_s=0.3)) as run, pytest.raises(TrainingError) as error:
        run.generate(1)
    assert f"({gone.url}) has not answered within rollout.start_timeout_s: 0.3" in str(error.value)


def test_a_remote_server_is_waited_for():
    handle = ThreadServer()
    handle.start()
    remote = RemoteServer(handle.url)
    handle.fakes[0].faults = ["html", "500"]
    try:
        with run_with(remote) as run:
            assert_right(run.generate(2))
            assert run.published == [(remote.url, 7)] * len(run.published)
        assert len(handle.fakes) == 1
        assert any("retrying in" in note for note in run.notes)
    finally:
        handle.stop()


def test_a_late_answer_is_dropped():
    """The first server answers after its lease is over, and is not started again: it is someone else's."""
    slow, quick = ThreadServer(["late3.0"] * 2), ThreadServer()
    slow.start(), quick.start()
    try:
        with run_with(RemoteServer(slow.url), RemoteServer(quick.url), limits=IMPATIENT) as run:
            until(lambda: len(run.fleet.running()) == 2)
            groups = run.generate(4)
            assert_right(groups)
            until(lambda: not slow.fakes[0].num_in_flight)  # the answers have come
            assert_right(run.generate(4))
        asked = slow.fakes[0].calls["/inference/v1/generate"] + quick.fakes[0].calls["/inference/v1/generate"]
        assert asked >= 4 + 1 + 4, "an answer came late"
    finally:
        slow.stop(), quick.stop()


def test_a_prompt_over_the_limit_is_refused_before_it_is_sent():
    server = ThreadServer(max_model_len=12)
    with run_with(server) as run:
        with pytest.raises(UserError, match=r"rollout.max_completion_tokens: 8 .* use at most 7, or servers"):
            run.generate(1, num_tokens=5)
        with pytest.raises(UserError, match=r"rollout.max_prompt_tokens"):
            run.generate(1, num_tokens=12)
        sampling = replace(SAMPLING, max_completion_tokens=7)
        assert_right(run.generate(1, sampling, num_tokens=5), sampling)
    assert server.fakes[0].calls["/inference/v1/generate"] == 1


def test_a_restarted_server_gets_the_current_weights_before_it_gets_work():
    server = ThreadServer()
    with run_with(server) as run:
        assert_right(run.generate(1))
        run.engine.update_weights(policy_version=8)
        run.engine.update_weights(policy_version=8)  # which is nothing new
        server.fakes[0].faults = ["500"]
        assert_right(run.generate(2), version=8)
        assert [version for _, version in run.published] == [7, 8, 8]
        assert len({url for url, _ in run.published}) == 2
        assert [fake.version for fake in server.fakes] == ["8", "8"]


def test_a_server_without_the_current_weights_gets_no_work():
    """Nobody hands it the weights while nobody waits: the other one does all."""
    failing, steady = ThreadServer(["html"]), ThreadServer(seconds=0.05)
    with run_with(failing, steady, limits=replace(LIMITS, max_num_seqs=3)) as run:
        until(lambda: len(run.fleet.running()) == 2)
        run.collector.wait(run.collector.submit(prompts(8), SAMPLING, KEY), count=0)
        until(lambda: not run.fleet.num_unfinished())
        until(lambda: len(run.fleet.running()) == 2)
        assert [fake.asked for fake in failing.fakes] == [[0], []]
        assert_right(run.generate(4))
        assert failing.fakes[1].asked, "it has them now"


def test_a_server_that_refuses_the_weights_is_started_again():
    server = ThreadServer(["refuses_weights"])
    with run_with(server) as run:
        assert_right(run.generate(2))
    assert [version for _, version in run.published] == [7, 7]
    assert len(server.fakes) == 2


def test_a_server_that_fails_asleep_is_started_when_it_is_needed():
    server = ThreadServer()
    with run_with(server, limits=IMPATIENT, sleeps=True) as run:
        assert_right(run.generate(1))
        server.fakes[0].faults = ["deaf"]
        until(lambda: not run.fleet.running())
        time.sleep(0.2)
        assert len(server.fakes) == 1, "it would take the memory of the training"
        assert_right(run.generate(1))
        assert len(server.fakes) == 2


def test_a_server_that_shares_its_gpu_is_started_again_after_room_was_made(monkeypatch: pytest.MonkeyPatch):
    server, events = ThreadServer(), []
    start = ThreadServer.start
    monkeypatch.setattr(ThreadServer, "start", lambda self: (events.append("start"), start(self)))
    with run_with(server, limits=IMPATIENT, sleeps=True) as run:
        run.engine.make_room = lambda: events.append("make room")
        assert_right(run.generate(1))
        run.engine.update_weights(policy_version=7)  # wakes it
        assert events == ["start", "make room"]
        server.fakes[0].faults = ["deaf"]
        until(lambda: not run.fleet.running())
        time.sleep(0.2)  # several times the pause before a restart
        assert events == ["start", "make room"]
        assert_right(run.generate(1))
    assert events == ["start", "make room", "make room", "start"]


def test_close_with_requests_in_flight_ends_at_once():
    servers = [ThreadServer(["hang"] * 100), ThreadServer(["html"] * 100)]
    limits = replace(LIMITS, request_timeout_s=3600.0, first_pause_s=3600.0, longest_pause_s=3600.0)
    with run_with(*servers, limits=limits) as run:
        until(lambda: len(run.fleet.running()) == 2)
        groups = run.collector.submit(prompts(8), SAMPLING, KEY)
        run.collector.wait(groups, count=0)
        until(lambda: servers[0].fakes[0].num_in_flight)
        run.collector.close()
        assert not run.fleet._thread.is_alive(), "it waits for what may take an hour"
    assert all(group.cancelled() for group in groups)


FAULTS = st.sampled_from(["", "", "", *SPOILED, "full", "late0.05"])


@examples(20)
@given(
    faults=st.lists(st.lists(st.lists(FAULTS, max_size=4), max_size=2), min_size=3, max_size=3),
    num_prompts=st.integers(1, 12),
    waits=st.lists(st.integers(0, 12), max_size=3),
)
def test_no_completion_is_lost_or_counted_twice(faults, num_prompts, waits):
    servers = [ThreadServer(*turns) for turns in faults]
    with run_with(*servers, limits=replace(LIMITS, max_server_failures=20)) as run:
        groups = run.collector.submit(prompts(num_prompts), SAMPLING, KEY)
        for count in waits:
            run.collector.wait(groups, count=min(count, num_prompts))
        run.collector.wait(groups, count=num_prompts)
        assert_right([group.result() for group in groups])
        assert [group.result().prompt.id for group in groups] == list(range(num_prompts))
