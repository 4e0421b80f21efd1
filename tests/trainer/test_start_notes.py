"""What a run says at its start about its configuration."""

import pytest

from cohort.config import config_from_dict
from cohort.trainer.inputs import describe_lost_updates
from configs import MINIMAL

SMALL = ["model.dtype=bfloat16", "train.learning_rate=1e-6"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (SMALL, "float32 (matrix products are bfloat16 on GPUs all the same), optim.stochastic_rounding: true, or a"),
        ([*SMALL, "optim.name=adafactor"], "float32 (matrix products are bfloat16 on GPUs all the same), or a"),
        ([*SMALL, "train.learning_rate=1e-5"], None),
        ([*SMALL, "optim.stochastic_rounding=true"], None),
        ([*SMALL, "model.adapter={rank: 4}"], None),  # whose weights are float32
        (["train.learning_rate=1e-6"], None),
    ],
)
def test_updates_that_bfloat16_rounds_away(overrides, expected):
    said = describe_lost_updates(config_from_dict(MINIMAL, overrides))
    if expected is None:
        assert said is None
    else:
        assert said == (
            "warning: model.dtype: bfloat16 rounds away most updates at train.learning_rate: 1e-06, so that little is "
            f"learned; use model.dtype: {expected} learning rate of at least 1e-05 (docs/memory.md)"
        )
