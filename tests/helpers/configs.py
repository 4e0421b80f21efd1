"""The smallest configuration, and what is said against another."""

from typing import Any

import pytest

from cohort.config import config_from_dict
from cohort.errors import UserError

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "math"}]}


def message(raw: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config_from_dict(raw, overrides)
    return str(caught.value)
