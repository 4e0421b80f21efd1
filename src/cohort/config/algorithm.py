"""The `algorithm` section: a named algorithm, and the components and parameters in which a run differs from it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationInfo, create_model, field_validator, model_serializer, model_validator

from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Component, parameters
from cohort.config.section import Section
from cohort.config.terms import ALL_TOKENS, check_terms, term_defaults

CORRECTION_CAP = 2.0
_OWN = "file.py:function, or {use: file.py:function, args: {name: value}}"


def _component_field(kind: str) -> Any:
    own = "`file.py:function`, or `{use: file.py:function, args: {name: value}}`"
    return Field("", description=f"{', '.join(COMPONENTS[kind])}, {own}. Default: the algorithm's.")


@dataclass(frozen=True, slots=True, repr=False)
class OwnFunction:
    """A user's function in the place of a component, and its keyword arguments."""

    use: str  # file.py:function or package.module:function
    args: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return str(self.written())

    def __str__(self) -> str:
        return self.use

    def written(self) -> Any:
        """Return it as a configuration has it."""
        return {"use": self.use, "args": dict(self.args)} if self.args else self.use


class _Components(Section):
    name: str = Field("grpo", description="Stands for three components and their numbers: " + ", ".join(ALGORITHMS))
    advantage: str | OwnFunction = _component_field("advantage")
    policy_loss: str | OwnFunction = _component_field("policy_loss")
    loss_weight: str | OwnFunction = _component_field("loss_weight")


if TYPE_CHECKING:

    class _WithParameters(_Components):
        def __getattr__(self, parameter: str) -> Any: ...

else:
    # A key for each parameter in the catalogue; None until the default of the algorithm or component is filled in.
    _WithParameters = create_model(
        "_WithParameters",
        __base__=_Components,
        **{
            key: (p.value_type | None, Field(None, description=p.description, ge=p.ge, gt=p.gt, le=p.le, lt=p.lt))
            for key, p in parameters().items()
        },
    )


class AlgorithmConfig(_WithParameters):
    """How rewards become a gradient. docs/algorithms.md has the formulas; `cohort algorithms` lists them.

    Where the default is `null`, it is that of the algorithm, or of the component that reads the key.
    """

    beta: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence from the reference, per token. Above 0 a reference model is loaded.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Of the KL divergence, with d = log policy - log reference: k1 = d, k2 = d^2 / 2, "
        "k3 = exp(-d) - 1 + d. On policy the gradient of k2 in the loss is that of the KL divergence; k3's is that of "
        "the reverse one, KL(reference || policy). Default: k3 in the loss, k1 in the reward.",
    )
    kl_in: Literal["loss", "reward"] | None = Field(
        None,
        description="loss: beta * KL is added to each token's loss. reward: it is taken from each token's reward "
        "before the advantage, where only k1 has the gradient of the KL divergence. Default: loss.",
    )
    kl_unbiased: bool | None = Field(
        None,
        description="With kl_in: loss: the estimate is multiplied by the ratio of the current to the old policy, "
        "gradient included, which makes the gradient of k1 and k3 that of the KL divergence. Default: false.",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adapts beta, from its value here on: after each update beta *= 1 + clip(kl / kl_target - 1, "
        "-0.2, 0.2) * completions / kl_horizon. Default: beta is fixed.",
    )
    kl_horizon: int | None = Field(
        None, ge=1, description="With kl_target: completions over which beta adapts. Default: 10000."
    )
    entropy_coef: float = Field(
        0.0, ge=0, description="Weight of the entropy bonus: each token's loss less entropy_coef * entropy, in nats."
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="Adapts entropy_coef, from its value here on: after each update it goes up by entropy_coef_delta "
        "where the entropy of the step is at most this, else down; above this there is no bonus. Default: it is fixed.",
    )
    entropy_coef_delta: float | None = Field(
        None, gt=0, description="With entropy_target: step of entropy_coef. Default: 0.005."
    )
    entropy_coef_max: float | None = Field(
        None, gt=0, description="With entropy_target: largest entropy_coef. Default: 1.0."
    )
    top_entropy_quantile: float = Field(
        ALL_TOKENS,
        gt=0,
        le=1,
        description="Share of the step's tokens, those of highest entropy, that have a policy gradient. Denominators, "
        "KL and the entropy bonus still are over all tokens. Costs a forward pass of the policy; 1.0: all tokens.",
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        gt=0,
        description="Completions of negative advantage have no policy gradient where the mean over their tokens of "
        "log sampling policy - log current policy is above this. Default: off.",
    )
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
        given = {key: value for key, value in values.items() if value not in (None, "")}
        return {"name": name, **_filled_in(name, given), **given}

    @model_serializer
    def _what_its_name_does_not_say(self) -> dict[str, Any]:
        """The name, and the keys that are not as it fills them in: written out, they would outlive a change of it."""
        values = dict(self)
        usual = {key: field.default for key, field in type(self).model_fields.items()}
        usual |= _filled_in(self.name, values) | {kind: getattr(ALGORITHMS[self.name], kind) for kind in COMPONENTS}
        values |= {kind: value.written() for kind in COMPONENTS if isinstance(value := values[kind], OwnFunction)}
        return {key: value for key, value in values.items() if key == "name" or value != usual[key]}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(not_one_of(name, ALGORITHMS))
        return name

    @field_validator(*COMPONENTS, mode="before")
    @classmethod
    def _is_a_component(cls, value: Any, info: ValidationInfo) -> str | OwnFunction:
        known = COMPONENTS[str(info.field_name)]
        if isinstance(value, dict):
            use, args = value.get("use"), value.get("args", {})
            is_own = isinstance(use, str) and ":" in use and value.keys() <= {"use", "args"}
            if not is_own or not _is_keyword_arguments(args):
                raise ValueError(f"{value!r:.80}: must be {_OWN}; one of {', '.join(known)} is given by its name alone")
            return OwnFunction(str(use), args)
        if isinstance(value, OwnFunction) or value == "":
            return value
        if not isinstance(value, str):
            raise ValueError(f"must be one of {', '.join(known)}, or {_OWN}")
        if ":" not in value and value not in known:
            raise ValueError(not_one_of(value, known) + ", or a function of your own as file.py:function")
        return OwnFunction(value) if ":" in value else value

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        read = {key for component in self.components() for key in component.parameters}
        for kind, known in COMPONENTS.items():
            for key in (key for component in known.values() for key in component.parameters):
                if key not in read and getattr(self, key) is not None:
                    choice, value = getattr(self, kind), getattr(self, key)
                    instead = [name for name, component in known.items() if key in component.parameters]
                    if isinstance(choice, OwnFunction):
                        instead.append(f"{{use: {choice}, args: {{{key}: {value}}}}}")
                    raise ValueError(
                        f"{key}: {value} has no effect with {kind}: {choice}; remove it, or use {kind}: "
                        f"{' or '.join(instead)}"
                    )
        if self.delta is not None and self.clip_high is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta: {self.delta} must be above 1 + clip_high, which is {1 + self.clip_high:g}; 3 is usual"
            )
        if self.sampling_correction == "none" and self.sampling_correction_cap != CORRECTION_CAP:
            raise ValueError(
                "sampling_correction_cap has no effect with sampling_correction: none; remove one of the two"
            )
        check_terms(self)
        return self

    def components(self) -> list[Component]:
        """The components that the catalogue has; a user's own functions are not among them."""
        return _components({kind: getattr(self, kind) for kind in COMPONENTS})

    @property
    def min_generations(self) -> int:
        """Completions of a prompt that it takes to learn something."""
        keys = [component.min_generations_key for component in self.components()]
        given = [getattr(self, key) for key in keys if key is not None]
        return max([*(component.min_generations for component in self.components()), *given], default=1)

    @property
    def needs_critic(self) -> bool:
        """Whether a second model, which foresees rewards, is trained beside the policy."""
        return any(component.needs_critic for component in self.components())

    @property
    def sequence_level_key(self) -> str | None:
        """The key for which all logprobs of a completion must be there before any of its losses, with its value."""
        # what a user's own loss looks at is found by trying it
        if any(component.sequence_level for component in self.components()):
            return f"policy_loss: {self.policy_loss}"
        if self.sampling_correction.startswith("sequence"):
            return f"sampling_correction: {self.sampling_correction}"
        if self.off_policy_mask_threshold is not None:
            return f"off_policy_mask_threshold: {self.off_policy_mask_threshold}"
        return None


def _is_keyword_arguments(args: Any) -> bool:
    return isinstance(args, dict) and all(isinstance(key, str) for key in args)


def _filled_in(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The components of an algorithm, or those given, and the defaults of what they and the terms around them read."""
    named = ALGORITHMS[name]
    chosen = {kind: given.get(kind, getattr(named, kind)) for kind in COMPONENTS}
    defaults: dict[str, Any] = {}
    for kind, name_of_part in chosen.items():
        is_its_own = name_of_part == getattr(named, kind)
        for component in _components({kind: name_of_part}):
            defaults |= {k: named.defaults.get(k, v) if is_its_own else v for k, v in component.defaults.items()}
    return chosen | defaults | term_defaults(given)


def _components(chosen: dict[str, Any]) -> list[Component]:
    found = (COMPONENTS[kind].get(name) for kind, name in chosen.items() if isinstance(name, str))
    return [component for component in found if component is not None]


def not_one_of(name: str, known: Any) -> str:
    """What is wrong with a name that is not known, and the nearest one that is."""
    near = difflib.get_close_matches(name.lower(), known, n=3)
    near.sort(
        key=lambda other: sorted(other) != sorted(name.lower())
    )  # gpro is grpo with two letters swapped, and not gspo
    return f"is not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
