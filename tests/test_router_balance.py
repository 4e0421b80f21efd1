"""The loss that balances experts: over the whole step, however it is split, shared, padded or spread over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cohort.config import Config, ModelConfig
from cohort.errors import UserError
from cohort.policy import Policy, find_routers
from cohort.policy.layout import Layout
from cohort.policy.limits import check_router_loss
from families import FAMILIES, make_model, save_folder
from rank_moe import BUDGETS, load, make_engine, naive, sequences, step, switch_loss
from ranks import run_ranks
from tiny import relative_error
