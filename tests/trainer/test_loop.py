"""The training loop reads on one screen."""

import inspect

from cohort.trainer.loop import TrainingLoop


def test_the_loop_and_its_step_fit_on_one_screen():
    sources = [inspect.getsource(method) for method in (TrainingLoop.steps, TrainingLoop.step)]
    assert sum(len(source.splitlines()) for source in sources) <= 45
