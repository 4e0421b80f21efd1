"""What an environment of the configuration is, and how its instances are created and closed."""

from pathlib import Path

import pytest

from cohort.errors import UserError
from playing import call, load, module_of, play, replies

CODE = '''
from pathlib import Path

class Shell:
    """An environment class with a tool `run`."""

    def reset(self):
        pass

    def run(self, command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        return f"ran {command}"

class Counter:
    log = []

    def reset(self):
        self.log.append("reset")

    def get_reward(self):
        return 1.0

    async def close(self):
        self.log.append("closed")

def factory():
    Counter.log.append("made")
    return Counter()

class Program:
    log = []

    async def run(self, row, model):
        await model.chat("go")
        return 1.0

    async def close(self):
        self.log.append("closed")

async def play(row, model):
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.py").write_text(CODE)
    (tmp_path / "other.py").write_text(CODE)
    return tmp_path


def test_an_environment_class_may_have_a_tool_named_run(folder: Path):
    script = replies(call("run", '{"command": "ls"}'), ".")
    (group,) = play(folder, script, [{"prompt": "Go"}], environment="s.py:Shell")
    assert [m["content"] for m in group.trajectories[0].messages if m["role"] == "tool"] == ["ran ls"]


def test_the_instance_that_shows_the_class_of_a_factory_is_closed(folder: Path):
    load(folder, environment="s.py:factory")
    assert module_of(folder / "s.py").Counter.log == ["made", "closed"]


def test_a_factory_that_exits_is_refused(folder: Path):
    with pytest.raises(UserError, match=r"rollout.environment.weight.use: 'builtins:exit' raised SystemExit: None"):
        load(folder, environment={"weight": "builtins:exit"})


def test_a_program_is_closed_also_if_its_close_is_a_coroutine_function(folder: Path):
    play(folder, replies("."), [{"prompt": "Go"}], environment="s.py:Program")
    assert module_of(folder / "s.py").Program.log == ["closed"]


@pytest.mark.parametrize("name", ["Counter", "Program", "play"])
def test_different_environments_with_the_same_name_are_refused(folder: Path, name: str):
    load(folder, environment={"a": f"s.py:{name}", "b": f"s.py:{name}"})
    with pytest.raises(UserError, match=f"rollout.environment.b: its reward would have the name '{name}'"):
        load(folder, environment={"a": f"s.py:{name}", "b": f"other.py:{name}"})
