"""The script of child processes: runs `main` of a module, the first argument.

Packages on the way to the module do not import their parts before a name of theirs is used, which takes longer than
everything else that a child imports.
"""

import importlib
import sys
import threading
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_PACKAGES = ("cohort.config", "cohort.rewards", "cohort.rollout")
_lock = threading.RLock()
_executing: set[str] = set()


class _Package(ModuleType):
    """A package whose `__init__` runs when a name is not found."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        with _lock:  # user code may have threads
            if self.__name__ in _executing:  # by this thread
                raise AttributeError(name)
            if type(self) is _Package:
                _executing.add(self.__name__)
                self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                _executing.remove(self.__name__)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(self, name)


if __name__ == "__main__":
    for _name in _PACKAGES:
        _package = module_from_spec(find_spec(_name))  # type: ignore[arg-type]
        _package.__class__ = _Package
        sys.modules[_name] = _package
        setattr(sys.modules["cohort"], _name.removeprefix("cohort."), _package)
    importlib.import_module(sys.argv.pop(1)).main()
