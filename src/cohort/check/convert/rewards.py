"""Rewards of other trainers as built-in ones."""

from typing import Any

from cohort.check.launch import Launch, Settings
from cohort.check.rules.keys import key_tables
from cohort.check.tables import load_table

NEEDS_ARGUMENTS = ("trl.cosine", "trl.soft_overlong", "open_r1.soft_overlong", "open_r1.repetition_penalty")
_TABLES = load_table("convert/equivalents/rewards.yaml")


def short_name(name: str) -> str:
    """The name without its module, `get_` and `_reward`."""
    return name.rsplit(".", 1)[-1].removeprefix("get_").removesuffix("_reward").replace("-", "_") or "reward"


def built_in(name: str, launch: Launch, settings: Settings) -> dict[str, Any] | None:
    """The keys `use` and `args` of the built-in reward that is the same; None if there is none.

    Args:
        name: as in the launch file.
        launch: the run.
        settings: its settings; those that are read count as used.
    """
    use = _TABLES[_source(name, launch, settings)].get(short_name(name))
    if use is None:
        return None
    if launch.form == "python":
        prefix = f"trainer.reward_funcs.{name}."
        args = {key.removeprefix(prefix): settings.said(key) for key in launch.settings if key.startswith(prefix)}
    elif use in _TABLES["settings"]:
        args = _open_r1_settings(_TABLES["settings"][use], settings)
    else:
        args = dict(_TABLES["script"].get(use if "." in use else short_name(name), {}))
    return {"use": use, "args": args} if args else {"use": use}


def _source(name: str, launch: Launch, settings: Settings) -> str:
    """Whose reward it is: `open_r1`, `trl` or `others`; a reward of the user's own is in no table."""
    if launch.framework not in ("trl", "open-r1"):
        return "others"
    module = str(settings.said(f"trainer.reward_funcs.{name}") or (name.rpartition(".")[0]))
    if module:
        package = module.partition(".")[0]
        return package if package in ("open_r1", "trl") else "own"
    # TRL's script takes the names of its functions, Open-R1's recipes take short ones.
    is_function = name.startswith("get_") or name.endswith("_reward")
    return "trl" if launch.framework == "trl" and is_function else "open_r1"


def _open_r1_settings(names: dict[str, str], settings: Settings) -> dict[str, Any]:
    known = list(key_tables("open-r1").values())[-1]
    args: dict[str, Any] = {}
    for argument, key in names.items():
        default, kind = known[key]["default"], known[key]["type"]
        if kind == "int":
            args[argument] = settings.whole(key, default, maximum=10**9)
        else:
            args[argument] = settings.number(key, default) if kind == "float" else settings.text(key, default)
    return args
