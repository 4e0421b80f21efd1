"""Cohort's part inside a vLLM server: it takes a trainer's weights and puts them into the model.

vLLM imports this by `--worker-extension-cls`, from a folder of its own, since Cohort itself is not installed there. It
imports torch, safetensors and vLLM only. An update is staged: names, shapes and dtypes are compared first, the tensors
received next, and the model is changed in the last call, which needs no trainer any more. So an update that fails
before that leaves the weights that served.

The last call either succeeds or ends the process: a model that is part old and part new must not sample.
"""

import json
import os
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
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


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How the weights come: "gloo" and "nccl" are process groups with the trainer as rank 0, "ipc" memory it shares."""

    way: str
    timeout_s: float
    host: str = ""  # of the trainer's store
    port: int = 0
    world_size: int = 1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update."""

    step: str  # declare, receive, load or discard
    specs: list[dict[str, Any]] = field(default_factory=list)  # declare: name, shape and dtype of every tensor
    shared: list[dict[str, Any]] = field(default_factory=list)  # load: memory of the trainer's on this GPU


class CohortEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives, compares, and commits."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._way = ""
        self._timeout = timedelta()
        self._group: Any = None
        self._expected: dict[str, tuple[list[int], bool]] | None = None
        self._num_loaded = 0  # tensors that are in the model already, of an update through shared memory
        self._forget()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, in place of the one before."""
        self.shutdown()
        self._way = init_info.way
        self._timeout = timedelta(seconds=init_info.timeout_s)
        if init_info.way == "ipc":
            return
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.host, init_info.port, init_info.world_size, timeout=self._timeout)
        store.set(f"here/{rank}", "")  # the trainer waits for this before it waits in the group
        options: Any
        if init_info.way == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(init_info))]
            self._group = dist.ProcessGroupGloo(store, rank, init_info.world_size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            torch.cuda.set_device(self.device)
            self._group = dist.ProcessGroupNCCL(store, rank, init_info.world_size, options)

    def shutdown(self) -> None:
        """Leave the group: a trainer that waits in it sees that at once."""
        group, self._group = self._group, None
        self._forget()
        if group is not None and self._way == "nccl":
            group.abort()

    def start_weight_update(self) -> None:
        """Forget an update that came halfway."""
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One step. As the base class's, but that has every device synchronize, which a CPU cannot."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
            _die("an update of weights in shared memory was given up halfway")
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
        keep = self._keeper(sum(num_bytes(spec) for spec in self._specs))
        for spec in self._specs:
            dtype = getattr(torch, spec["dtype"])
            tensor = torch.empty(spec["shape"], dtype=dtype, device=self.device)
            # as bytes: not every group knows every dtype
            self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait(self._timeout)
            self._staged.append((spec["name"], keep(tensor)))

    def _keeper(self, total_bytes: int) -> Callable[[Tensor], Tensor]:
        """Where tensors wait for the commit: as they are, or in host memory where the GPU has no room for all."""
        if self.device.type == "cpu":
            return lambda tensor: tensor
        free, _ = torch.cuda.mem_get_info(self.device)
        if free >= total_bytes + SPARE_BYTES:
            return lambda tensor: tensor
        logger.info("staging %.1f GB of weights in host memory", total_bytes / 1e9)
        return lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    def _to_device(self, staged: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while staged:
            name, tensor = staged.popleft()
            yield name, tensor.to(self.device, non_blocking=True)

    def _load(self, info: UpdateInfo) -> None:
        """Tensors in the trainer's memory on this GPU, straight into the model.

        It was asleep, so there are no old weights to keep. Never run on a GPU yet.
        """
        specs = {spec["name"]: spec for spec in self._specs or ()}
        tensors = [(entry["name"], open_shared(entry, self.device)) for entry in info.shared]
        for name, tensor in tensors:
            if name not in specs or list(tensor.shape) != list(specs[name]["shape"]):
                raise ValueError(f"{name} of shape {list(tensor.shape)} is not as it was declared")
        with _no_way_back():
            if not self._num_loaded:
                initialize_layerwise_reload(self.model)
            # a layer that is not whole keeps what came of it; the trainer's memory is free when this call ends
            self.model.load_weights((name, tensor.clone()) for name, tensor in tensors)
            self._num_loaded += len(tensors)

    def _discard(self, info: UpdateInfo) -> None:
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


def repack_tied_head(model: Any) -> None:
    """Have a head that is tied to the embedding see the new weights.

    On CPU it multiplies with a copy of its own, packed for the product, which a reload leaves as it was.
    """
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "cpu_linear"):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        head.quant_method.process_weights_after_loading(head)


def open_shared(entry: dict[str, Any], device: torch.device) -> Tensor:
    """A tensor in another process's GPU memory, from what `transfer.share` says of it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle, counter, event = (bytes.fromhex(entry[key]) for key in ("handle", "ref_counter_handle", "event_handle"))
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(entry["shape"]),
        tuple(entry["stride"]),
        entry["offset"],
        torch.UntypedStorage,
        getattr(torch, entry["dtype"]),
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
