"""Environments of SkyRL Gym (https://github.com/NovaSky-AI/SkyRL)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cohort.errors import UserError, suggest
from cohort.rollout.environments.libraries.common import column, import_library, opened
from cohort.rollout.environments.model import RolloutModel, TrajectoryEnded
from cohort.rollout.environments.sources import EnvironmentSource


def load(name: str, args: Mapping[str, Any], *, field: str) -> EnvironmentSource:
    """Return a registered environment. `args` are the keys of its `env_config`.

    Raises:
        UserError: the library or the environment does not exist.
    """
    library = import_library("skyrl_gym", extra="skyrl-gym", field=field)
    registered = library.envs.registration.registry
    if name not in registered:
        raise UserError(f"{field}: SkyRL Gym has no {name!r}{suggest(name, sorted(registered), 'Environments')}")
    config = import_library("omegaconf", extra="skyrl-gym", field=field).OmegaConf.create(dict(args))
    create = partial(SkyRLGym, make=partial(library.make, name, env_config=config), name=name)
    return EnvironmentSource(kind=SkyRLGym, name=name, create=create)


@dataclass(eq=False, kw_only=True)
class SkyRLGym:
    """Plays rows in SkyRL's form: `prompt` with messages, and the other columns as the environment's `extras`."""

    make: Callable[..., Any]  # creates an environment for the `extras` of a row
    name: str

    async def run(self, row: Mapping[str, Any], model: RolloutModel) -> dict[str, float]:
        """Play one row. The reward is the sum of those of all turns."""
        prompt = column(row, "prompt", library="skyrl_gym")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        extras = {"max_turns": model.turns_left, **{key: value for key, value in row.items() if key != "prompt"}}
        async with opened(partial(self.make, extras=extras), name=self.name) as environment:
            messages, _ = await environment("init", prompt=messages)
            rewards: list[float] = []
            done = False
            try:
                while not done:
                    reply = await model.chat(messages)
                    output = await environment("step", action=reply.content)
                    rewards.append(float(output["reward"]))
                    done = output["done"]
                    messages = [*messages, reply.message, *output["observations"]]
            except TrajectoryEnded:
                if not rewards:
                    raise
            metrics = await environment("get_metrics")
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, bool | int | float)}
        return {**numbers, "reward": sum(rewards)}
