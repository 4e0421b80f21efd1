"""A run warns, once and by name and step, about rewards without a signal."""

from pathlib import Path

import cohort
from cohort.display import Display
from runs import changed, make_inputs
from selection import slow


class Notes(Display):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def notify(self, text: str) -> None:
        self.notes.append(text)


@slow("tests/metrics/test_reward_health.py has the warnings; here a run prints them")
def test_a_constant_reward_is_named_with_its_step(tmp_path: Path):
    (tmp_path / "constant.py").write_text("def constant(completions):\n    return [0.5] * len(completions)\n")
    rewards = [{"use": f"{tmp_path}/constant.py:constant"}, {"use": "regex", "weight": 0, "args": {"pattern": "^"}}]
    config = changed(make_inputs(tmp_path), train={"steps": 12}, run={"checkpoint_every": 0})
    config = {**config, "rewards": rewards, "eval": None}
    display = Notes()
    cohort.train(config, display=display)
    warnings = [note for note in display.notes if note.startswith("warning: step 10: ")]
    assert warnings == [
        "warning: step 10: reward 'constant' has been 0.5 for every completion of the last 10 steps, "
        "so it gives no signal",
        "warning: step 10: in each of the last 10 steps all rewards of each group were equal ('constant' at 0.5): "
        "there is nothing to learn from; use harder or easier prompts, or rollout.resample",
    ]
