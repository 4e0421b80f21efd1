"""Cohort's part inside a vLLM server: it takes a trainer's weights and puts them into the model.

vLLM imports this by `--worker-extension-cls`, from a folder of its own, since Cohort itself is not installed there. It
imports torch, numpy, safetensors, vLLM and the module beside it only. An update is staged: names, shapes and dtypes are
compared first, the tensors received next, and the model is changed in the last call, which needs no trainer any more.
So an update that fails before that leaves the weights that served.

The last call either succeeds or ends the process: a model that is part old and part new must not sample.
"""

import json
import mmap
import os
import socket
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from cohort_weight_group import WeightGroup, describe_device, gpu_uuid, result_within
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

logger = init_logger("vllm.cohort")
SPARE_BYTES = 1 << 30  # of GPU memory, to be left free where tensors are staged there
ALIGNED = 64  # bytes at which each tensor begins that is staged in host memory


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where to meet the trainer, or what its ranks lend after they have met."""

    host: str = ""  # of the trainer's store
    port: int = 0
    world_size: int = 1
    timeout_s: float = 0.0  # longest wait for a tensor
    meet_timeout_s: float = 0.0  # longest wait until a way is made and tried
    lent: dict[str, Any] | None = None  # by GPU, how to open the memory of the rank on it


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update."""

    step: str  # declare, receive, load or discard
    specs: list[dict[str, Any]] = field(default_factory=list)  # declare: name, shape and dtype of every tensor
    lent: list[tuple[str, int]] = field(default_factory=list)  # load: names, and where they begin in what is lent


class CohortEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives, compares, and commits."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._timeout_s = 0.0
        self._group: WeightGroup | None = None
        self._lent: Tensor | None = None  # bytes of the trainer's, on this GPU
        self._expected: dict[str, tuple[list[int], bool]] | None = None
        self._num_loaded = 0  # tensors that are in the model already, of an update through lent memory
        self._host = torch.empty(0, dtype=torch.uint8)  # where tensors wait that the GPU has no room for
        self._forget()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainer and agree on a way, in place of the one before; or open what it lends."""
        if init_info.lent is None:
            self.shutdown()
            self._meet(init_info)
        else:
            self._lent = None
            self._lent = open_lent(init_info.lent, self.device)

    def _meet(self, info: InitInfo) -> None:
        self._timeout_s = info.timeout_s
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(info.host, info.port, info.world_size, timeout=timedelta(seconds=info.meet_timeout_s))
        store.set(f"here/{rank}", json.dumps(describe_device(self.device)))
        way = store.get("way").decode()  # the trainer has heard all workers
        if way == "ipc":
            return
        self._group = WeightGroup(
            way,
            store,
            rank=rank,
            size=info.world_size,
            device=torch.device("cpu") if way == "gloo" else self.device,
            host=_own_address(info),
            timeout_s=max(info.timeout_s, info.meet_timeout_s),
        )
        try:
            result_within(self._group.connect(), info.meet_timeout_s, f"making a {way} group with the trainer")
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the group: a trainer that waits in it sees that at once."""
        group, self._group, self._lent = self._group, None, None
        self._forget()
        if group is not None:
            group.abort()

    def start_weight_update(self) -> None:
        """Forget an update that came halfway."""
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One step. As the base class's, but that has every device synchronize, which a CPU cannot."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._num_loaded and self._num_loaded == len(self._specs or ()):
            self._lent = None  # its owner may need the memory now

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """One step. After an error nothing of the update is kept."""
        steps = {"declare": self._declare, "receive": self._receive, "load": self._load, "discard": self._discard}
        try:
            if update_info.step not in steps:
                raise ValueError(f"step: {update_info.step!r} is none of {', '.join(steps)}")
            steps[update_info.step](update_info)
        except BaseException:
            if update_info.step == "receive":
                self.shutdown()  # the trainer, which sends, sees that nobody receives
            self._forget()
            raise

    def finish_weight_update(self) -> None:
        """Put the weights into the model, all of them or, after `discard`, none."""
        if self._discarded:
            return self._forget()
        staged, specs = self._staged, self._specs
        if specs is None or len(staged) + self._num_loaded != len(specs):
            came = len(staged) + self._num_loaded
            raise ValueError(f"{came} tensors came of {len(specs or ())} that were declared; nothing was changed")
        with _no_way_back():
            if staged:
                initialize_layerwise_reload(self.model)
                self.model.load_weights(self._to_device(staged))
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_head(self.model)
        self._num_loaded = 0
        return self._forget()

    def _forget(self) -> None:
        if self._num_loaded:
            _die("an update of weights in lent memory was given up halfway")
        self._specs: list[dict[str, Any]] | None = None
        self._staged: deque[tuple[str, Tensor]] = deque()
        self._discarded = False

    def _declare(self, info: UpdateInfo) -> None:
        if self._expected is None:
            self._expected = expected_tensors(Path(self.model_config.model), self.model_config.hf_text_config)
        check_specs(info.specs, self._expected)
        self._specs = info.specs

    def _receive(self, info: UpdateInfo) -> None:
        """All tensors that were declared, in their order."""
        if self._specs is None or self._group is None:
            raise ValueError("there is no group with the trainer, or no tensors were declared")
        keep = self._keeper(self._specs)
        for spec in self._specs:
            dtype = getattr(torch, spec["dtype"])
            tensor = torch.empty(spec["shape"], dtype=dtype, device=self._group.device)
            result_within(self._group.broadcast(tensor), self._timeout_s, f"receiving {spec['name']}")
            self._staged.append((spec["name"], keep(tensor)))

    def _keeper(self, specs: list[dict[str, Any]]) -> Callable[[Tensor], Tensor]:
        """Where tensors wait for the commit: on the model's device, or in host memory where its GPU has no room."""
        if self.device.type == "cpu":
            return lambda tensor: tensor
        total_bytes = sum(num_bytes(spec) for spec in specs)
        free, _ = torch.cuda.mem_get_info(self.device)
        if free >= total_bytes + SPARE_BYTES:
            return lambda tensor: tensor.to(self.device)
        logger.info("staging %.1f GB of weights in host memory", total_bytes / 1e9)
        starts = [0, *accumulate(-(-num_bytes(spec) // ALIGNED) * ALIGNED for spec in specs)]
        if len(self._host) != starts[-1]:  # pinning it is slow, so it is kept; the last update has been read from it
            self._host = torch.empty(0, dtype=torch.uint8)
            self._host = pinned_bytes(starts[-1], self.device)
        places = (self._host[start:] for start in starts)
        return lambda tensor: next(places)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _to_device(self, staged: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while staged:
            name, tensor = staged.popleft()
            yield name, tensor.to(self.device, non_blocking=True)

    def _load(self, info: UpdateInfo) -> None:
        """Tensors in the memory that is lent, straight into the model.

        It was asleep, so there are no old weights to keep. Never run on a GPU yet.
        """
        specs = {spec["name"]: spec for spec in self._specs or ()}
        if self._lent is None or any(name not in specs for name, _ in info.lent):
            raise ValueError("nothing is lent, or tensors come that were not declared")
        tensors = [(name, lent_tensor(self._lent, specs[name], offset)) for name, offset in info.lent]
        with _no_way_back():
            if not self._num_loaded:
                initialize_layerwise_reload(self.model)
            # a layer that is not whole keeps what came of it; the trainer's memory changes when this call ends
            self.model.load_weights((name, tensor.clone()) for name, tensor in tensors)
            self._num_loaded += len(tensors)

    def _discard(self, info: UpdateInfo) -> None:
        self._lent = None
        self._forget()
        self._discarded = True


class CohortWorker:
    """What `--worker-extension-cls` names. It adds no methods: importing this module has made the engine known."""


def expected_tensors(folder: Path, config: Any) -> dict[str, tuple[list[int], bool]]:
    """The tensors that an update has to bring: shape, and whether it may be left out, by name.

    They are those of the model folder's safetensors files. What a trainer of the language model alone does not have may
    be left out: a head that is tied to the embedding, rotary frequencies, and layers that predict several tokens ahead.

    Raises:
        ValueError: the folder has no such files, so nothing can be compared.
    """
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # where vLLM itself has it from

        folder = Path(snapshot_download(str(folder), local_files_only=True))
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    if not all((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} has no safetensors files to compare an update with")
    num_layers, tied = config.num_hidden_layers, getattr(config, "tie_word_embeddings", False)
    ahead = ("mtp.", *(f"model.layers.{n}." for n in range(num_layers, num_layers + 8)))

    def optional(name: str) -> bool:
        return (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq") or name.startswith(ahead)

    expected = {}
    for file in sorted(names):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                expected[name] = (list(tensors.get_slice(name).get_shape()), optional(name))
    return expected


def check_specs(specs: list[dict[str, Any]], expected: dict[str, tuple[list[int], bool]]) -> None:
    """Compare what a trainer will send with what the server's model was loaded from.

    Raises:
        ValueError: names, shapes or dtypes do not fit; the message names the first few.
    """
    given = {str(spec["name"]): spec for spec in specs}
    wrong = [f"{name} is not in the server's model" for name in given if name not in expected]
    wrong += [f"{n} is missing" for n, (_, optional) in expected.items() if n not in given and not optional]
    for name, spec in given.items():
        if name in expected and list(spec["shape"]) != expected[name][0]:
            wrong.append(f"{name} is {list(spec['shape'])} and has to be {expected[name][0]}")
        if not isinstance(getattr(torch, str(spec["dtype"]), None), torch.dtype):
            wrong.append(f"{name} has the dtype {spec['dtype']!r}, which torch does not know")
    if len(given) < len(specs):
        wrong.append("a name comes twice")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the update does not fit the server's model: {'; '.join(wrong[:3])}{more}")


def num_bytes(spec: dict[str, Any]) -> int:
    """Of a tensor that is declared."""
    return int(torch.Size(spec["shape"]).numel()) * getattr(torch, spec["dtype"]).itemsize


def pinned_bytes(count: int, device: torch.device) -> Tensor:
    """Host memory of exactly this size that the GPU copies from by itself, as the trainer's `policy.pinning` has it.

    PyTorch's allocator of pinned memory rounds up to a power of two.
    """
    whole = np.zeros(count + mmap.PAGESIZE, dtype=np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    found = torch.from_numpy(whole[start : start + count])
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(found.data_ptr(), count, 0))
    if status == 0:
        weakref.finalize(whole, cudart.cudaHostUnregister, found.data_ptr())
    else:
        logger.warning("host memory cannot be pinned (cudaHostRegister: error %d); weights are copied slowly", status)
        with suppress(RuntimeError):  # the driver keeps the error for its next check
            torch.ones(1, device=device)
    return found


def repack_tied_head(model: Any) -> None:
    """Have a head that is tied to the embedding see the new weights.

    On CPU it multiplies with a copy of its own, packed for the product, which a reload leaves as it was.
    """
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "cpu_linear"):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        head.quant_method.process_weights_after_loading(head)


def open_lent(lent: dict[str, Any], device: torch.device) -> Tensor:
    """Open the memory of the training rank on this GPU, from what `lending.handle_of` says of it: bytes, [N].

    Raises:
        ValueError: no rank on this GPU lends any, or what is there is not what it has written.
        RuntimeError: the GPU's driver or the container does not allow it.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    entry = lent.get(gpu_uuid(device))
    if entry is None:
        raise ValueError("no rank lends memory of this GPU")
    handle, counter, event = (bytes.fromhex(entry[key]) for key in ("handle", "ref_counter_handle", "event_handle"))
    opened = rebuild_cuda_tensor(
        Tensor,
        torch.Size([entry["storage_bytes"]]),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device.index,
        handle,
        entry["storage_bytes"],
        entry["storage_offset_bytes"],
        False,
        counter,
        entry["ref_counter_offset"],
        event,
        entry["event_sync_required"],
    )
    probe = bytes.fromhex(entry["probe"])
    if bytes(opened[: len(probe)].tolist()) != probe:
        raise ValueError("the memory that was opened is not the trainer's")
    return opened


def lent_tensor(lent: Tensor, spec: dict[str, Any], offset: int) -> Tensor:
    """A tensor where it lies in the memory that is lent."""
    return lent[offset : offset + num_bytes(spec)].view(getattr(torch, spec["dtype"])).view(spec["shape"])


def _own_address(info: InitInfo) -> str:
    """This machine's address on the network that leads to the trainer."""
    with socket.create_connection((info.host, info.port), timeout=info.timeout_s) as way:
        return str(way.getsockname()[0])


@contextmanager
def _no_way_back() -> Iterator[None]:
    """An error inside ends the process."""
    try:
        yield
    except BaseException as error:
        _die("".join(traceback.format_exception(error)))


def _die(why: str) -> NoReturn:
    logger.error("the model is part old, part new; the server ends: %s", why)
    os._exit(1)


WeightTransferEngineFactory.register_engine("cohort", CohortEngine)
