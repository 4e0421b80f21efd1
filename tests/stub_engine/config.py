"""What the rest of Cohort knows of the engine."""

from typing import ClassVar, Literal

from cohort.config import ServersConfig


class StubRolloutConfig(ServersConfig):
    """Sampling by servers that know no weights."""

    setup: ClassVar[str] = "stub_engine.engine:StubSetup"
    server_name: ClassVar[str] = "stub server"
    sampled_by: ClassVar[str] = "by stub servers"
    engine: Literal["stub"] = "stub"
