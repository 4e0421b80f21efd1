"""Find out what an environment of the configuration is: a user's class or function, or an environment of a library."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from cohort.config.rollout import EnvironmentSpec
from cohort.config.user_code import error_location, load_callable
from cohort.errors import UserError, describe_error
from cohort.rollout.environments.child_process import ChildProcess, UserCode
from cohort.rollout.environments.handle import close_instance
from cohort.rollout.environments.tools import Schema
from cohort.sandbox import SharedSandbox

# Libraries by the prefix of `rollout.environment`, as "module:function". The function takes the rest of the name, the
# arguments and the field's name, and returns an `EnvironmentSource`. Those of `_IN_SANDBOX` take `sandbox`, too.
LIBRARIES = {
    name: f"cohort.rollout.environments.libraries.{name}:load"
    for name in ("reasoning_gym", "verifiers", "textarena", "openenv", "skyrl_gym")
}

_IN_SANDBOX = ("reasoning_gym",)

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSource:
    """How to create the instances of an environment."""

    kind: type | None  # class of the instances; None for a function `run(row, model)`
    name: str  # of its reward, unless `kind` is an environment class
    create: Callable[[], Any]  # creates an instance, or returns the function
    rows: Callable[[int, int], Rows] | None = None  # (count, seed) -> rows, if the environment brings its own data
    schemas: tuple[Schema, ...] = ()  # of the tools of a program, if they are known
    has_own_processes: bool = False  # a program that runs in processes of its library, and needs none of the run

    @property
    def is_program(self) -> bool:
        """Whether it is a program, `run(row, model)`, rather than an environment class, which may have a tool `run`."""
        return self.kind is None or (hasattr(self.kind, "run") and not hasattr(self.kind, "reset"))


def find_source(
    spec: EnvironmentSpec, *, field: str, isolate: bool = False, sandbox: SharedSandbox | None = None
) -> EnvironmentSource:
    """Load the class or function of an environment, without creating an instance of a class.

    Args:
        spec: the environment of the configuration.
        field: its key in messages.
        isolate: what a function makes is only made in a child process.
        sandbox: the run's, for libraries that evaluate what the model wrote. Default: one of its own.

    Raises:
        UserError: it cannot be loaded, or `args` do not match its parameters.
    """
    prefix, _, name = spec.use.partition(":")
    if prefix in LIBRARIES:
        module, _, function = LIBRARIES[prefix].partition(":")
        options = {"sandbox": sandbox or SharedSandbox()} if prefix in _IN_SANDBOX else {}
        source: EnvironmentSource = getattr(import_module(module), function)(name, spec.args, field=field, **options)
        return source
    loaded = load_callable(spec.use, field=f"{field}.use")
    if inspect.iscoroutinefunction(loaded):
        if spec.args:
            raise UserError(f"{field}.args: {spec.use!r} is a function `run(row, model)`, which takes no arguments")
        return EnvironmentSource(kind=None, name=loaded.__name__, create=lambda: loaded)
    try:
        inspect.signature(loaded).bind(**spec.args)
    except TypeError as error:
        raise UserError(f"{field}.args: {spec.use!r}: {error}") from error
    except ValueError:
        pass  # no signature, as some classes written in C have
    create = partial(loaded, **spec.args)
    if isinstance(loaded, type):
        kind = loaded
    else:
        kind = _kind_made_in_child(spec, field, loaded) if isolate else _kind_made_by(create, spec.use, field)
    return EnvironmentSource(kind=kind, name=kind.__name__, create=create)


def _kind_made_by(factory: Callable[[], Any], use: str, field: str) -> type:
    """Return the class of what a function makes. One instance is made to learn it, and closed."""
    try:
        instance = factory()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{field}.use: {use!r} raised {describe_error(error)} (at {error_location(error)}); it must return an "
            f"environment, or be `async def run(row, model)`"
        ) from error
    close_instance(instance, use)
    return type(instance)


def _kind_made_in_child(spec: EnvironmentSpec, field: str, factory: Callable[..., Any]) -> type:
    """Return the class of what a function makes, which may crash the process that makes it."""

    async def make() -> Sequence[str]:
        code = UserCode(name=spec.use.rpartition(":")[2], key=field, use=spec.use, args=spec.args)
        child = await ChildProcess.start(code)
        child.close()
        child.join()
        return child.kind

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop
            module, name, file = thread.submit(asyncio.run, make()).result()
    except Exception as error:
        raise UserError(f"{field}.use: {spec.use!r}: {describe_error(error)}") from error
    own = sys.modules.get(factory.__module__)
    try:  # two processes may have different names for one file
        is_own = own is not None and own.__file__ == file
        kind: type = attrgetter(name)(own if is_own else import_module(module))
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{field}.use: {spec.use!r} makes a {name} of {module}, which cannot be found by this name; with "
            f"rollout.isolate, define the class at the top of its module"
        ) from error
    return kind
