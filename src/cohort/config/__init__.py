"""The configuration: a YAML file with dotted overrides becomes a frozen, validated `Config`."""

from cohort.config.algorithm import AlgorithmConfig
from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Component, NamedAlgorithm, is_users_own
from cohort.config.critic import CriticConfig
from cohort.config.load import WRITTEN_BY_COHORT, config_from_dict, load_config, to_yaml
from cohort.config.rollout import (
    KEYS_OF_OWN_SERVERS,
    LocalRolloutConfig,
    RolloutConfig,
    SamplingConfig,
    VllmRolloutConfig,
)
from cohort.config.schema import (
    Config,
    DataConfig,
    EvalConfig,
    HardwareConfig,
    ModelConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "ALGORITHMS",
    "COMPONENTS",
    "KEYS_OF_OWN_SERVERS",
    "WRITTEN_BY_COHORT",
    "AlgorithmConfig",
    "Component",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "HardwareConfig",
    "LocalRolloutConfig",
    "ModelConfig",
    "NamedAlgorithm",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainConfig",
    "VllmRolloutConfig",
    "config_from_dict",
    "is_users_own",
    "load_config",
    "to_yaml",
]
