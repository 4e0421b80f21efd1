"""What the rest of Cohort knows of the engine."""

from typing import ClassVar, Literal

from cohort.config import ServersConfig
from cohort.config.rollout import ServerLimits


class StubRolloutConfig(ServersConfig):
    """Sampling by servers to which every token is equally likely."""

    default_correction: ClassVar[Literal["none", "token_truncate"]] = "token_truncate"
    program: ClassVar[str] = "stub"
    server_name: ClassVar[str] = "stub server"
    sampled_by: ClassVar[str] = "by stub servers"
    has_serve_command: ClassVar[bool] = False
    limits: ClassVar[ServerLimits] = ServerLimits(unserved_sampling=("min_p", "repetition_penalty"))
    engine: Literal["stub"] = "stub"
