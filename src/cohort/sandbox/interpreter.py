"""What the sandbox may read: an interpreter, its standard library, shared libraries, and packages asked for."""

import atexit
import importlib.metadata
import os
import py_compile
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cohort.errors import UserError

GUEST_SOURCE = Path(__file__).parent / "guest.py"
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64")
_TOOLCHAIN = ("/usr/bin", "/usr/include", "/usr/libexec", "/usr/share", "/usr/sbin", "/etc/alternatives")
_THIRD_PARTY = ("site-packages", "dist-packages")
_NOT_COPIED = (*_THIRD_PARTY, "test", "idlelib", "ensurepip", "config-*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """An interpreter and what it needs."""

    executable: str
    home: str  # prefix of its installation
    guest: str  # the compiled guest program
    readable: tuple[str, ...]  # folders and files, real paths
    hidden: tuple[str, ...]  # folders of installed packages, in them or in the system's libraries
    packages: str | None  # folder of links to the packages asked for
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # that each package asked for should provide

    @property
    def env(self) -> dict[str, str]:
        """Variables that save it from searching for its library, each step of which sandlock examines."""
        return {"PYTHONHOME": self.home}

    def command(self, settings: str) -> list[str]:
        """Return the command that runs the guest program."""
        return [self.executable, "-s", "-P", "-S", "-B", "-X", "utf8", self.guest, settings]


def find_interpreter(packages: Sequence[str], folder: Path) -> Interpreter:
    """Describe the running interpreter without its installed packages, and write the guest program.

    Args:
        packages: names of installed distributions to make importable, with what they require.
        folder: for the guest program and the links; readable by everybody.

    Raises:
        UserError: a package is not installed.
    """
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    prefix, exec_prefix = Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()
    is_whole = executable.is_relative_to(prefix) and library.is_relative_to(prefix)  # else a copy would not start
    if is_whole and not (_verdicts_read(executable) and _verdicts_read(library)):
        prefix, executable, library = _copy_python(prefix, executable, library)
        exec_prefix = prefix
    guest = folder / "guest.pyc"
    py_compile.compile(str(GUEST_SOURCE), cfile=str(guest), dfile="guest.py", doraise=True)
    guest.chmod(0o444)
    readable = [executable, library, guest]
    readable += [path.resolve() for path in (prefix / "lib").glob("libpython*.so*")]
    hidden = [library / name for name in _THIRD_PARTY if (library / name).is_dir()]
    hidden += [path for name in _THIRD_PARTY for path in Path("/usr/lib").glob(f"python3*/{name}")]
    links = None
    if packages:
        links = folder / "packages"
        links.mkdir()
        for name, path in _package_paths(packages).items():
            if _verdicts_read(path):
                (links / name).symlink_to(path)
                readable.append(path)
            else:
                (shutil.copytree if path.is_dir() else shutil.copy)(path, links / name)
        _let_everybody_read(links)
        readable.append(links)
    return Interpreter(
        executable=str(executable),
        home=f"{prefix}:{exec_prefix}",
        guest=str(guest),
        readable=tuple(dict.fromkeys(map(str, readable))),
        hidden=tuple(dict.fromkeys(map(str, hidden))),
        packages=None if links is None else str(links),
        modules={name: _modules(name) for name in packages},
    )


def _verdicts_read(path: Path) -> bool:
    """Whether verdicts can read a file or folder: if this process runs as root, they run under other user ids."""
    if os.geteuid() != 0:
        return True
    wanted = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted and all(parent.stat().st_mode & 0o001 for parent in path.parents)


@cache
def _copy_python(prefix: Path, executable: Path, library: Path) -> tuple[Path, Path, Path]:
    """Copy an interpreter that only root can read, as below /root, until the end of this process.

    Returns:
        prefix, executable and library of the copy.
    """
    target = new_folder()
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    copies = target / executable.relative_to(prefix), target / library.relative_to(prefix)
    shutil.copytree(library, copies[1], ignore=shutil.ignore_patterns(*_NOT_COPIED))
    for source in (executable, *(prefix / "lib").glob("libpython*.so*")):
        copy = target / source.relative_to(prefix)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(source, copy, follow_symlinks=False)
    _let_everybody_read(target)
    return target, *copies


def _let_everybody_read(folder: Path) -> None:
    for path in (folder, *(path for path in folder.rglob("*") if not path.is_symlink())):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def new_folder() -> Path:
    """Create a temporary folder that other users may read."""
    folder = Path(tempfile.mkdtemp(prefix="cohort-sandbox-")).resolve()
    folder.chmod(0o755)
    return folder


def system_libraries(*, toolchain: bool) -> list[Path]:
    """Return the folders of shared libraries; with `toolchain` those of compilers and other programs too."""
    return [Path(p) for p in (*_SYSTEM_LIBRARIES, *(_TOOLCHAIN if toolchain else ())) if Path(p).exists()]


def _package_paths(names: Iterable[str]) -> dict[str, Path]:
    """Return the top-level files and folders of distributions and of what they require."""
    paths: dict[str, Path] = {}
    waiting, seen = list(names), set()
    asked = set(waiting)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in asked:
                raise UserError(f"sandbox.packages: {name!r} is not installed; run `pip install {name}`") from None
            continue  # required on other systems only
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "/") and not top.endswith(".pth"):
                paths[top] = Path(str(distribution.locate_file(top))).resolve()
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
    return paths


def _modules(name: str) -> tuple[str, ...]:
    """Return the top-level modules of a distribution, without private ones and namespaces."""
    found = set()
    for file in importlib.metadata.distribution(name).files or ():
        module = file.parts[0].partition(".")[0]
        is_module = file.name == "__init__.py" if len(file.parts) == 2 else file.suffix in (".py", ".so")
        if len(file.parts) <= 2 and is_module and module.isidentifier() and not module.startswith("_"):
            found.add(module)
    return tuple(sorted(found))
