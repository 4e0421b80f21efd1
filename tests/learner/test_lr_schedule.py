"""Learning rates, by hand."""

import pytest

from cohort.config import config_from_dict
from cohort.learner import learning_rate_factor
from configs import MINIMAL


@pytest.mark.parametrize(
    ("schedule", "minimum", "expected"),
    [
        ("constant", 0.0, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 0.2, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0.0, [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]),
        ("cosine", 0.1, [0.5, 1.0, 1.0, 0.8681980515339464, 0.55, 0.23180194846605363, 0.1]),
    ],
)
def test_factors_of_six_updates_two_of_them_warmup(schedule, minimum, expected):
    factors = [learning_rate_factor(n, warmup=2, total=6, schedule=schedule, minimum=minimum) for n in range(7)]
    assert factors == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("train", "num_steps", "expected"),
    [
        ({}, 100, 0),
        ({"warmup_steps": 7}, 100, 7),
        ({"warmup_ratio": 0.1}, 30, 3),
        ({"warmup_ratio": 0.07}, 100, 7),  # 0.07 * 100 is 7.000000000000001
        ({"warmup_ratio": 0.03}, 50, 2),
        ({"warmup_ratio": 1.0}, 5, 5),
    ],
)
def test_warmup_steps(train, num_steps, expected):
    assert config_from_dict({**MINIMAL, "train": train}).train.num_warmup_steps(num_steps) == expected
