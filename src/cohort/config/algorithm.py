"""The `algorithm` section: a name, which stands for three components and their numbers, and what differs from it."""

import difflib
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Component, is_users_own
from cohort.config.section import Section

CORRECTION_CAP = 2.0


class AlgorithmConfig(Section):
    """How rewards become a gradient. docs/algorithms.md has the formulas; `cohort algorithms` lists them.

    Where the default is `null`, it is that of the algorithm, or of the component that reads the key.
    """

    name: str = Field("grpo", description="Stands for three components and their numbers: " + ", ".join(ALGORITHMS))
    advantage: str = Field(
        "",
        description=f"{', '.join(COMPONENTS['advantage'])}, or `file.py:function`. Default: the algorithm's.",
    )
    policy_loss: str = Field(
        "",
        description=f"{', '.join(COMPONENTS['policy_loss'])}, or `file.py:function`. Default: the algorithm's.",
    )
    loss_weight: str = Field(
        "",
        description=f"{', '.join(COMPONENTS['loss_weight'])}, or `file.py:function`. Default: the algorithm's.",
    )
    std_epsilon: float | None = Field(None, ge=0, description="Added to the standard deviation.")
    gamma: float | None = Field(None, gt=0, le=1, description="Discount per token of what comes later.")
    gae_lambda: float | None = Field(
        None,
        ge=0,
        le=1,
        description="1: the reward less the critic's value, without bias; lower: more of the critic's word, with less "
        "variance.",
    )
    whiten_advantages: bool | None = Field(
        None, description="Advantages with mean 0 and standard deviation 1 over the tokens of a step."
    )
    clip_low: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="The ratio is clipped from below at 1 - clip_low. It "
        "is exactly 1 at the first update of a rollout, so this matters with `train.updates_per_rollout` above 1.",
    )
    clip_high: float | None = Field(
        None, ge=0, description="The ratio is clipped from above at 1 + clip_high (as clip_low)."
    )
    beta: float = Field(0.0, ge=0, description="Weight of the KL term (k3). Above 0 a reference model is loaded.")
    mask_truncated_completions: bool = Field(
        False, description="Completions that hit the token limit get no loss and do not count in its denominator."
    )
    sampling_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = Field(
        "auto",
        description="Importance weight of the policy against the sampler's, per token or per completion, on the policy "
        "loss: capped at sampling_correction_cap (truncate), or 0 above it (mask). auto: token_truncate with "
        "rollout.engine: vllm, none with local, whose sampler computes the same.",
    )
    sampling_correction_cap: float = Field(CORRECTION_CAP, ge=1, description="Largest importance weight.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """The algorithm's components, and the numbers that they read."""
        name = values.get("name", "grpo") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in ALGORITHMS:
            return values
        named = ALGORITHMS[name]
        given = {key: value for key, value in values.items() if value not in (None, "")}
        chosen = {kind: given.get(kind, getattr(named, kind)) for kind in COMPONENTS}
        defaults: dict[str, Any] = {}
        for component in _components(chosen):
            defaults |= {key: named.defaults.get(key, value) for key, value in component.keys.items()}
        return {"name": name, **chosen, **defaults, **given}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(_not_one_of(name, ALGORITHMS))
        return name

    @field_validator(*COMPONENTS)
    @classmethod
    def _is_a_component(cls, component: str, info: ValidationInfo) -> str:
        known = COMPONENTS[str(info.field_name)]
        if component and component not in known and not is_users_own(component):
            raise ValueError(_not_one_of(component, known) + ", or a function of your own as file.py:function")
        return component

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        read = {key for component in self.components() for key in component.keys}
        for kind, known in COMPONENTS.items():
            for key in (key for component in known.values() for key in component.keys):
                if key not in read and getattr(self, key) is not None:
                    readers = " or ".join(name for name, component in known.items() if key in component.keys)
                    raise ValueError(
                        f"{key}: {getattr(self, key)} has no effect with {kind}: {getattr(self, kind)}; remove it, or "
                        f"use {kind}: {readers}"
                    )
        if self.sampling_correction == "none" and self.sampling_correction_cap != CORRECTION_CAP:
            raise ValueError(
                "sampling_correction_cap has no effect with sampling_correction: none; remove one of the two"
            )
        return self

    def components(self) -> list[Component]:
        """The components that are ours."""
        return _components({kind: getattr(self, kind) for kind in COMPONENTS})

    @property
    def min_generations(self) -> int:
        """Completions of a prompt that it takes to learn something."""
        return max((component.min_generations for component in self.components()), default=1)

    @property
    def needs_critic(self) -> bool:
        """Whether a second model, which foresees rewards, is trained beside the policy."""
        return any(component.needs_critic for component in self.components())

    @property
    def needs_whole_completions(self) -> str | None:
        """The key for which all logprobs of a completion must be there before any of its losses, with its value."""
        loss = COMPONENTS["policy_loss"].get(self.policy_loss)
        if loss is None or loss.whole_completions:
            return f"policy_loss: {self.policy_loss}"
        if self.sampling_correction.startswith("sequence"):
            return f"sampling_correction: {self.sampling_correction}"
        return None


def _components(chosen: dict[str, Any]) -> list[Component]:
    found = (COMPONENTS[kind].get(name) for kind, name in chosen.items() if isinstance(name, str))
    return [component for component in found if component is not None]


def _not_one_of(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"is not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
