"""Worker extension that vLLM loads: receives a trainer's weights and loads them into the model.

vLLM imports this file through `--worker-extension-cls`, from its own folder, since Cohort is not installed there. It
imports only torch, safetensors, vLLM and `servers/server_side/`. Names, shapes and dtypes are checked before anything
is sent. Tensors are then loaded as they arrive. vLLM keeps those of an incomplete layer (q without k and v, say), so a
worker holds little more than one layer beside the model.

After an update that broke off, the model has part old and part new weights: `RequireWholeWeights`
(`cohort_vllm_middleware`) answers no request until an update is complete.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cohort_weight_group import WeightGroup, describe_device, gpu_uuid, own_address, result_within
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Address of the trainer for the rendezvous or, in a later call, its CUDA IPC handles."""

    host: str = ""  # host of the trainer's store
    port: int = 0
    world_size: int = 1
    timeout_s: float = 0.0  # maximum time per tensor
    rendezvous_timeout_s: float = 0.0  # maximum time to set up and test a transport
    ipc_handles: dict[str, Any] | None = None  # handles of the training ranks' buffers, by GPU


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One step of an update."""

    step: str  # declare, receive, load or discard
    specs: list[dict[str, Any]] = field(default_factory=list)  # declare: name, shape and dtype of every tensor
    offsets: list[tuple[str, int]] = field(default_factory=list)  # load: names and offsets in the shared buffer


class CohortWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Checks, receives and commits weight updates."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._timeout_s = 0.0
        self._group: WeightGroup | None = None
        self._ipc_buffer: Tensor | None = None  # the training rank's shared buffer on this GPU
        self._expected: dict[str, tuple[list[int], bool]] | None = None
        self._num_loaded = 0  # tensors of this update that the model has
        self._is_loading = False  # vLLM's layers are prepared for loading
        self._specs: list[dict[str, Any]] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Rendezvous with the trainer and set up a transport, replacing the last one; or open its shared buffer."""
        if init_info.ipc_handles is None:
            self.shutdown()
            self._rendezvous(init_info)
        else:
            self._ipc_buffer = None
            self._ipc_buffer = open_ipc_buffer(init_info.ipc_handles, self.device)

    def _rendezvous(self, info: InitInfo) -> None:
        self._timeout_s = info.timeout_s
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(
            info.host, info.port, info.world_size, timeout=timedelta(seconds=info.rendezvous_timeout_s)
        )
        store.set(f"here/{rank}", json.dumps(describe_device(self.device)))
        transport = store.get("transport").decode()  # set once the trainer has heard from all workers
        if transport == "ipc":
            return
        self._group = WeightGroup(
            transport,
            store,
            rank=rank,
            size=info.world_size,
            device=torch.device("cpu") if transport == "gloo" else self.device,
            host=own_address(info.host, info.port, info.timeout_s),
            timeout_s=max(info.timeout_s, info.rendezvous_timeout_s),
        )
        try:
            result_within(
                self._group.connect(), info.rendezvous_timeout_s, f"creating a {transport} group with the trainer"
            )
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the group, which a waiting trainer notices at once."""
        group, self._group, self._ipc_buffer = self._group, None, None
        if group is not None:
            group.abort()

    def start_weight_update(self) -> None:
        """Discard an unfinished update."""
        self._reset_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one step of an update. Unlike the base class, works on CPU, which cannot synchronize."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._num_loaded and self._num_loaded == len(self._specs or ()):
            self._ipc_buffer = None  # the training rank may free the memory now

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Run one step of an update. An error ends the update, and vLLM's session with it."""
        steps = {
            "declare": self._declare,
            "receive": self._receive,
            "load": self._load_shared,
            "discard": self._discard,
        }
        try:
            if update_info.step not in steps:
                raise ValueError(f"step: {update_info.step!r} must be one of {', '.join(steps)}")
            steps[update_info.step](update_info)
        except BaseException:
            if update_info.step == "receive":
                self.shutdown()  # so that the sending trainer notices
            self._reset_update()
            raise

    def finish_weight_update(self) -> None:
        """Complete the update, whose tensors the model has."""
        specs = self._specs
        if specs is None or self._num_loaded != len(specs):
            raise ValueError(f"received {self._num_loaded} of {len(specs or ())} declared tensors")
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_loading = False
        repack_tied_head(self.model)
        self._reset_update()

    def _reset_update(self) -> None:
        self._specs, self._num_loaded = None, 0
        if self._is_loading:  # forget tensors of incomplete layers, which the next update sends again
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_loading = False

    def _declare(self, info: UpdateInfo) -> None:
        if self._expected is None:
            self._expected = expected_tensors(Path(self.model_config.model), self.model_config.hf_text_config)
        check_specs(info.specs, self._expected)
        self._specs = info.specs

    def _receive(self, info: UpdateInfo) -> None:
        """Receive all declared tensors, in order, and load each as it arrives."""
        if self._specs is None or self._group is None:
            raise ValueError("no process group with the trainer, or no declared tensors")
        self._load(self._received(self._group, self._specs))

    def _received(self, group: WeightGroup, specs: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            tensor = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]), device=group.device)
            result_within(group.broadcast(tensor), self._timeout_s, f"receiving {spec['name']}")
            yield spec["name"], tensor.to(self.device)

    def _load_shared(self, info: UpdateInfo) -> None:
        """Load tensors from the shared buffer. Not tested on a GPU yet."""
        specs, buffer = {spec["name"]: spec for spec in self._specs or ()}, self._ipc_buffer
        if buffer is None or any(name not in specs for name, _ in info.offsets):
            raise ValueError("no shared buffer, or tensors that were not declared")
        # clone: an incomplete layer keeps its tensors, and the trainer reuses the buffer after this call
        self._load((name, tensor_view(buffer, specs[name], offset).clone()) for name, offset in info.offsets)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the next tensors of the update into the model. A layer changes once all of its tensors are there."""
        if not self._is_loading:
            self._is_loading = True
            initialize_layerwise_reload(self.model)
        self.model.load_weights(self._counted(tensors))

    def _counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in tensors:
            yield named
            self._num_loaded += 1

    def _discard(self, info: UpdateInfo) -> None:
        """End an unfinished update, and vLLM's session, which an error ends."""
        self._ipc_buffer = None
        raise ValueError("the trainer gave the update up")


class CohortWorker:
    """Target of `--worker-extension-cls`: methods for vLLM's workers. Importing this module registers the engine."""

    list_loras: Callable[[], set[int]]
    add_lora: Callable[[LoRARequest], bool]

    def replace_adapter(self, folder: str) -> None:
        """Load an adapter in place of the one that all requests use, under the id that they have."""
        (adapter_id,) = self.list_loras()
        self.add_lora(LoRARequest("policy", adapter_id, folder, load_inplace=True))

    def free_cached_memory(self) -> None:
        """Return the memory that PyTorch caches to the GPU."""
        torch.accelerator.empty_cache()


def expected_tensors(folder: Path, config: Any) -> dict[str, tuple[list[int], bool]]:
    """Return the shape of each tensor in an update, and whether it is optional, by name.

    These are the tensors in the model folder's safetensors files. Optional are those that a trainer may lack: a head
    tied to the embedding, rotary frequencies, multi-token prediction layers, and what a multimodal model has beside its
    language model.

    Raises:
        ValueError: the folder has no safetensors files.
    """
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # vLLM has downloaded it there

        folder = Path(snapshot_download(str(folder), local_files_only=True))
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    if not all((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} has no safetensors files to check a weight update against")
    num_layers, tied = config.num_hidden_layers, getattr(config, "tie_word_embeddings", False)
    mtp = ("mtp.", *(f"model.layers.{n}." for n in range(num_layers, num_layers + 8)))

    shapes: dict[str, list[int]] = {}
    for file in sorted(names):
        with safe_open(folder / file, framework="pt") as tensors:
            shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    is_multimodal = any("language_model." in name for name in shapes)

    def optional(name: str) -> bool:
        beside = is_multimodal and "language_model." not in name and not name.startswith("lm_head.")
        head = tied and name.endswith("lm_head.weight")
        return beside or head or name.endswith("rotary_emb.inv_freq") or name.startswith(mtp)

    return {name: (shape, optional(name)) for name, shape in shapes.items()}


def check_specs(specs: list[dict[str, Any]], expected: dict[str, tuple[list[int], bool]]) -> None:
    """Compare the tensors of an update with those that the server's model was loaded from.

    Raises:
        ValueError: names, shapes or dtypes do not match; the message lists the first few.
    """
    given = {str(spec["name"]): spec for spec in specs}
    wrong = [f"{name} is not in the server's model" for name in given if name not in expected]
    wrong += [f"{n} is missing" for n, (_, optional) in expected.items() if n not in given and not optional]
    for name, spec in given.items():
        if name in expected and list(spec["shape"]) != expected[name][0]:
            wrong.append(f"{name} has shape {list(spec['shape'])} instead of {expected[name][0]}")
        if not isinstance(getattr(torch, str(spec["dtype"]), None), torch.dtype):
            wrong.append(f"{name} has unknown dtype {spec['dtype']!r}")
    if len(given) < len(specs):
        wrong.append("a name is duplicated")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the update does not match the server's model: {'; '.join(wrong[:3])}{more}")


def repack_tied_head(model: Any) -> None:
    """Repack a head that is tied to the embedding.

    On CPU it uses its own packed copy of the weights, which a reload does not update.
    """
    model = getattr(model, "language_model", model)  # of a multimodal one
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(head, "cpu_linear"):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        head.quant_method.process_weights_after_loading(head)


def open_ipc_buffer(handles: dict[str, Any], device: torch.device) -> Tensor:
    """Open the shared buffer of the training rank on this GPU. Returns its bytes, [N].

    Args:
        handles: results of the ranks' `cuda_ipc.ipc_handle`, by GPU.
        device: this worker's GPU.

    Raises:
        ValueError: no rank shares a buffer on this GPU, or its first bytes are wrong.
        RuntimeError: the GPU driver or the container does not allow it.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    entry = handles.get(gpu_uuid(device))
    if entry is None:
        raise ValueError("no rank shares memory of this GPU")
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
        raise ValueError("the opened memory is not the trainer's")
    return opened


def tensor_view(buffer: Tensor, spec: dict[str, Any], offset: int) -> Tensor:
    """Return a tensor as a view of the shared buffer."""
    shape, dtype = torch.Size(spec["shape"]), getattr(torch, spec["dtype"])
    return buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


WeightTransferEngineFactory.register_engine("cohort", CohortWeightTransferEngine)
