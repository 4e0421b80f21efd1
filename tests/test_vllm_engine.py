"""Groups of completions from servers that do what they should."""

from dataclasses import replace

from cohort.rollout.vllm.client import requests_for
from fake_vllm import ThreadServer, sampled
from vllm_runs import KEY, SAMPLING, assert_right, prompts, run_with
from waiting import until


def test_groups_come_back_in_order_with_what_was_sampled():
    with run_with(ThreadServer()) as run:
        groups = run.generate(6)
    assert [g.prompt.id for g in groups] == list(range(6))
    assert {c.finish_reason for g in groups for c in g.completions} == {"stop", "length"}
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
    assert [c.token_ids.tolist() for c in group.completions] == [tokens] * 3


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
            run.engine.load_weights(policy_version=version)


def test_completions_under_way_keep_the_version_that_began_them():
    server = ThreadServer(seconds=0.2)
    with run_with(server) as run:
        until(lambda: run.fleet.running())
        groups = run.engine.submit(prompts(2), SAMPLING, KEY)
        run.engine.wait(groups, count=0)
        until(lambda: server.fakes[0].num_in_flight)
        run.engine.load_weights(policy_version=8)
        run.engine.wait(groups, count=2)
        versions = {c.policy_version for g in groups for c in g.result().completions}
    assert versions == {7}


def test_the_same_prompts_on_each_server():
    servers = [ThreadServer(), ThreadServer()]
    with run_with(*servers) as run:
        everywhere = run.engine.sample_on_each_server(prompts(3), SAMPLING, KEY)
        assert set(everywhere) == {server.url for server in servers}
        for groups in everywhere.values():
            assert_right(groups)
        servers[0].fakes[0].faults = ["html"]
        assert_right(run.engine.sample_on_each_server(prompts(3), SAMPLING, KEY)[servers[1].url])


def test_servers_that_share_their_gpu_sleep_while_nothing_is_sampled():
    server = ThreadServer()
    with run_with(server, sleeps=True) as run:
        until(lambda: run.fleet.running())
        groups = run.engine.submit(prompts(2), SAMPLING, KEY)
        run.engine.wait(groups, count=2)
        assert server.fakes[0].asleep
        run.engine.wait(groups, count=2)
        assert server.fakes[0].asleep, "nobody wakes it before it is needed"
        assert_right(run.generate(2))  # an evaluation: the weights are the same, and have to be sent again
        run.engine.load_weights(policy_version=8)
        assert not server.fakes[0].asleep
        assert_right(run.generate(2), version=8)
        assert [version for _, version in run.published] == [7, 7, 8]


def test_seeds_of_prompts_do_not_meet():
    sampling = replace(SAMPLING, num_generations=100)
    keys = [KEY, replace(KEY, step=6), replace(KEY, purpose="eval"), replace(KEY, seed=1)]
    visits = [replace(p, epoch=epoch) for p in prompts(20) for epoch in range(2)]
    requests = [r for key in keys for p in visits for r in requests_for(p, sampling, key, max_num_seqs=30)]
    seeds = [r.seed + i for r in requests for i in range(r.num_completions)]
    assert len(seeds) == 4 * 40 * 100
    # generators on the CPU see the lowest 32 bits alone
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # blocks of 128: two prompts have all seeds of theirs apart, or none
    assert {r.seed % 128 for r in requests} == {0, 30, 60, 90}
    alone = [r.seed for r in requests_for(visits[3], sampling, KEY, max_num_seqs=1000)]
    assert alone == [requests_for(visits[3], sampling, KEY, max_num_seqs=30)[0].seed]
