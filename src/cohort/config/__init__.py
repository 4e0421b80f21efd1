"""The configuration: a YAML file with dotted overrides becomes a frozen, validated `Config`."""

from cohort.config.adapter import AdapterConfig
from cohort.config.algorithm import AlgorithmConfig, DapoConfig, DrGrpoConfig, GrpoConfig
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
    RewardConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "KEYS_OF_OWN_SERVERS",
    "WRITTEN_BY_COHORT",
    "AdapterConfig",
    "AlgorithmConfig",
    "Config",
    "DapoConfig",
    "DataConfig",
    "DrGrpoConfig",
    "EvalConfig",
    "GrpoConfig",
    "HardwareConfig",
    "LocalRolloutConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainConfig",
    "VllmRolloutConfig",
    "config_from_dict",
    "load_config",
    "to_yaml",
]
