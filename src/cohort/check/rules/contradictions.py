"""Settings that do not go together, from `check/rules/FRAMEWORK.yaml`."""

from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import ANY_SETTING, Settings
from cohort.check.rules.keys import Keys, Version, known_keys, parse_version
from cohort.check.tables import load_table


def contradictions(framework: str, settings: Settings, version: Version) -> list[Finding]:
    """What of the framework's table holds for these settings. What depends on an unreadable value is left out."""
    keys = known_keys(framework, version)
    found = []
    for entry in load_table(f"rules/{framework}.yaml") if settings.readable(*ANY_SETTING) else ():
        when = entry["when"]
        in_version = parse_version(entry["since"]) <= version < parse_version(entry.get("before", "99"))
        if not in_version or not all(_holds(settings, keys, key, when[key]) for key in when):
            continue
        unused = [key for key in entry.get("unused", ()) if _holds(settings, keys, key, "set")]
        found += [Finding("CHK005", key, f"{key} {entry['why']}") for key in unused]
        if "says" in entry:
            key, nearest = entry["key"], tuple(entry.get("nearest", ()))
            text = "these settings do not go together" if len(when) > 1 else f"{key} cannot have this value"
            says = entry["says"].format(value=settings.text(key, keys.get(key, {}).get("default")))
            found.append(Finding(entry.get("code", "CHK008"), key, text, nearest, says=says))
    return found


def _holds(settings: Settings, keys: Keys, key: str, condition: Any) -> bool:
    """Whether a condition of the table holds for a key. One that the version does not know counts as not set."""
    if not settings.readable(key):
        return False
    known = keys.get(key)
    said = settings.said(key) if known else None
    if condition in ("set", "unset"):
        return (said is None or said == "") == (condition == "unset")
    value = said if said is not None else known["default"] if known else None
    values = {str(one).lower() for one in (value if isinstance(value, list) else [value])}
    if isinstance(condition, list):
        return not values.isdisjoint(condition)
    if "above" in condition:
        return any(one.isdecimal() and int(one) > condition["above"] for one in values)
    return values.isdisjoint(condition["not"])
