"""Configuration: load YAML with dotted overrides into a frozen, validated `Config`."""

from cohort.config.algorithm import AlgorithmConfig, CustomFunction
from cohort.config.catalogue import ALGORITHMS, COMPONENTS, Component
from cohort.config.data import EvalConfig
from cohort.config.load import CONFIG_HEADER, config_from_dict, load_config, to_yaml
from cohort.config.model import AdapterConfig, CriticConfig, ModelConfig, Quantization, ReferenceConfig
from cohort.config.optim import (
    AdafactorConfig,
    Adamw8bitConfig,
    AdamwConfig,
    CustomOptimConfig,
    MuonConfig,
    OptimConfig,
    SgdConfig,
)
from cohort.config.rewards import RewardConfig
from cohort.config.rollout import (
    ENGINES,
    AutoRolloutConfig,
    RolloutConfig,
    SamplingConfig,
    ServersConfig,
    VllmRolloutConfig,
)
from cohort.config.schema import Config, RunConfig, TrainConfig

__all__ = [
    "ALGORITHMS",
    "COMPONENTS",
    "CONFIG_HEADER",
    "ENGINES",
    "AdafactorConfig",
    "Adamw8bitConfig",
    "AdamwConfig",
    "AdapterConfig",
    "AlgorithmConfig",
    "AutoRolloutConfig",
    "Component",
    "Config",
    "CriticConfig",
    "CustomFunction",
    "CustomOptimConfig",
    "EvalConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimConfig",
    "Quantization",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ServersConfig",
    "SgdConfig",
    "TrainConfig",
    "VllmRolloutConfig",
    "config_from_dict",
    "load_config",
    "to_yaml",
]
