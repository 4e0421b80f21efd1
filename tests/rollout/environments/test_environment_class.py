"""Environment classes in TRL's form, programs and mixtures over a scripted model."""

import threading
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import UserError
from cohort.rewards import RewardRunner
from playing import ScriptedModel, call, load, module_of, play, replies, turns_tokenizer
from reward_samples import reward

CODE = '''
import asyncio, threading, time

class Counter:
    """Counts; the reward is the count."""

    made = 0
    log = []

    def __init__(self, start=0):
        type(self).made += 1
        self.start = start
        self.threads = {threading.get_ident()}

    def reset(self, level=0, seed=None):
        self.threads.add(threading.get_ident())
        self.count, self.seed = self.start, seed
        self.log.append(("reset", level, seed))
        return f" (level {level})"

    def add(self, by: int) -> int:
        """Add to the count.

        Args:
            by: number to add
        """
        self.threads.add(threading.get_ident())
        self.count += by
        return self.count

    def _hidden(self):
        pass

    def get_reward(self):
        self.log.append(("reward", self.count))
        return self.count

    def close(self):
        self.log.append(("closed", self.count))

class Steps(Counter):
    async def get_reward(self):
        return 10

    def step_reward(self):
        return self.count / 2

class Silent:
    async def reset(self, **row):
        self.row = row

class Slow(Counter):
    def add(self, by: int) -> int:
        """Add to the count.

        Args:
            by: number to add
        """
        time.sleep(60)

class Fails:
    where = "reset"
    times = 1
    made = 0

    def __init__(self):
        type(self).made += 1
        self.number = self.made

    def _fail(self, where):
        if self.where == where and self.number <= self.times:
            raise ConnectionError("the server is gone")

    def reset(self):
        self._fail("reset")

    def get_reward(self):
        self._fail("get_reward")
        return 1.0

class Hangs(Fails):
    def _fail(self, where):
        if self.where == where and self.number <= self.times:
            time.sleep(60)

class Wrong:
    value = "many"

    def reset(self):
        return None

    def get_reward(self):
        return self.value

class WrongReset:
    def reset(self):
        return {"image": 1}

class NoReset:
    pass

class NoHints(Silent):
    def add(self, by):
        """Add."""

class Talk:
    """A simulated user answers once."""

    async def run(self, row, model):
        first = await model.chat(row["prompt"])
        user = await model.chat("You are the user.", train=False)
        last = await model.chat([{"role": "user", "content": row["prompt"]}, first.message,
                                 {"role": "user", "content": user.content}])
        return {"reward": len(last.content), "asked": 1}

async def run(row, model):
    await model.chat("go")

class Sync:
    def run(self, row, model):
        return 1.0

def factory(start=5):
    return Counter(start)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.py").write_text(CODE)
    return tmp_path


ADD = call("add", '{"by": 3}')


def played(folder: Path, script: Any, rows: list[dict[str, Any]] | None = None, **rollout: Any) -> list[Any]:
    groups = play(folder, script, rows or [{"prompt": "Count"}], **rollout)
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_reset_tools_and_reward(folder: Path):
    model = ScriptedModel(replies(ADD + ADD, "Done."))
    first, _ = played(folder, model, [{"prompt": "Count", "level": 2, "other": 1}], environment="e.py:Counter")
    assert "<|im_start|>user\nCount (level 2)<|im_end|>" in model.contexts[0]
    assert [m["content"] for m in first.messages if m["role"] == "tool"] == ["3", "6"]
    assert first.rewards == {"Counter": 6.0}
    assert first.environment.count == 6
    assert "_hidden" not in model.contexts[0] and "close" not in model.contexts[0]


def test_an_instance_has_one_thread(folder: Path):
    for trajectory in played(folder, replies(ADD, "Done."), environment="e.py:Counter"):
        (ident,) = trajectory.environment.threads
        assert ident != threading.get_ident()


def test_rows_need_no_prompt(folder: Path):
    model = ScriptedModel(replies("Done."))
    played(folder, model, [{"level": 1}], environment="e.py:Counter")
    assert "<|im_start|>user\n (level 1)<|im_end|>" in model.contexts[0]
    (one, _) = played(folder, model, [{"level": 1}], environment="e.py:Silent")
    assert one.environment.row == {"level": 1}


@pytest.mark.parametrize("end", ["answer", "max_turns"])
@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("Count", "Count (level 2)"),
        (None, " (level 2)"),
        (
            [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "How?"}],
            [{"role": "user", "content": "Count (level 2)"}, {"role": "assistant", "content": "How?"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Count"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "Count"}, {"type": "text", "text": " (level 2)"}]}],
        ),
        (
            [{"role": "system", "content": "Be quick."}],
            [{"role": "system", "content": "Be quick."}, {"role": "user", "content": " (level 2)"}],
        ),
    ],
)
def test_rewards_get_the_prompt_with_the_text_of_reset(folder: Path, prompt: Any, seen: Any, end: str):
    """As in TRL; the row itself is left alone."""
    got = []

    def score(prompts, completions, **kwargs):
        got.append(prompts)
        return [0.0] * len(completions)

    row = {"level": 2} | ({"prompt": prompt} if prompt else {})
    groups = play(folder, replies(*[ADD] * (end == "max_turns"), "."), [row], environment="e.py:Counter", max_turns=1)
    assert {trajectory.end for trajectory in groups[0].trajectories} == {end}
    RewardRunner([reward(score)]).score(groups)
    assert got[0] == [seen, seen]
    assert groups[0].prompt.content == (prompt or "")


def test_rewards_get_the_prompt_of_the_row_where_reset_returned_nothing(folder: Path):
    groups = play(folder, replies("."), [{"prompt": "Count"}], environment="e.py:Silent")
    scores = RewardRunner([reward(lambda prompts, **kwargs: [float(p == "Count") for p in prompts])]).score(groups)
    assert scores[0].rewards.tolist() == [1.0, 1.0]


def test_trajectories_do_not_share_the_values_of_a_row(folder: Path):
    (folder / "m.py").write_text(
        "class Pops:\n    def reset(self, items):\n        items.pop()\n        self.left = len(items)\n"
        "    def get_reward(self):\n        return self.left\n"
    )
    rows = [{"prompt": "p", "items": [1, 2, 3]}]
    assert [t.rewards["Pops"] for t in played(folder, replies("."), rows, environment="m.py:Pops")] == [2, 2]


def test_reset_gets_a_seed_unless_a_column_has_it(folder: Path):
    def seeds(rows: list[dict[str, Any]], step: int = 0) -> list[int]:
        return [t.environment.seed for t in played(folder, replies("."), rows, environment="e.py:Counter", step=step)]

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert seeds([{"prompt": "a", "seed": 7}]) == [7, 7]
    assert len({*seeds(rows), *seeds(rows, step=1)}) == 8
    assert seeds(rows) == seeds(rows)
    assert all(0 <= seed < 2**31 for seed in seeds(rows))


def test_instances_are_reused_after_release_only(folder: Path):
    from contextlib import closing

    from cohort.records import Prompt
    from cohort.rollout import RolloutCollector, SamplingParams, StepKey
    from cohort.rollout.workers.load_rollout import collector_options
    from cohort.trainer.parts import Parts
    from playing import turns_config

    config = turns_config(folder, environment="e.py:Counter")
    environments = Parts(config, tokenizer=turns_tokenizer()).environments
    prompts = [Prompt(id=n, epoch=0, content="Count", token_ids=[1], columns={}) for n in range(3)]
    sampling, key = SamplingParams.for_training(config.rollout), StepKey(purpose="train", seed=0, step=0)
    options = collector_options(config, environments)
    with closing(RolloutCollector(ScriptedModel(replies(ADD, ".")), turns_tokenizer(), **options)) as collector:
        counter = module_of(folder / "e.py").Counter
        groups = collector.collect(prompts[:1], sampling, key)
        assert counter.made == 2
        groups += collector.collect(prompts[1:2], sampling, key)
        assert counter.made == 4
        collector.release(groups)
        collector.collect(prompts, sampling, key)
        assert counter.made == 6
    assert counter.log.count(("closed", 3)) == 6


def test_step_rewards_are_summed_or_one_per_turn(folder: Path):
    config = {"environment": "e.py:Steps"}
    summed, _ = played(folder, replies(ADD, ADD, "Done."), **config)
    assert summed.rewards == {"Steps": 10 + 1.5 + 3 + 3} and summed.step_rewards == ()
    cut, _ = played(folder, replies(ADD), max_turns=2, **config)
    assert cut.rewards == {"Steps": 10 + 1.5 + 3} and cut.end == "max_turns"
    with pytest.raises(UserError, match=r"per_token has no effect with algorithm.advantage: group_mean_std"):
        played(folder, replies("."), step_rewards="per_token", **config)


def test_constructor_arguments_and_factories(folder: Path):
    (one, _) = played(folder, replies(ADD, "."), environment={"use": "e.py:Counter", "args": {"start": 4}})
    assert one.rewards == {"Counter": 7.0}
    (one, _) = played(folder, replies(ADD, "."), environment="e.py:factory")
    assert one.rewards == {"Counter": 8.0}


@pytest.mark.parametrize("kind", ["Fails", "Hangs"])
@pytest.mark.parametrize("where", ["reset", "get_reward"])
def test_a_failed_environment_is_replaced(folder: Path, kind: str, where: str):
    options = {"environment": f"e.py:{kind}", "tool_timeout_s": 0.1}
    load(folder, **options)
    failing = getattr(module_of(folder / "e.py"), kind)
    failing.where, failing.times = where, 2  # of any two attempts, as threads may overtake each other
    trajectories = played(folder, replies("."), environment_retries=2, **options)
    assert [trajectory.rewards for trajectory in trajectories] == [{kind: 1.0}] * 2
    assert sum(trajectory.stats.attempts for trajectory in trajectories) == failing.made == 4
    failing.times = 100
    for trajectory in played(folder, replies("."), environment_retries=0, **options):
        assert (trajectory.end, trajectory.rewards, trajectory.stats.attempts) == ("environment_error", {}, 1)
        assert f"{kind}.{where}" in trajectory.error
        assert ("did not return within 0.1 s" if kind == "Hangs" else "the server is gone") in trajectory.error
    assert failing.made == 6, "a broken instance is not reused"


def test_a_failure_after_the_last_turn_is_one_too(folder: Path):
    (folder / "o.py").write_text(
        'class Over:\n    def reset(self):\n        pass\n    def add(self, by: int):\n        """Add.\n\n'
        '        Args:\n            by: how much\n        """\n    def get_reward(self):\n        return \'much\'\n'
    )
    (one, _) = played(folder, replies(ADD), environment="o.py:Over", max_turns=1, environment_retries=0)
    assert (one.end, one.rewards) == ("environment_error", {}) and "get_reward" in one.error


def test_a_method_that_hangs_is_a_failure_of_the_environment(folder: Path):
    (one, _) = played(folder, replies(ADD, "."), environment="e.py:Slow", tool_timeout_s=0.1, environment_retries=0)
    assert one.end == "environment_error" and "method 'add': did not return within 0.1 s" in one.error


@pytest.mark.parametrize(
    ("use", "value", "expected"),
    [
        ("Wrong", "many", "Wrong.get_reward returned 'many' (str); it must return a finite number"),
        ("Wrong", float("nan"), "Wrong.get_reward returned nan (float)"),
        ("Wrong", [1.0], "Wrong.get_reward returned [1.0] (list)"),
        ("WrongReset", None, "WrongReset.reset returned {'image': 1} (dict); it must return text or None"),
    ],
)
def test_wrong_types_are_named(folder: Path, use: str, value: Any, expected: str):
    load(folder, environment=f"e.py:{use}")
    module_of(folder / "e.py").Wrong.value = value
    (one, _) = played(folder, replies("."), environment=f"e.py:{use}")
    assert one.end == "environment_error" and expected in one.error


def test_a_reward_of_none_is_not_scored(folder: Path):
    load(folder, environment="e.py:Wrong")
    module_of(folder / "e.py").Wrong.value = None
    (one, _) = played(folder, replies("."), environment="e.py:Wrong")
    assert (one.end, one.rewards) == ("answer", {})


def test_tools_and_methods_combine(folder: Path):
    (folder / "t.py").write_text(
        'def double(x: int) -> int:\n    """Double.\n\n    Args:\n        x: a number\n    """\n    return 2 * x\n'
    )
    both = {"environment": "e.py:Counter", "tools": ["t.py:double"]}
    (one, _) = played(folder, replies(call("double", '{"x": 4}') + ADD, "."), **both)
    assert [m["content"] for m in one.messages if m["role"] == "tool"] == ["8", "3"]
    (folder / "u.py").write_text((folder / "t.py").read_text().replace("double", "add"))
    with pytest.raises(UserError, match=r"a tool of rollout.tools is also named 'add'"):
        load(folder, environment="e.py:Counter", tools=["u.py:add"])


def test_the_column_selects_the_environment_and_its_tools(folder: Path):
    mixture = {"environment": {"counter": "e.py:Counter", "silent": "e.py:Silent", "talk": "e.py:Talk"}}
    model = ScriptedModel(replies("Hello"))
    rows = [{"prompt": "p", "environment": name} for name in ("silent", "counter", "talk")]
    silent, _, counter, _, talk, _ = played(folder, model, rows, **mixture)
    assert silent.rewards == {} and silent.environment.row == {"prompt": "p"}
    assert counter.rewards == {"Counter": 0.0} and talk.rewards == {"Talk": 5.0}
    assert sum("Add to the count" in context for context in model.contexts) == 2
    environments = load(folder, **mixture)
    assert environments.rewards == ("Counter", "Talk")
    with pytest.raises(UserError, match=r"column 'environment': 'cuonter' is not in rollout.environment; did you mean"):
        environments.check_columns(["environment"], ["cuonter"], field="data.path")


def test_without_the_column_a_group_draws_one_environment_by_weight(folder: Path):
    mixture = {"a": {"use": "e.py:Counter", "weight": 3}, "b": "e.py:Silent"}
    groups = play(folder, replies("."), [{"prompt": "p"}] * 40, environment=mixture)
    kinds = [{type(t.environment).__name__ for t in group.trajectories} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    assert 24 <= kinds.count({"Counter"}) <= 36
    again = play(folder, replies("."), [{"prompt": "p"}] * 40, environment=mixture)
    assert kinds == [{type(t.environment).__name__ for t in group.trajectories} for group in again]


def test_a_program_with_a_simulated_user(folder: Path):
    def script(context: str, key: Any) -> str:
        return "why?" if "the user." in context else f"reply {key.turn}"

    model = ScriptedModel(script)
    (one, _) = played(folder, model, environment="e.py:Talk")
    assert [call.trained for call in one.calls] == [True, False, True]
    assert one.rewards == {"Talk": 7.0} and one.metrics == {"asked": 1.0}
    assert [m["content"] for m in one.messages] == ["reply 0", "why?", "reply 2"]
    (one, _) = played(folder, replies("."), environment="e.py:run")
    assert one.rewards == {} and one.end == "answer"


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"environment": "e.py:NoReset"}, "class NoReset has neither `reset(**row)`"),
        (
            {"environment": "e.py:NoHints"},
            "public methods of NoHints are tools: tool 'add': parameter 'by' has no type",
        ),
        ({"environment": "e.py:Sync"}, "the `run` of Sync must be `async def run(self, row, model)`"),
        ({"environment": {"use": "e.py:Counter", "args": {"begin": 1}}}, "rollout.environment.args: "),
        ({"environment": {"use": "e.py:run", "args": {"a": 1}}}, "takes no arguments"),
        ({"environment": "e.py:Conter"}, "did you mean Counter?"),
        ({"environment": "e.py:Talk", "data": {"system_prompt": "Hi"}}, "data.system_prompt has no effect"),
        ({"environment": "e.py:Counter", "data": {"apply_chat_template": False}}, "data.apply_chat_template: false"),
    ],
)
def test_environments_that_cannot_be_used(folder: Path, rollout: dict[str, Any], expected: str):
    with pytest.raises(UserError) as caught:
        load(folder, **rollout)
    assert expected in str(caught.value)


def test_columns_that_reset_needs(folder: Path):
    (folder / "n.py").write_text("class Needs:\n    def reset(self, level, seed, kind='a'):\n        pass\n")
    environments = load(folder, environment="n.py:Needs")
    environments.check_columns(["level"], [], field="data.path")
    with pytest.raises(UserError, match=r"data.path: Needs.reset needs 'level', which is no column.*did you mean levl"):
        environments.check_columns(["levl"], [], field="data.path")


def test_reward_functions_get_trajectories_and_environments(folder: Path):
    def counted(environments: list[Any], trajectories: list[Any]) -> list[float]:
        return [e.count + len(t.calls) for e, t in zip(environments, trajectories, strict=True)]

    groups = play(folder, replies(ADD, "."), [{"prompt": "p"}], environment="e.py:Counter")
    (scored,) = RewardRunner([reward(counted)]).score(groups)
    assert scored.rewards.tolist() == [5.0, 5.0]
