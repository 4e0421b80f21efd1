"""Groups of completions from servers that do what they should."""

from dataclasses import replace

import numpy as np

from cohort.records import ModelCall, Prompt
from cohort.rollout import StepKey
from cohort.rollout.engines.servers.handles import call_seed
from fake_vllm import ThreadServer, sampled
from vllm_runs import KEY, LIMITS, SAMPLING, assert_right, prompts, run_with
from waiting import until


def test_groups_come_back_in_order_with_what_was_sampled():
    with run_with(ThreadServer()) as run:
        groups = run.generate(6)
    assert [g.prompt.id for g in groups] == list(range(6))
    assert {c.finish_reason for g in groups for c in g.trajectories} == {"stop", "length"}
    assert_right(groups)
    assert len(run.notes) == 2, "it is starting, and it answers"


def test_more_completions_than_a_server_samples_at_a_time_are_asked_for_in_parts():
    sampling = replace(SAMPLING, num_generations=15)  # 6 + 6 + 3
    server = ThreadServer()
    with run_with(server) as run:
        assert_right(run.generate(2, sampling), sampling)
    assert server.fakes[0].calls["/inference/v1/generate"] == 6


def test_greedy_completions_are_sampled_once():
    sampling = replace(SAMPLING, temperature=0.0)
    server = ThreadServer()
    with run_with(server) as run:
        (group,) = run.generate(1, sampling)
    assert server.fakes[0].calls["/inference/v1/generate"] == 1
    tokens = sampled(group.prompt.token_ids.tolist(), 0, 8)
    assert [c.sampled_token_ids.tolist() for c in group.trajectories] == [tokens] * 3


def test_a_server_never_has_more_completions_in_flight_than_it_takes():
    servers = [ThreadServer(seconds=0.02), ThreadServer(seconds=0.02)]
    with run_with(*servers) as run:
        until(lambda: len(run.fleet.running()) == 2)
        assert_right(run.generate(12))
    for server in servers:
        assert server.fakes[0].most_in_flight == 6  # two prompts of three: all of the room was used, and no more


def test_weights_change_between_the_requests_of_a_run():
    servers = [ThreadServer(), ThreadServer()]
    with run_with(*servers) as run:
        for version in range(8, 12):
            assert_right(run.generate(5), version=version - 1)
            run.engine.update_weights(policy_version=version)


def test_completions_under_way_keep_the_version_that_began_them():
    server = ThreadServer(seconds=0.2)
    with run_with(server) as run:
        until(lambda: run.fleet.running())
        groups = run.collector.submit(prompts(2), SAMPLING, KEY)
        run.collector.wait(groups, count=0)
        until(lambda: server.fakes[0].num_in_flight == 2 * SAMPLING.num_generations)
        run.engine.update_weights(policy_version=8)
        run.collector.wait(groups, count=2)
        versions = {c.policy_version for g in groups for c in g.result().trajectories}
    assert versions == {7}


def test_the_same_prompts_on_each_server():
    servers = [ThreadServer(), ThreadServer()]
    with run_with(*servers) as run:
        everywhere = run.engine.sample_on_each_server(run.collector, prompts(3), SAMPLING, KEY)
        assert set(everywhere) == {server.url for server in servers}
        for groups in everywhere.values():
            assert_right(groups)
        servers[0].fakes[0].faults = ["html"]
        assert_right(run.engine.sample_on_each_server(run.collector, prompts(3), SAMPLING, KEY)[servers[1].url])


def test_servers_that_share_their_gpu_sleep_while_nothing_is_sampled():
    server = ThreadServer()
    with run_with(server, sleeps=True) as run:
        until(lambda: run.fleet.running())
        groups = run.collector.submit(prompts(2), SAMPLING, KEY)
        run.collector.wait(groups, count=2)
        assert server.fakes[0].asleep
        run.collector.wait(groups, count=2)
        assert server.fakes[0].asleep, "nobody wakes it before it is needed"
        assert_right(run.generate(2))  # an evaluation: the weights are the same, and have to be sent again
        run.engine.update_weights(policy_version=8)
        assert not server.fakes[0].asleep
        assert_right(run.generate(2), version=8)
        assert [version for _, version in run.published] == [7, 7, 8]


def test_seeds_of_prompts_do_not_meet():
    sampling = replace(SAMPLING, num_generations=100)
    keys = [KEY, replace(KEY, step=6), replace(KEY, purpose="eval"), replace(KEY, seed=1)]
    visits = [replace(p, epoch=epoch) for p in prompts(20) for epoch in range(2)]
    firsts = [call_seed(key.call(p, 0, turn), sampling) for key in keys for p in visits for turn in range(3)]
    assert firsts[0] == call_seed(KEY.call(visits[0], 99), sampling) - 99
    assert all(0 <= seed < 2**63 for seed in firsts)
    # generators on the CPU see the lowest 32 bits alone
    assert len({seed % 2**32 for seed in firsts}) == 4 * 40 * 3
    # blocks of 128: two prompts have all seeds of theirs apart, or none
    assert {seed % 128 for seed in firsts} == {0}


def test_seeds_of_a_first_turn_stay_as_they_are():
    """A run that goes on with another version samples the same completions."""
    key = StepKey(purpose="train", seed=3, step=5).call(replace(prompts(1)[0], id=41, epoch=2), 8)
    assert call_seed(key, replace(SAMPLING, num_generations=12)) == 5564660533079925352
    assert call_seed(key, replace(SAMPLING, temperature=0.0)) == 5564660533079925345


def test_every_turn_of_a_rollout_is_sampled_from_its_own_context_and_seed():
    server = ThreadServer()
    with run_with(server) as run:

        async def play(prompt: Prompt, index: int) -> list[ModelCall]:
            calls: list[ModelCall] = []
            context = prompt.token_ids
            for turn in range(3):
                calls.append(await run.engine.generate(context, SAMPLING, KEY.call(prompt, index, turn)))
                context = np.concatenate([context, calls[-1].token_ids])
            return calls

        rollouts = {(p.id, i): run.collector.start(play(p, i)) for p in prompts(2) for i in range(3)}
        run.collector.wait(list(rollouts.values()), count=6)
    for (prompt_id, index), task in rollouts.items():
        for turn, call in enumerate(task.result()):
            seed = call_seed(KEY.call(prompts(2)[prompt_id], index, turn), SAMPLING)
            assert call.token_ids.tolist() == sampled(call.context_ids.tolist(), seed, 8)
    # a first turn takes one request for each prompt, the others one for each rollout
    assert server.fakes[0].calls["/inference/v1/generate"] == 2 + 2 * 6


def test_calls_with_equal_contexts_share_a_request_if_their_seeds_are_consecutive():
    server = ThreadServer()
    with run_with(server) as run:

        async def ask(index: int) -> list[int]:
            call = await run.engine.generate(prompts(1)[0].token_ids, sampling, KEY.call(prompts(1)[0], index))
            return call.token_ids.tolist()

        sampling = replace(SAMPLING, num_generations=8)
        order = [7, 1, 4, 0, 3]
        answers = [run.collector.start(ask(index)) for index in order]
        run.collector.wait(answers, count=5)
    assert server.fakes[0].calls["/inference/v1/generate"] == 3  # 0 and 1, 3 and 4, 7
    seeds = [call_seed(KEY.call(prompts(1)[0], index), sampling) for index in order]
    assert [a.result() for a in answers] == [sampled(prompts(1)[0].token_ids.tolist(), seed, 8) for seed in seeds]


def test_stop_strings_end_completions_on_the_server():
    """Which keeps the tokens of the string, and their logprobs."""
    sampling = replace(SAMPLING, num_generations=12, max_completion_tokens=12)
    texts = [chr(97 + token % 3) for token in range(50)]  # a, b or c
    server = ThreadServer(text_of=texts.__getitem__)
    with run_with(server, limits=replace(LIMITS, max_num_seqs=12)) as run:
        whole, cut = (run.generate(2, s) for s in (sampling, replace(sampling, stop=("ab", "cc"))))
    pairs = [
        (w, c) for a, b in zip(whole, cut, strict=True) for w, c in zip(a.trajectories, b.trajectories, strict=True)
    ]
    assert sum(len(c.sampled_token_ids) < len(w.sampled_token_ids) for w, c in pairs) > 10
    for w, c in pairs:
        text = "".join(texts[token] for token in w.sampled_token_ids)
        ends = [text.index(s) + len(s) for s in ("ab", "cc") if s in text]
        length = min(ends, default=len(text))
        assert c.sampled_token_ids.tolist() == w.sampled_token_ids[:length].tolist()
        assert c.sampling_logprobs.tolist() == w.sampling_logprobs[:length].tolist()
        assert c.finish_reason == ("stop" if ends else w.finish_reason)
