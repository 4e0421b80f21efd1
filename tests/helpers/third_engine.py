"""The stub engine (`stub_engine`) as where the recipe for engines is followed, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Union
from unittest import mock

from cohort.config import ENGINES, Config, load
from cohort.config.schema import sections_in
from cohort.rollout.engines import SETUPS
from stub_engine.config import StubRolloutConfig


@contextmanager
def known_engine(setup: str = "stub_engine.setup:StubSetup") -> Iterator[None]:
    """Write its class into the union in `cohort.config.rollout`, and its setup into the table of engines."""
    field = Config.model_fields["rollout"]
    before, union = field.annotation, Union[field.annotation, StubRolloutConfig]  # noqa: UP007
    with (
        mock.patch.dict(ENGINES, stub=StubRolloutConfig),
        mock.patch.dict(SETUPS, stub=setup),
        mock.patch.dict(load._SECTIONS, rollout=sections_in(union)),
    ):
        field.annotation = union
        Config.model_rebuild(force=True)
        yield
        field.annotation = before
        Config.model_rebuild(force=True)
