"""Programs in child processes: how they reach the model of the parent."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from cohort.chat import Reply
from cohort.records import ModelCall
from cohort.rollout import RolloutCollector
from cohort.rollout.environments.child_process import ChildPool, UserCode
from cohort.rollout.environments.model import TrajectoryEnded
from engines import ScriptedEngine
from tiny import make_tokenizer
from waiting import PATIENCE_S

CODE = """
import asyncio
import numpy as np

async def play(row, model):
    reply = await model.chat([{"role": "user", "content": row["q"]}])
    left = model.turns_left
    calls = await asyncio.gather(model.generate(np.array([1, 2])), model.generate([3], train=False))
    unwanted = asyncio.create_task(model.generate([99]))
    await model.generate([1])
    unwanted.cancel()
    await asyncio.wait([unwanted])
    cancelled = (await model.generate([98])).token_ids.tolist()
    try:
        await model.chat("again")
    except Exception as error:
        results = [call.token_ids.tolist() for call in calls]
        return [reply.content, left, *results, cancelled, type(error).__name__, error.end]
"""


class FakeModel:
    """Answers like the model of a trajectory, until its limit."""

    turns_left = 8
    cancelled = 0

    async def chat(self, messages: Any, **options: Any) -> Reply:
        if messages == "again":
            raise TrajectoryEnded("max_turns")
        self.turns_left -= 1
        return Reply(content=f"{messages[0]['content']}!", reasoning=None, tool_calls=(), errors=())

    async def generate(self, token_ids: list[int], *, train: bool, **options: Any) -> ModelCall:
        if token_ids == [99]:
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                self.cancelled = 1
        token_ids = [self.cancelled] if token_ids == [98] else token_ids
        return ModelCall(
            context_ids=np.array(token_ids),
            token_ids=np.array([*token_ids, int(train)]),
            sampling_logprobs=np.zeros(len(token_ids) + 1),
            finish_reason="stop",
            policy_version=0,
        )


def test_a_program_samples_from_the_parents_model(tmp_path: Path):
    (tmp_path / "p.py").write_text(CODE)
    code = UserCode(name="play", key="rollout.environment", functions={"run": f"{tmp_path}/p.py:play"})
    pool = ChildPool(code)
    model = FakeModel()
    play = pool.call("run", {}, positional=[{"q": "Hello"}], timeout_s=PATIENCE_S, model=model)  # type: ignore[arg-type]
    with closing(RolloutCollector(ScriptedEngine(lambda: 1), make_tokenizer())) as collector:
        task = collector.start(play)
        collector.wait([task], count=1)
        result = task.result()
    assert result == ["Hello!", 7, [1, 2, 1], [3, 0], [1, 1], "TrajectoryEnded", "max_turns"]
    pool.close()
    pool.join(PATIENCE_S)
