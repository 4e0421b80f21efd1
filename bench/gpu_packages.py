"""The packages that `bench/gpu.sh` needs: whether they are here, and wheels of them for a machine without a network.

    bench/gpu.sh check                                      # also done before every other form; a second or two
    bench/gpu.sh wheels [FOLDER] [--have FILE] [--python 3.12] [--platform x86_64] [--cuda 130]

`check` lists every package that is missing or too old, in one message, and imports none. `wheels` downloads with pip
what the other machine lacks, in the versions of constraints.txt. FILE is what `pip list --format=freeze` prints there;
without it, the machine is taken to have torch, what torch needs, and `ASSUMED`. Standard library and `packaging` only.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

try:
    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:  # pip has a copy
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
COMPARED = ("trl>=1.16", "liger-kernel>=0.8.5", "bitsandbytes>=0.50", "torchao>=0.18", "pytest>=8.3")
# Of images with PyTorch; the first ones take hundreds of megabytes, and torch fits its driver
ASSUMED = ("torch", "triton", "numpy", "pyarrow", "pandas", "scipy", "pip", "setuptools", "sympy", "networkx", "pillow")
MOST_BYTES = 45_000_000  # of all wheels
_NEVER_ENTERED = {"torch"}  # its requirements depend on how it was built
Versions = Mapping[str, str]  # by canonical name; an empty version suits every requirement


def required() -> list[Requirement]:
    """What Cohort itself requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"]]


def unmet(
    wanted: Iterable[Requirement],
    have: Versions,
    needs: Callable[[str], Iterable[Requirement]],
    environment: Mapping[str, str],
) -> dict[str, list[Requirement]]:
    """Return the requirements that are not met, by package; those of packages that are there are looked at too.

    Args:
        wanted: where the search begins.
        have: versions of what is there.
        needs: the requirements of a package that is there.
        environment: of the markers of requirements.
    """
    found: dict[str, list[Requirement]] = {}
    seen: set[str] = set()
    queue = list(wanted)
    while queue:
        requirement = queue.pop(0)
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate(dict(environment))):
            continue
        seen.add(str(requirement))
        if name not in have or (have[name] and not requirement.specifier.contains(have[name], prereleases=True)):
            found.setdefault(name, []).append(requirement)
        elif name not in _NEVER_ENTERED:
            for extra in extras:
                for needed in needs(name):
                    if needed.marker is None or needed.marker.evaluate({**environment, "extra": extra}):
                        needed.marker = None
                        queue.append(needed)
    return found


def problems(wanted: Sequence[Requirement]) -> tuple[list[str], list[str]]:
    """What is wrong in this environment, a line each.

    Returns:
        What is missing or does not suit `wanted` itself; and versions that only do not suit other packages, which may
        work all the same.
    """
    have: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():  # in the order of sys.path: the first one counts
        have.setdefault(canonicalize_name(distribution.metadata["Name"] or ""), distribution.version)

    def needs(name: str) -> list[Requirement]:
        return [Requirement(text) for text in importlib.metadata.requires(name) or ()]

    wrong, doubtful = [], []
    own = {canonicalize_name(requirement.name) for requirement in wanted}
    for name, requirements in unmet(wanted, have, needs, {**default_environment(), "extra": ""}).items():
        specifiers = ", ".join(sorted({str(requirement.specifier) for requirement in requirements}))
        if name not in have:
            wrong.append(f"{name}{requirements[0].specifier} is missing")
        else:
            (wrong if name in own else doubtful).append(f"{name} {have[name]} is here, but must be {specifiers}")
    return wrong, doubtful


def check() -> None:
    """Say what is not here.

    Raises:
        SystemExit: something without which nothing runs.
    """
    for text in COMPARED:
        if lines := problems([Requirement(text)])[0]:
            print(f"not compared with: {'; '.join(lines)}", flush=True)
    wrong, doubtful = problems(required())
    for line in doubtful:
        print(f"may not work: {line}", flush=True)
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise SystemExit(
            f"{sys.executable} cannot run Cohort, and nothing was measured:\n{listed}\n"
            "Install them there, or carry them: bench/gpu.sh wheels (docs/gpu.md)"
        )


def collect(folder: Path, have: Versions, *, python: str, platform: str, cuda: str) -> list[Path]:
    """Download wheels of everything that a machine lacks, level by level.

    Args:
        folder: for the wheels.
        have: versions of what is there.
        python: version of its Python.
        platform: its processor, as in the names of wheels.
        cuda: of its torch, without a point: the one version that bitsandbytes keeps.

    Raises:
        SystemExit: the folder has wheels, or pip cannot download something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.whl")):
        raise SystemExit(f"{folder} has wheels already; give a new folder")
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": platform, "extra": ""}
    there = dict(have)
    required_by: dict[str, list[Requirement]] = {}  # of what has been downloaded
    roots = [*required(), *map(Requirement, COMPARED)]
    while missing := unmet(roots, there, lambda name: required_by.get(name, []), environment):
        texts = [str(requirements[0]).partition(";")[0] for requirements in missing.values()]
        before = set(folder.glob("*.whl"))
        _download(texts, folder, python=python, platform=platform)
        for wheel in set(folder.glob("*.whl")) - before:
            name, version, needed = _metadata(wheel)
            there[name], required_by[name] = version, needed
        if stuck := [name for name in missing if name not in required_by]:
            raise SystemExit(f"pip downloaded nothing for {', '.join(stuck)}")
    for wheel in folder.glob("bitsandbytes-*.whl"):
        _keep_one_library(wheel, f"libbitsandbytes_cuda{cuda}.so")
    return sorted(folder.glob("*.whl"))


def _download(texts: list[str], folder: Path, *, python: str, platform: str) -> None:
    platforms = [f"manylinux_2_{minor}_{platform}" for minor in range(39, 16, -1)]
    platforms += [f"manylinux2014_{platform}", f"manylinux2010_{platform}", f"manylinux1_{platform}"]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [part for name in platforms for part in ("--platform", name)]
    if subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), *texts]).returncode:
        raise SystemExit(f"pip cannot download {', '.join(texts)} for Python {python} on {platform}")


def _metadata(wheel: Path) -> tuple[str, str, list[Requirement]]:
    """Name, version and requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(file).decode(), headersonly=True)
    needed = [Requirement(text) for text in fields.get_all("Requires-Dist") or ()]
    return canonicalize_name(fields["Name"]), fields["Version"], needed


def _keep_one_library(wheel: Path, library: str) -> None:
    """Rewrite the wheel of bitsandbytes with its library for one version of CUDA, a tenth of its size."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    libraries = [name for name in files if name.rpartition("/")[2].startswith("libbitsandbytes_") and ".so" in name]
    left_out = [name for name in libraries if not name.endswith(("/" + library, "/libbitsandbytes_cpu.so"))]
    if not any(name.endswith("/" + library) for name in libraries):
        raise SystemExit(f"--cuda: {wheel.name} has no {library}, only {', '.join(sorted(libraries))}")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if name.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if line.partition(",")[0] not in left_out).encode()
            if name not in left_out:
                archive.writestr(name, content)


def read_versions(file: Path) -> dict[str, str]:
    """What `pip list --format=freeze` or `pip freeze` has printed; a line may be a name alone."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    pairs = [line.replace(" @ ", "==@").partition("==") for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(name): "" if version.startswith("@") else version for name, _, version in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: Any = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    wheels = commands.add_parser("wheels")
    wheels.add_argument("folder", type=Path, nargs="?", default=Path("gpu-wheels"))
    wheels.add_argument("--have", type=Path, help="what `pip list --format=freeze` prints on the other machine")
    wheels.add_argument("--python", default="3.12", help="its version of Python")
    wheels.add_argument("--platform", default="x86_64", help="its processor")
    wheels.add_argument("--cuda", default="130", help="version of CUDA of its torch, without the point")
    args = parser.parse_args()
    if args.command == "check":
        check()
        return
    have = read_versions(args.have) if args.have else dict.fromkeys(ASSUMED, "")
    found = collect(args.folder, have, python=args.python, platform=args.platform, cuda=args.cuda)
    total = sum(wheel.stat().st_size for wheel in found)
    for wheel in found:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}")
    print(f"{total / 1e6:6.1f} MB  {args.folder}: {len(found)} wheels for Python {args.python}; there:")
    print(f"  python3 -m pip install --no-index --no-deps --target site {args.folder}/*.whl")
    print('  PYTHONPATH="$PWD/site" bench/gpu.sh quick')
    if total > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES / 1e6:.0f} MB: name what the machine has with --have")


if __name__ == "__main__":
    main()
