"""JSON and YAML answers, checked field by field."""

import json
import re

import torch
import yaml

KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


def load_json(text):
    match = re.search(r"```(?:json)?\s*\n(.*?)\n\s*```", text, re.DOTALL)
    try:
        return json.loads(match.group(1) if match else text)
    except json.JSONDecodeError:
        return None


def json_format_reward(completions, schema, **kwargs):
    """The share of required fields that are there and of the right type; a tensor."""
    rewards = []
    for completion, spec in zip(completions, schema, strict=True):
        value = load_json(completion[0]["content"])
        if not isinstance(value, dict):
            rewards.append(-1.0)
            continue
        fields = yaml.safe_load(spec)
        valid = [name in value and isinstance(value[name], KINDS[kind]) for name, kind in fields.items()]
        rewards.append(sum(valid) / len(valid) - 0.1 * len(value.keys() - fields.keys()))
    return torch.tensor(rewards)


def yaml_reward(completions, **kwargs):
    def valid(text):
        try:
            return isinstance(yaml.safe_load(text), dict)
        except yaml.YAMLError:
            return False

    yield from (1 if valid(completion[0]["content"]) else 0 for completion in completions)
