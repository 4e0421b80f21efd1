"""The version of its framework that a launch is checked against."""

from cohort.check.findings import Finding
from cohort.check.launch import Launch
from cohort.check.rules.keys import Version, parse_version

DEFAULTS = {"trl": "1.16", "open-r1": "0.18.0", "ms-swift": "4.6", "verl": "0.9.1"}  # Open-R1: the TRL that it pins
_KNOWN: dict[str, tuple[str, Version, Version]] = {  # name, and the oldest and newest version whose rules are known
    "trl": ("TRL", (0, 15), (1, 16)),
    "ms-swift": ("ms-swift", (3, 3), (4, 6)),
    "verl": ("verl", (0, 5), (0, 10)),
}


def choose_version(launch: Launch, version: str | None) -> tuple[str, str]:
    """Return the given version, the file's own or the default, and the reason for it."""
    if version is not None:
        return version, "--framework-version"
    if launch.version is not None:
        return str(launch.version.value), launch.version.where
    if launch.framework == "open-r1":
        return DEFAULTS["open-r1"], "what Open-R1 pins"
    return DEFAULTS[launch.framework], "the default; --framework-version chooses another one"


def nearest_version(framework: str, version: Version) -> Version:
    """Return the nearest minor version whose rules are known."""
    _, oldest, newest = _KNOWN[framework]
    return min(max(version[:2], oldest), newest)


def version_findings(framework: str, version: str) -> list[Finding]:
    """Warn about a version whose rules are not known."""
    number = parse_version(version)
    nearest = nearest_version(framework, number)
    if number[:2] == nearest:
        return []
    name = ".".join(map(str, nearest))
    message = f"the rules of {_KNOWN[framework][0]} {version} are not known; using those of {name}, the nearest known"
    return [Finding("CHK020", None, message, (f"--framework-version {name}",))]
