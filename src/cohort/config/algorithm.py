"""The `algorithm` section: a named algorithm, with overrides of its components and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationInfo, create_model, field_validator, model_serializer, model_validator

from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Component, parameters
from cohort.config.objects import NamedObject, name_callable
from cohort.config.section import Section, find_function
from cohort.errors import did_you_mean


def regularizer_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the keys that take effect, given the section's explicit values."""
    defaults: dict[str, Any] = {}
    if _is_positive(given.get("beta")):
        if given.get("kl_in", "loss") == "loss":
            defaults |= {"kl_estimator": "k3", "kl_in": "loss", "kl_unbiased": False}
        else:
            defaults["kl_estimator"] = "k1"
        if given.get("kl_target") is not None:
            defaults["kl_horizon"] = 10_000
    if given.get("entropy_target") is not None:
        defaults |= {"entropy_coef_delta": 0.005, "entropy_coef_max": 1.0}
    return defaults


def check_regularizers(algorithm: "AlgorithmConfig") -> None:
    """Reject keys without effect and misleading combinations.

    Raises:
        ValueError: names the key, the value and what works.
    """
    if algorithm.beta == 0:
        for key in ("kl_estimator", "kl_in", "kl_unbiased", "kl_target", "kl_horizon"):
            algorithm.refuse(key, "beta: 0", "remove it, or set beta above 0 (such as 0.04)")
    if algorithm.kl_in == "reward":
        algorithm.refuse("kl_unbiased", "kl_in: reward", "remove it, or use kl_in: loss")
    if algorithm.kl_target is None:
        algorithm.refuse("kl_horizon", "a fixed beta", "remove it, or set kl_target")
    if algorithm.entropy_target is None:
        for key in ("entropy_coef_delta", "entropy_coef_max"):
            algorithm.refuse(key, "a fixed entropy_coef", "remove it, or set entropy_target")
    if algorithm.entropy_coef_max is not None and algorithm.entropy_coef > algorithm.entropy_coef_max:
        raise ValueError(
            f"entropy_coef: {algorithm.entropy_coef} is above entropy_coef_max: {algorithm.entropy_coef_max}; lower "
            f"one or raise the other"
        )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1" and not algorithm.kl_unbiased:
        raise ValueError(
            "kl_estimator: k1 in the loss has a gradient of 0 in expectation, so it would only add noise; use "
            "kl_estimator: k2 or k3, kl_unbiased: true, or kl_in: reward"
        )
    if algorithm.kl_estimator == "k2" and algorithm.kl_unbiased:
        raise ValueError(
            "kl_unbiased: true with kl_estimator: k2 is the gradient of no divergence; use kl_estimator: k3, whose "
            "unbiased gradient is k2's times the importance ratio"
        )
    _check_components(algorithm)


def _check_components(algorithm: "AlgorithmConfig") -> None:
    """Reject regularizers that the chosen advantage or policy loss does not support."""
    parts, by_token = algorithm.components(), ""
    for part in parts:
        if algorithm.kl_in == "reward" and part.kl_in_reward_conflict is not None:
            raise ValueError(
                f"kl_in: reward does not go with advantage: {algorithm.advantage}: {part.kl_in_reward_conflict}; use "
                f"kl_in: loss, or another advantage such as group_mean_std"
            )
        if part.needs_critic or (part.uses_token_rewards and algorithm.kl_in == "reward"):
            by_token = f"advantage: {algorithm.advantage}" + ("" if part.needs_critic else " and kl_in: reward")
    if algorithm.top_entropy_quantile < 1:
        by_token = f"top_entropy_quantile: {algorithm.top_entropy_quantile}"
    if by_token and any(part.needs_uniform_advantage for part in parts):
        raise ValueError(
            f"policy_loss: {algorithm.policy_loss} has one ratio per completion and needs one advantage for all its "
            f"tokens, but with {by_token} they differ; use policy_loss: gspo_token"
        )


def _is_positive(value: Any) -> bool:
    """Whether a raw value is a number above 0; the field's own validation handles other text."""
    try:
        return value is not None and float(value) > 0
    except (TypeError, ValueError):
        return False


_OWN = "file.py:function, or {use: file.py:function, args: {name: value}}"


def _component_field(kind: str) -> Any:
    own = "`file.py:function`, or `{use: file.py:function, args: {name: value}}`"
    return Field("", description=f"{', '.join(COMPONENTS[kind])}, {own}. Default: the algorithm's.")


@dataclass(frozen=True, slots=True, repr=False)
class CustomFunction:
    """A user's function in place of a built-in component, with its keyword arguments."""

    use: str  # file.py:function or package.module:function
    args: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return str(self.to_config())

    def __str__(self) -> str:
        return self.use

    def to_config(self) -> Any:
        """Return the value as written in a configuration."""
        return {"use": self.use, "args": dict(self.args)} if self.args else self.use


class _Components(Section):
    name: str = Field("grpo", description="Selects the three components and their defaults: " + ", ".join(ALGORITHMS))
    advantage: str | CustomFunction = _component_field("advantage")
    policy_loss: str | CustomFunction = _component_field("policy_loss")
    loss_weight: str | CustomFunction = _component_field("loss_weight")


if TYPE_CHECKING:

    class _WithParameters(_Components):
        def __getattr__(self, parameter: str) -> Any: ...

else:
    # One key per parameter in the catalogue; None until the default of the algorithm or component is filled in.
    _WithParameters = create_model(
        "_WithParameters",
        __base__=_Components,
        **{
            key: (p.value_type | None, Field(None, description=p.description, ge=p.ge, gt=p.gt, le=p.le, lt=p.lt))
            for key, p in parameters().items()
        },
    )


class AlgorithmConfig(_WithParameters):
    """How rewards become a gradient. See docs/algorithms.md for formulas and `cohort algorithms` for a list.

    A default of `null` means the default of the algorithm, or of the component that reads the key.
    """

    beta: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the per-token KL divergence from the reference. Above 0 a reference model is "
        "loaded.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="KL estimator, with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. "
        "On-policy, the gradient of k2 as a loss is that of KL(policy || reference); k3's is that of "
        "KL(reference || policy). Default: k3 in the loss, k1 in the reward.",
    )
    kl_in: Literal["loss", "reward"] | None = Field(
        None,
        description="loss: add beta * KL to each token's loss. reward: subtract it from each token's reward before "
        "computing advantages; only k1 gives an unbiased KL gradient there. Default: loss.",
    )
    kl_unbiased: bool | None = Field(
        None,
        description="With kl_in: loss: multiply the estimate by the ratio of current to old policy, with gradient, so "
        "that k1 and k3 have the gradient of the KL divergence. Default: false.",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adapt beta, starting from its value here: after each update beta *= 1 + clip(kl / kl_target - 1, "
        "-0.2, 0.2) * completions / kl_horizon. Default: beta is fixed.",
    )
    kl_horizon: int | None = Field(
        None, ge=1, description="With kl_target: number of completions over which beta adapts. Default: 10000."
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the entropy bonus: each token's loss is reduced by entropy_coef * entropy (nats).",
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="Adapt entropy_coef, starting from its value here: after each update, add entropy_coef_delta if "
        "the step's entropy is at most this, else subtract it. The bonus applies only while entropy is at "
        "most this. Default: fixed.",
    )
    entropy_coef_delta: float | None = Field(
        None, gt=0, description="With entropy_target: step size of entropy_coef. Default: 0.005."
    )
    entropy_coef_max: float | None = Field(
        None, gt=0, description="With entropy_target: maximum entropy_coef. Default: 1.0."
    )
    top_entropy_quantile: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the step's tokens, those of highest entropy, that get a policy gradient. "
        "Denominators, KL and the entropy bonus still cover all tokens. Costs a forward pass of the "
        "policy; 1.0: all tokens.",
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        gt=0,
        description="Mask completions with negative advantage whose mean over tokens of log sampling policy - log "
        "current policy exceeds this. Default: off.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Exclude completions that hit the token limit from the loss and from its denominator."
    )
    sampling_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = Field(
        "auto",
        description="Importance weight of the trainer's policy over the sampler's, per token or per completion, "
        "applied to the policy loss: capped at sampling_correction_cap (truncate), or set to 0 above it "
        "(mask). auto: token_truncate with rollout.engine: vllm; none with local, which computes the same "
        "logprobs.",
    )
    sampling_correction_cap: float = Field(2.0, ge=1, description="Maximum importance weight.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the algorithm's components and their parameters."""
        name = values.get("name", "grpo") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in ALGORITHMS:
            return values
        given = {key: value for key, value in values.items() if value not in (None, "")}
        return {"name": name, **_resolve_defaults(name, given), **given}

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        """Serialize only the name and what differs from its defaults, so that a new name changes the algorithm."""
        values = dict(self)
        usual = {key: field.default for key, field in type(self).model_fields.items()}
        usual |= _resolve_defaults(self.name, values) | {
            kind: getattr(ALGORITHMS[self.name], kind) for kind in COMPONENTS
        }
        values |= {kind: value.to_config() for kind in COMPONENTS if isinstance(value := values[kind], CustomFunction)}
        return {key: value for key, value in values.items() if key == "name" or value != usual[key]}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(unknown_name(name, ALGORITHMS))
        return name

    @field_validator(*COMPONENTS, mode="before")
    @classmethod
    def _parse_component(cls, value: Any, info: ValidationInfo) -> str | CustomFunction:
        known = COMPONENTS[str(info.field_name)]
        if callable(value):
            return CustomFunction(name_callable(value))
        if isinstance(value, dict):
            use, args = value.get("use"), value.get("args", {})
            if callable(use):
                return CustomFunction(name_callable(use), args)
            is_own = isinstance(use, str) and ":" in use and value.keys() <= {"use", "args"}
            if not is_own or not _is_keyword_arguments(args):
                raise ValueError(f"{value!r:.80}: must be {_OWN}; one of {', '.join(known)} is given by its name alone")
            return CustomFunction(_find(use, info), args)
        if isinstance(value, CustomFunction) or value == "":
            return value
        if not isinstance(value, str):
            raise ValueError(f"must be one of {', '.join(known)}, or {_OWN}")
        if ":" not in value and value not in known:
            raise ValueError(unknown_name(value, known) + ", or a function of your own as file.py:function")
        return CustomFunction(_find(value, info)) if ":" in value else value

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        read = {key for component in self.components() for key in component.parameters}
        for kind, known in COMPONENTS.items():
            for key in (key for component in known.values() for key in component.parameters):
                if key not in read and getattr(self, key) is not None:
                    choice, value = getattr(self, kind), getattr(self, key)
                    instead = [name for name, component in known.items() if key in component.parameters]
                    if isinstance(choice, CustomFunction):
                        instead.append(f"{{use: {choice}, args: {{{key}: {value}}}}}")
                    raise ValueError(
                        f"{key}: {value} has no effect with {kind}: {choice}; remove it, or use {kind}: "
                        f"{' or '.join(instead)}"
                    )
        if self.delta is not None and self.clip_high is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta: {self.delta} must be above 1 + clip_high, which is {1 + self.clip_high:g}; 3 is usual"
            )
        if self.sampling_correction == "none":
            self.refuse("sampling_correction_cap", "sampling_correction: none")
        check_regularizers(self)
        return self

    def components(self) -> list[Component]:
        """Return the catalogue entries of the built-in components; custom functions have none."""
        return _components({kind: getattr(self, kind) for kind in COMPONENTS})

    @property
    def min_generations(self) -> int:
        """Minimum number of completions per prompt that gives a learning signal."""
        return max([self.at_k or 1, *(component.min_generations for component in self.components())])

    @property
    def takes_token_rewards(self) -> bool:
        """Whether advantages differ between the tokens of a trajectory if their rewards do."""
        return any(component.uses_token_rewards for component in self.components())

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained alongside the policy."""
        return any(component.needs_critic for component in self.components())

    @property
    def sequence_level_key(self) -> str | None:
        """The key and value that make a token's loss depend on its whole completion; None for token-level losses."""
        # for a custom loss this is found by running it on a few tokens
        if any(component.sequence_level for component in self.components()):
            return f"policy_loss: {self.policy_loss}"
        if self.sampling_correction.startswith("sequence"):
            return f"sampling_correction: {self.sampling_correction}"
        if self.off_policy_mask_threshold is not None:
            return f"off_policy_mask_threshold: {self.off_policy_mask_threshold}"
        return None


def _find(use: Any, info: ValidationInfo) -> str:
    """Make the file of a function absolute; an object keeps its name."""
    return use if isinstance(use, NamedObject) else find_function(use, info)


def _is_keyword_arguments(args: Any) -> bool:
    return isinstance(args, dict) and all(isinstance(key, str) for key in args)


def _resolve_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chosen components, and the defaults of the parameters that they and the regularizers read."""
    named = ALGORITHMS[name]
    chosen = {kind: given.get(kind, getattr(named, kind)) for kind in COMPONENTS}
    defaults: dict[str, Any] = {}
    for kind, name_of_part in chosen.items():
        is_its_own = name_of_part == getattr(named, kind)
        for component in _components({kind: name_of_part}):
            defaults |= {k: named.defaults.get(k, v) if is_its_own else v for k, v in component.defaults.items()}
    return chosen | defaults | regularizer_defaults(given)


def _components(chosen: dict[str, Any]) -> list[Component]:
    found = (COMPONENTS[kind].get(name) for kind, name in chosen.items() if isinstance(name, str))
    return [component for component in found if component is not None]


def unknown_name(name: str, known: Any) -> str:
    """Return an error message for an unknown name, with the closest known one."""
    return f"is not one of {', '.join(known)}{did_you_mean(name, known)}"
