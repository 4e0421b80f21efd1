"""Load user functions by file or module, and locate errors in user code."""

import importlib
import importlib.util
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.config.objects import USER_FILE, NamedObject, is_unnamed
from cohort.errors import UserError, describe_error, suggest

_PACKAGE = Path(__file__).parents[1]
_MACHINERY = tuple(
    str(_PACKAGE / name) for name in ("config/user_code.py", "rewards/call.py", "algorithms/custom_functions.py")
)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class _ImportEnded(BaseException):
    """A script that is being imported has come to its call of the trainer."""


_importing: list[str] = []  # files that are being imported, innermost last


def end_import() -> None:
    """End the import of a script that is only loaded for its functions. Called where training starts.

    A script without `if __name__ == "__main__":` would else train again in each process that loads a function of it.
    """
    if _importing:
        raise _ImportEnded


def load_function(use: str, *, field: str) -> Callable[..., Any]:
    """Return the function, or the instance that can be called, named by `use`.

    Args:
        use: `path/to/file.py:name` or `package.module:name`.
        field: name of this setting in messages.

    Raises:
        UserError: no such file, module or name; an import error; or the object is not callable, or a class.
    """
    function = load_callable(use, field=field)
    if isinstance(function, type):
        where, _, name = use.rpartition(":")
        raise UserError(
            f"{field}: {use!r} is a class; name an instance of it that can be called, for example "
            f"`{name.lower()} = {name}()` in {where}"
        )
    return function


def load_callable(use: str, *, field: str) -> Callable[..., Any]:
    """Return the function or class named by `use`. Arguments and errors are those of `load_function`."""
    if isinstance(use, NamedObject):
        return use.value
    if is_unnamed(use):
        raise UserError(f"{field}: {use!r} was a Python object when the run started; run it from Python again")
    where, _, path = use.rpartition(":")
    is_file = where.endswith(".py") or "/" in where
    found: Any = _module_of_file(where, use, field) if is_file else _module(where, use, field)
    for name in path.split("."):
        if not hasattr(found, name):
            public = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n, None))]
            raise UserError(f"{field}: {use!r}: {where} has no {path!r}{suggest(name, public, 'Callable in it')}")
        found = getattr(found, name)
        where = f"{where}:{name}" if ":" not in where else f"{where}.{name}"
    if not callable(found):
        advice = ""
        functions = list(found.values()) if isinstance(found, dict) else found
        if isinstance(functions, list | tuple) and functions and all(map(callable, functions)):
            advice = "; make an entry for each of its functions, which need names of their own"
        raise UserError(f"{field}: {use!r} is not callable, it is {found!r:.200} ({type(found).__name__}){advice}")
    function: Callable[..., Any] = found
    return function


def is_user_code(file: str) -> bool:
    """Whether a file is neither Cohort's nor of an installed package."""
    return not file.startswith(("<", str(_PACKAGE), *_LIBRARIES))


def user_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """Return `file:line` of the innermost frame in user code, else of the innermost frame, else None."""
    own = [frame for frame in frames if not frame.filename.startswith(("<frozen", *_MACHINERY, *_LIBRARIES))]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(own or list(frames))), None)


def error_location(error: BaseException) -> str:
    """Return `file:line` in user code where `error` was raised; for a syntax error, the line that does not parse."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return user_line(traceback.extract_tb(error.__traceback__)) or "an unknown line"


def _module_of_file(path: str, use: str, field: str) -> ModuleType:
    found = Path(path).resolve()
    try:
        found.stat()
    except (FileNotFoundError, NotADirectoryError):
        beside = sorted(file.name for file in found.parent.glob("*.py"))
        raise UserError(
            f"{field}: {use!r}: no such file: {found}{suggest(found.name, beside, 'Files there')}"
        ) from None
    except OSError as error:
        raise UserError(f"{field}: {use!r}: {found}: cannot be read: {error.strerror}") from error
    # Import each file once, so that two functions from one file share its state.
    importable(found.parent)
    module_name = _module_name(found)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, found)
    if spec is None or spec.loader is None:
        raise UserError(f"{field}: {use!r}: {found} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    arguments, sys.argv = sys.argv, [str(found)]  # a file that parses them must not read Cohort's
    _importing.append(module_name)
    try:
        spec.loader.exec_module(module)
    except _ImportEnded:
        pass  # what it defines before is there
    except BaseException as error:
        del sys.modules[module_name]
        raise _import_error(error, use, field) from error
    finally:
        _importing.pop()
        sys.argv = arguments
    return module


def _module_name(file: Path) -> str:
    """Return the file's name, by which other processes can import it, unless another module has that name."""
    importlib.invalidate_caches()  # the file may be new
    try:
        known = importlib.util.find_spec(file.stem)
    except (ImportError, ValueError):
        known = None
    if known is not None and known.origin is not None and Path(known.origin).resolve() == file:
        return file.stem
    return f"{USER_FILE}{file.stem}_{zlib.crc32(str(file).encode()):08x}"


def _module(name: str, use: str, field: str) -> ModuleType:
    importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except BaseException as error:
        # The module itself or a parent package is missing, not something that it imports.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{field}: {use!r}: there is no module {error.name!r} among the installed packages or in the working "
                f"directory {Path.cwd()}; for a file, use path/to/file.py:function"
            ) from error
        raise _import_error(error, use, field) from error


def _import_error(error: BaseException, use: str, field: str) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    advice = ""
    if isinstance(error, SystemExit):
        advice = "; move what only its own command needs, such as parse_args(), below `if __name__ == '__main__':`"
    elif isinstance(error, ImportError) and "relative import" in str(error):
        advice = "; it is part of a package: use package.module:name, from the folder that contains the package"
    return UserError(f"{field}: {use!r} does not import: {describe_error(error)} (at {error_location(error)}){advice}")


def importable(folder: Path) -> None:
    """Append a folder to sys.path: user code can import its neighbors, but they shadow no installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
