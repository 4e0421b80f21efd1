"""The configuration: a YAML file with dotted overrides becomes a frozen, validated `Config`."""

from cohort.config.load import WRITTEN_BY_COHORT, config_from_dict, load_config, to_yaml
from cohort.config.schema import (
    AlgorithmConfig,
    Config,
    DapoConfig,
    DataConfig,
    DrGrpoConfig,
    EvalConfig,
    GrpoConfig,
    HardwareConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "WRITTEN_BY_COHORT",
    "AlgorithmConfig",
    "Config",
    "DapoConfig",
    "DataConfig",
    "DrGrpoConfig",
    "EvalConfig",
    "GrpoConfig",
    "HardwareConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "config_from_dict",
    "load_config",
    "to_yaml",
]
