"""Device `cuda` without a GPU: its tensors have a shape, a dtype and no numbers; those of the host are real.

Whatever mixes the two, or two devices, fails as it does on GPUs. What crosses between them is counted, because the host
waits for most of it. A number that is read from the device is 1, unless a test says what it is.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

import cohort

NUM_DEVICES = 2  # fake_cuda.cpp says the same
_SOURCE = Path(__file__).with_suffix(".cpp")
_PACKAGE = Path(cohort.__file__).parent
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Something that goes from the host to the device, or comes from it.

    A copy that is asked for without waiting counts as such from memory that is not pinned too: the driver stages it.
    """

    way: Literal["in", "out", "read"]  # a copy to the device, a copy from it, a number
    waits: bool  # the host, until the device is done with all that it was told before
    where: str  # file and function of the package
    num_bytes: int


@dataclass(slots=True)
class FakeCuda:
    """What a test sees of the device."""

    index: int  # of the current device
    crossings: list[Crossing] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)  # host memory that is pinned: address, bytes
    launches: Counter[str] = field(default_factory=Counter)  # of Triton's kernels, by name

    def waits(self) -> dict[str, int]:
        """How often the host has waited for the device, by place, and forget it."""
        counts = Counter(c.where for c in self.crossings if c.waits)
        self.crossings.clear()
        return dict(counts)


@contextmanager
def fake_cuda(
    *,
    index: int = 0,
    answers: Mapping[str, float | Iterator[float]] | None = None,
    nothing_found: Set[str] = frozenset(),
    capability: tuple[int, int] = (8, 0),
) -> Iterator[FakeCuda]:
    """A machine with two GPUs inside.

    Args:
        index: of the current one.
        answers: what the device's numbers are where a file of the package reads them, by its name: all the same, or one
            after the other.
        nothing_found: files where no element of a mask is true; elsewhere all are.
        capability: of the GPUs.
    """
    library = _library()
    device = FakeCuda(index)
    with ExitStack() as stack:
        stack.callback(_forget_what_torch_compile_has_seen)
        library.install()
        stack.callback(library.uninstall)
        for target, name, value in _patches(device, capability):
            stack.enter_context(patch.object(target, name, value))
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host and copied
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        # backward in this thread: whether threads for devices exist was settled by the process's first backward pass
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Mode(device, answers or {}, nothing_found))
        yield device


def _forget_what_torch_compile_has_seen() -> None:
    """Functions that it gave up on inside of the fake machine would not be compiled outside either."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@cache
def _library() -> ctypes.CDLL:
    """The compiled guard, kept from run to run. The test is skipped where it cannot be compiled."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of PyTorch has CUDA, whose guard would be replaced")
    compiler = shutil.which(get_cxx_compiler())
    if compiler is None:
        pytest.skip(f"there is no C++ compiler ({get_cxx_compiler()}) to build a device guard with")
    digest = sha256(_SOURCE.read_bytes() + f"{torch.__version__} {compiler}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohort-tests"
    built = folder / f"fake_cuda-{digest}.so"
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "made.so"
            options = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
            command = [compiler, "-shared", "-fPIC", "-std=c++20", "-w", *options, str(_SOURCE), "-o", str(made)]
            command += ["-lc10", "-ltorch_cpu"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"the device guard cannot be compiled: {done.stderr.strip()[-500:]}")
            made.replace(built)  # at once: other workers build it too
    torch.ones(1, requires_grad=True).sum().backward()  # autograd starts its threads now, and none for the devices
    return ctypes.CDLL(str(built))


class _Mode(TorchDispatchMode):
    """Operations without a tensor of the device run as ever; all others on fake tensors."""

    def __init__(self, device: FakeCuda, answers: Mapping[str, float | Iterator[float]], nothing_found: Set[str]):
        super().__init__()
        self._device = device
        self._answers = answers
        self._nothing_found = nothing_found
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: WeakSet[Any] = WeakSet()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "cuda"
        if not to_device and not any(isinstance(x, FakeTensor) for x in tensors):
            return self._on_host(func, args, kwargs)
        if to_device:
            index = torch.device(target).index
            kwargs = {**kwargs, "device": torch.device("cuda", self._device.index if index is None else index)}
        match func:
            case _aten._local_scalar_dense.default:
                self._note("read", waits=True, tensor=args[0])
                return _python_type(args[0].dtype)(self._answer())
            case _aten.nonzero.default:
                found = self._found(args[0])
                return self._run(_aten.new_empty.default, found, [len(found), args[0].ndim])
            case _aten.index.Tensor | _aten.index_put_.default if any(_is_mask(x) for x in args[1]):
                indices = [self._found(x) if _is_mask(x) else x for x in args[1]]
                return self._run(func, args[0], indices, *args[2:], **kwargs)
            case _aten.add.Tensor | _aten.add_.Tensor if getattr(args[1], "is_sparse", False):
                dense = args[0] if func is _aten.add_.Tensor else self._run(_aten.empty_like.default, args[0])
                self._run(_aten.index_add_.default, dense, 0, args[1]._indices()[0], args[1]._values())
                return dense
            case _aten._to_copy.default if not to_device and target is not None:
                self._note("out", waits=not kwargs.get("non_blocking"), tensor=args[0])
                like = self._run(func, *args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
                return torch.full(like.shape, self._answer(), dtype=like.dtype)
            case _aten.copy_.default if not isinstance(args[0], FakeTensor):
                self._note("out", waits=not (args[2:] and args[2] and self._is_pinned(args[0])), tensor=args[1])
                return args[0].fill_(self._answer())
        for x in tensors:
            if x.device.type == "cpu" and (x.ndim or func in _COPIES):  # a number by itself goes in as an argument
                later = func in _COPIES and (kwargs.get("non_blocking") or args[2:3] == (True,))
                self._note("in", waits=not later, tensor=x)
        return self._run(func, *args, **kwargs)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        # the mode remembers tensors by weak references, and what has one cannot be swapped: of a real tensor an alias
        # goes in, and what came out is forgotten
        args, kwargs = pytree.tree_map(_alias, (args, kwargs))
        with self._fake:
            out = func(*args, **kwargs)
        self._fake.fake_tensor_converter.tensor_memo.clear()
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Memory is pinned by name only."""
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        pins = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        out = args[0].clone() if func is _aten._pin_memory.default else func(*args, **kwargs)
        if pins or func is _aten._pin_memory.default:
            self._pinned.add(out.untyped_storage())
        return out

    def _is_pinned(self, tensor: Tensor) -> bool:
        ranges = self._device.registered.items()
        return any(tensor.untyped_storage()._cdata == storage._cdata for storage in self._pinned) or any(
            start <= tensor.data_ptr() < start + size for start, size in ranges
        )

    def _found(self, mask: Tensor) -> Tensor:
        """Numbers of the elements that are not 0. How many there are the host has to know."""
        self._note("read", waits=True, tensor=mask)
        count = 0 if _file() in self._nothing_found else mask.numel()
        return self._run(_aten.new_empty.default, mask, [count], dtype=torch.int64)

    def _answer(self) -> float:
        answer = self._answers.get(_file(), 1)
        return next(answer) if isinstance(answer, Iterator) else answer

    def _note(self, way: Any, *, waits: bool, tensor: Tensor) -> None:
        self._device.crossings.append(Crossing(way, waits, _place(), tensor.nbytes))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x


def _place() -> str:
    """File and function of the package that runs now, as "learner/train_engine.py: TrainEngine.optim_step"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}: {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "tests"


def _file() -> str:
    return _place().partition(":")[0]


def _python_type(dtype: torch.dtype) -> Callable[[float], Any]:
    return bool if dtype == torch.bool else float if dtype.is_floating_point else int


def _patches(device: FakeCuda, capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """What stands in for the runtime's functions: (object, name, value)."""

    def set_device(to: Any) -> None:
        device.index = torch.cuda._utils._get_device_index(to)  # refuses a device without an index, as CUDA's does

    def synchronize(of: Any = None) -> None:
        device.crossings.append(Crossing("read", True, _place(), 0))

    class Stream:
        """Nothing runs, so that streams and their events have nothing to keep in order."""

        def __init__(self, device: Any = None):
            self.device = device

        def wait_stream(self, other: "Stream") -> None: ...

        def wait_event(self, event: "Stream") -> None: ...

        def record_event(self) -> "Stream":
            return self

        def synchronize(self) -> None:
            synchronize()

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        for x in args:
            assert not isinstance(x, Tensor) or (x.is_cuda and x.device.index == device.index), (kernel, x.device)
        device.launches[kernel.fn.__name__] += 1

    def register(address: int, num_bytes: int, flags: int) -> int:
        device.registered[address] = num_bytes
        return 0

    properties = SimpleNamespace(
        name="fake", total_memory=80 << 30, major=capability[0], minor=capability[1], multi_processor_count=108
    )
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: device.index,
        "set_device": set_device,
        "get_device_capability": lambda of=None: capability,
        "get_device_properties": lambda of=None: properties,
        "synchronize": synchronize,
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda of=None: 1 << 30,
        "max_memory_allocated": lambda of=None: 1 << 30,
        "max_memory_reserved": lambda of=None: 2 << 30,
        "reset_peak_memory_stats": lambda of=None: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=device.registered.pop),
        "mem_get_info": lambda of=None: (80 << 30, 80 << 30),
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda of=None: Stream(of),
    }
    for name, value in functions.items():
        yield torch.cuda, name, value
    yield Tensor, "record_stream", lambda tensor, stream: None  # takes no stream but its own
    yield FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()  # one copy, and not one for each element
    yield fake_tensor, "init_gpu_context", lambda of: None
    yield FakeTensorMode, "avoid_device_init", True
    try:
        from triton.runtime import JITFunction
    except ImportError:
        return
    yield JITFunction, "run", launch
