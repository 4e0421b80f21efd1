"""What the rules of frameworks share: verdicts, versions, keys, contradictions, GPUs."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cohort_check.findings import Finding, load_table
from cohort_check.launch import ANY_SETTING, Launch, Settings, parse_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the framework does with one number of training processes."""

    starts: bool
    message: str | None = None  # the framework's own, where it refuses
    generation_batch_size: int | None = None  # completions that are sampled together
    steps_per_generation: int | None = None  # micro-steps that one such batch is trained in
    global_batch_size: int | None = None  # completions of one optimizer step
    prompts: int | None = None  # different prompts of one generation batch
    field: str | None = None  # the key that a refusal is about, where it is not the usual one

    def as_json(self) -> dict[str, Any]:
        """The verdict as `--json` prints it."""
        keys = ("starts", "message", "generation_batch_size", "steps_per_generation")
        return {key: getattr(self, key) for key in keys}


def refused(message: str, **numbers: Any) -> Start:
    """The framework stops with this message."""
    return Start(starts=False, message=message, **numbers)


FRAMEWORKS: Mapping[str, Mapping[str, Any]] = load_table("rules/frameworks.yaml")
# keys that only evaluation depends on: training is checked without them
EVALUATION = frozenset(FRAMEWORKS["trl"]["evaluation"])
BatchSizes = Mapping[str, int]  # the numbers that decide whether a run starts, by the framework's own names


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """What the rules of a framework say about one launch."""

    version: str
    version_reason: str
    sizes: BatchSizes
    decides: frozenset[str]  # every key that the verdict depends on, said or not
    start: Callable[[int, BatchSizes], Start]  # for a number of processes and these sizes
    usual_field: str | None = "num_generations"  # the key that a refusal is about
    sampling: str  # where completions are sampled, in words
    findings: tuple[Finding, ...] = ()
    blocked: str | None = None  # message of a contradiction (also a finding) that stops the run for any numbers
    foreign: str | None = None  # why the program is not the framework's own, so that none of this holds


def divisors(*factors: int, smallest: int = 2) -> list[int]:
    """All divisors of a product from `smallest` on, sorted. Factors are taken apart singly: products may be large."""
    found = {1}
    for factor in factors:
        own = {part for n in range(1, math.isqrt(factor) + 1) if factor % n == 0 for part in (n, factor // n)}
        found = {a * b for a in found for b in own}
    return sorted(number for number in found if number >= smallest)


Version = tuple[int, ...]
Keys = Mapping[str, Mapping[str, Any]]  # by key: type or choices, default, and the class that has it (`of`)


def parse_version(text: str) -> Version:
    """`0.18.0` as (0, 18, 0); anything that is not a number (`1.2.dev0`) ends it."""
    parts: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


@lru_cache
def key_tables(framework: str) -> Mapping[Version, Keys]:
    """All keys of every version in the table, oldest first."""
    tables: dict[Version, Keys] = {}
    if framework == "unsloth":  # TRL with fields and defaults of its own
        own = load_table("keys/unsloth.yaml")
        for version, keys in key_tables("trl").items():
            changed = {key: {**keys[key], "default": new} for key, new in own["defaults"].items() if key in keys}
            tables[version] = {**keys, **changed, **{key: {"default": None, "of": "Unsloth"} for key in own["adds"]}}
        return tables
    keys = {}
    for name, table in load_table(f"keys/{framework}.json")["versions"].items():
        added, removed = (table.get(part, {}) for part in ("added", "removed")) if tables else (table, ())
        changed = table.get("changed", {}) if tables else {}
        keys = {key: value for key, value in {**keys, **added, **changed}.items() if key not in removed}
        tables[parse_version(name)] = keys
    return tables


def known_keys(framework: str, version: Version) -> Keys:
    """The keys of a version, or of the newest minor version in the table that is not newer, or of the oldest."""
    tables = key_tables(framework)
    if version in tables:
        return tables[version]
    return tables[max((known for known in tables if known[:2] <= version[:2]), default=min(tables))]


def keys_of(framework: str) -> str:
    """The table of keys that a framework's configuration has; Open-R1's own are those of its script besides."""
    return "trl" if framework == "open-r1" else framework


def unknown_key(framework: str, version: Version, key: str, known: Keys, new: str = "") -> tuple[str, tuple[str, ...]]:
    """Describe a key that a version lacks, and return the known one that it should be (`new`, if that is known)."""
    text = f"{'TRL' if framework == 'trl' else framework} {'.'.join(map(str, version))} does not know {key}"
    if new in known:
        return f"{text}, which is called {new} now", (new,)
    having = [".".join(map(str, other)) for other, keys in key_tables(framework).items() if key in keys]
    history = f", which is there from {having[0]} to {having[-1]}" if having else ""
    return text + history, tuple(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85))


OF_THE_TRAINER = frozenset(FRAMEWORKS["trl"]["read_of_trainer"])  # that could not be read
FRAMEWORK_NAMES: dict[str, str] = {key: entry["name"] for key, entry in FRAMEWORKS.items()}
# the framework whose versions and rules count
WRAPS: dict[str, str] = {key: entry["wraps"] for key, entry in FRAMEWORKS.items() if "wraps" in entry}


def choose_version(launch: Launch, version: str | None) -> tuple[str, str]:
    """Return a version and the reason for it.

    It is the given one, the one that the file or its surroundings pin, or the default: the newest or, if that does not
    know all keys, the newest that does. A minor version (0.7) stands for its newest release.
    """
    framework = WRAPS.get(launch.framework, launch.framework)
    if version is not None:
        return _newest_release(framework, version), "--framework-version"
    pinned = launch.version
    if pinned is not None and pinned.added != "<":
        return _newest_release(framework, str(pinned.value)), pinned.where
    default = FRAMEWORKS[launch.framework]["default"]
    tables = key_tables(framework)
    reason = FRAMEWORKS[launch.framework].get("why", "the default; --framework-version chooses another one")
    if pinned is not None:  # as the newest one that may be
        tables = {number: table for number, table in tables.items() if number <= parse_version(pinned.value)}
        default, reason = min((default, reason), (pinned.value, pinned.where), key=lambda one: parse_version(one[0]))
    keys = {key for key, said in launch.settings.items() if not said.added}
    if framework == "verl":
        keys |= _signs(launch)
    elif launch.form == "python":  # whatever their values are
        keys |= {entry.key for entry in launch.unread if not entry.added and entry.key not in OF_THE_TRAINER}
    has = {number: {key for key in keys if is_in(key, table)} for number, table in tables.items()}
    known = set().union(*has.values())  # what no version knows says nothing about versions
    number = parse_version(_newest_release(framework, default))
    newer = sorted(known - {key for key in keys if is_in(key, known_keys(framework, number))})
    fitting = [number for number, found in has.items() if found == known]
    if not newer or not fitting:
        return default, reason
    name = FRAMEWORKS[framework]["name"]
    first, last = (".".join(map(str, each)) for each in (fitting[0], fitting[-1]))
    which = f"{last}, the version that knows" if first == last else f"{first} to {last}, the versions that know"
    shown = ", ".join(newer[:3]) + (f" and {len(newer) - 3} more" if len(newer) > 3 else "")
    return last, f"judged as {name} {which} {shown}; {name} {default} does not"


VERL, ENGINE = "verl.trainer.main_ppo", "actor_rollout_ref.rollout.name"


def _signs(launch: Launch) -> set[str]:
    """`+key`, which a version of verl refuses that has the key, and `no KEY` if none says which engine samples."""
    signs = {f"+{key}" for key, said in launch.settings.items() if said.added == "+"}
    said = launch.settings.keys() | {entry.key for entry in launch.unread}
    needs = launch.program == VERL and not said & {ENGINE, "(arguments)", *ANY_SETTING}
    return {*signs, f"no {ENGINE}"} if needs else signs


def is_in(key: str, table: Keys) -> bool:
    """Whether a version has a key, as a section too, or fits a sign of `_signs`."""
    if key.startswith("no "):
        return "required" not in table[ENGINE]
    if key.startswith("+"):
        return table.get(key[1:], {}).get("default") is None
    return key in table or any(name.startswith(f"{key}.") for name in table)


def _newest_release(framework: str, version: str) -> str:
    """The newest release of a minor version, such as 0.7.1 for 0.7; any other version as it is."""
    number = parse_version(version)
    found = [table for table in key_tables(framework) if table[:2] == number]
    return ".".join(map(str, found[-1])) if found else version


def nearest_version(framework: str, version: Version) -> Version:
    """Return the nearest minor version whose rules are known."""
    oldest, newest = map(parse_version, FRAMEWORKS[framework]["rules"])
    return min(max(version[:2], oldest), newest)


def version_findings(framework: str, version: str) -> list[Finding]:
    """Warn about a version whose rules are not known."""
    number = parse_version(version)
    nearest = nearest_version(framework, number)
    if number[:2] == nearest:
        return []
    name, known = FRAMEWORKS[framework]["name"], ".".join(map(str, nearest))
    message = f"the rules of {name} {version} are not known; using those of {known}, the nearest known"
    return [Finding("CHK020", None, message, (f"--framework-version {known}",))]


GPUS = "GPUs"  # the name of the number of processes in a proposal
_LARGEST = 64  # of small counts that are tried; others go up to 4 times what is there
_MOST_TRIED = 512  # values on each side of a large number


def nearest_starts(
    start: Callable[[int, BatchSizes], Start], world_size: int, sizes: Mapping[str, int], *, limit: int = 6
) -> tuple[tuple[str, int], ...]:
    """Changes of one number, (name, value), that make a run start, sorted by the distance |log2(new / old)|.

    Each number is changed to the nearest value below and above that starts, so that the proposals name batch sizes,
    accumulation, generations and GPUs, and not the same one over and over.
    """
    current = {GPUS: world_size, **sizes}

    def starts(name: str, value: int) -> bool:
        values = {**current, name: value}
        result = start(values.pop(GPUS), values)
        return result.starts and result.steps_per_generation != 0

    proposals = []
    for name, old in current.items():
        lowest = 2 if name in ("num_generations", "actor_rollout_ref.rollout.n") else 1
        highest = max(_LARGEST, min(4 * old, old + _MOST_TRIED))
        for side in (range(old - 1, max(lowest, old - _MOST_TRIED) - 1, -1), range(max(old + 1, lowest), highest + 1)):
            value = next((value for value in side if starts(name, value)), None)
            if value is not None:
                proposals.append((name, value))
    return tuple(sorted(proposals, key=lambda new: abs(math.log2(new[1] / max(current[new[0]], 1))))[:limit])


def contradictions(framework: str, settings: Settings, version: Version) -> list[Finding]:
    """What of the framework's table holds for these settings. What depends on an unreadable value is left out."""
    keys = known_keys(keys_of(settings.framework), version)
    found = []
    for entry in load_table(f"rules/{framework}.yaml") if settings.readable(*ANY_SETTING) else ():
        when = entry["when"]
        in_version = parse_version(entry["since"]) <= version < parse_version(entry.get("before", "99"))
        if not in_version or not all(_holds(settings, keys, key, when[key]) for key in when):
            continue
        unused = [key for key in entry.get("unused", ()) if _holds(settings, keys, key, "set")]
        usual = "these settings do not go together" if len(when) > 1 else "{key} cannot have this value"
        for key in unused if "unused" in entry else [entry["key"]]:
            value = settings.text(key, keys.get(key, {}).get("default"))
            texts = (entry.get("why", usual), entry.get("says", ""), *entry.get("nearest", ()))
            message, says, *nearest = (text.format(key=key, value=value) for text in texts)
            first = entry.get("later", {}).get(value)
            message += f"; {FRAMEWORKS[framework]['name']} has it from {first} on" if first else ""
            code = entry.get("code", "CHK005" if "unused" in entry else "CHK008")
            found.append(Finding(code, key, message, tuple(nearest), says=says or None))
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
    if "not" in condition:
        return values.isdisjoint(condition["not"])
    numbers = [number for number in map(parse_number, values) if not isinstance(number, str)]
    least, most = condition.get("above", -math.inf), condition.get("most", math.inf)
    return any(least < number <= most for number in numbers)


SAMPLING: Mapping[str, str] = load_table("rules/sampling.yaml")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_findings(launch: Launch, *, local_server: bool, takes_one_for_vllm: bool = False) -> list[Finding]:
    """Overlap and idle GPUs.

    `local_server`: a server on this machine samples. One on another machine has GPUs of the same numbers.
    `takes_one_for_vllm`: the trainer itself takes the GPU after its processes for vLLM (TRL before 0.16).
    """
    gpus, per_node, of_server = launch.training_gpus or (), launch.processes_per_node, launch.server_gpus or ()
    found: list[Finding] = []
    used = per_node + takes_one_for_vllm if gpus and per_node is not None else len(gpus)
    what = f"{per_node} processes" + (" and one GPU for vLLM" if takes_one_for_vllm else "")
    fitting = len(gpus) - takes_one_for_vllm
    nearest = (f"{fitting} processes",) if fitting else ()
    idle = [gpu for gpu in gpus[used:] if gpu not in of_server]
    if used > len(gpus):
        text = f"{what} need {used} GPUs, and {_VISIBLE} names {len(gpus)} ({', '.join(gpus)})"
        found.append(Finding("CHK012", _VISIBLE, text, nearest))
    elif idle and (of_server or not local_server):
        text = f"{what} leave GPU {', '.join(idle)} of {len(gpus)} visible ones without work"
        found.append(Finding("CHK011", _VISIBLE, text, nearest))
    if both := [gpu for gpu in gpus if gpu in of_server and local_server]:
        text = f"GPU {', '.join(both)} is given to training and to the sampling server"
        free = ",".join(gpu for gpu in gpus if gpu not in both)
        found.append(Finding("CHK012", _VISIBLE, text, (f"{_VISIBLE}={free} for training",) if free else ()))
    return found


def is_server_local(settings: Settings) -> bool:
    """Whether the sampling server of TRL or ms-swift is on this machine; not if its address could not be read."""
    keys = ("vllm_server_base_url", "vllm_server_host")
    host = str(settings.said(keys[0]) or settings.said(keys[1]) or "localhost")
    return settings.readable(*keys) and any(name in host for name in ("0.0.0.0", "127.0.0.1", "localhost"))


def counted(number: int, noun: str = "process") -> str:
    """Return the count with its noun: `1 process`, `8 processes`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")
