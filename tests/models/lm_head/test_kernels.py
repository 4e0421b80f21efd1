"""Kernels of GPUs, as far as a CPU can tell: interpreted, compiled for other machines, and where they do not work."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.models import Operands, Policy, forward, linear_logprobs, linear_loss
from cohort.models.lm_head import tiled_softmax
from selection import slow
from tiny import make_gemma2, policy_of

HAS_TRITON = importlib.util.find_spec("triton") is not None


class UnfitError(Exception):
    """Stands for Triton's own, of which OutOfResources is one."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace Triton's kernels, for tiles on a CPU."""
    monkeypatch.setattr(tiled_softmax, "use_triton", True)
    monkeypatch.setattr(tiled_softmax, "_suits_triton", lambda tile: tile.dtype == torch.float32)

    def replace(**kernels: Any) -> None:
        plain = {
            "update_softmax": tiled_softmax._update_softmax,
            "logits_to_grad_": tiled_softmax._logits_to_grad_,
            "TritonError": UnfitError,
        }
        tiled_softmax._works.cache_clear()
        monkeypatch.setattr(tiled_softmax, "_triton", lambda: SimpleNamespace(**{**plain, **kernels}))

    return replace


def outcome() -> list[Tensor]:
    """Logprobs and gradients of a head in several tiles, both ways."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 8, requires_grad=True), torch.randn(70, 8, requires_grad=True)
    operands, targets = Operands(hidden, weight), torch.randint(0, 70, (30,))
    logprobs, entropy = linear_logprobs(operands, targets, entropy=True, tile_elements=500)
    loss, _ = linear_loss(operands, targets, lambda logprobs, *_: -logprobs, tile_elements=500)
    assert entropy is not None
    return [logprobs, *torch.autograd.grad(logprobs.sum() + entropy.sum() + loss, (hidden, weight))]


def raises(error: Exception) -> Callable[..., None]:
    def kernel(*_: Any) -> None:
        raise error

    return kernel


def halves(*args: Any) -> None:
    tiled_softmax._logits_to_grad_(*args)
    args[0].mul_(0.5)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (
            {"update_softmax": raises(RuntimeError("Failed to find C compiler.\nPlease"))},
            "RuntimeError: Failed to find C compiler",
        ),
        ({"logits_to_grad_": raises(subprocess.CalledProcessError(1, ["gcc"]))}, "CalledProcessError: .*gcc"),
        ({"update_softmax": raises(UnfitError("out of resource: shared memory"))}, "UnfitError: out of resource"),
        ({"logits_to_grad_": halves}, "ArithmeticError: results differ by 0.5"),
    ],
)
def test_kernels_that_do_not_work_are_replaced_before_they_are_used(
    kernels: dict[str, Any], reason: str, on_gpu: Callable[..., None]
):
    tiled_softmax.use_triton = False
    expected = outcome()
    tiled_softmax.use_triton = True
    on_gpu(**kernels)
    with pytest.warns(RuntimeWarning, match=rf"Triton kernels .* do not work here \({reason}.*PyTorch") as told:
        tiled_softmax.check_triton(torch.device("cpu"), bias=False, softcap=False)
        torch.testing.assert_close(outcome(), expected, rtol=0, atol=0)
    assert len(told) == 1


def test_kernels_that_fail_on_a_larger_tile_are_not_used_from_then_on(on_gpu: Callable[..., None]):
    """More than two rows are none of the trial's."""
    tiled_softmax.use_triton = False
    expected = outcome()
    tiled_softmax.use_triton = True
    calls = []

    def update_softmax(*args: Any) -> None:
        calls.append(len(args[0]))
        if len(args[0]) > 2:
            raise UnfitError("out of resource: shared memory, Required: 2, Hardware limit: 1")
        tiled_softmax._update_softmax(*args)

    on_gpu(update_softmax=update_softmax)
    with pytest.warns(RuntimeWarning, match="UnfitError: out of resource: shared memory.*eager PyTorch") as told:
        for _ in range(2):
            torch.testing.assert_close(outcome(), expected, rtol=0, atol=0)
    assert len(told) == 1 and [n for n in calls if n > 2] == [calls[-1]]


def test_memory_that_runs_out_says_nothing_of_kernels(on_gpu: Callable[..., None]):
    on_gpu(update_softmax=raises(RuntimeError("Triton Error [CUDA]: out of memory")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            tiled_softmax.check_triton(torch.device("cpu"), bias=True, softcap=True)
    assert tiled_softmax.use_triton


@pytest.mark.parametrize(("device", "tried"), [("cuda", [("cuda", False, True)]), ("cpu", [])])
def test_a_policy_on_a_gpu_tries_the_kernels_of_its_head(
    device: str, tried: list[Any], monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    monkeypatch.setattr(
        forward, "check_triton", lambda device, *, bias, softcap: seen.append((device.type, bias, softcap))
    )
    model = make_gemma2()
    traits = policy_of(model).traits
    options = {"device": torch.device(device), "compute_dtype": torch.bfloat16, "pad_token_id": 0, "traits": traits}
    Policy(model, **options)
    assert seen == tried
    Policy(model, **{**options, "compute_dtype": torch.float64})  # Triton's are of float32
    assert seen == tried


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_itself_without_a_gpu_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiled_softmax, "use_triton", True)
    tiled_softmax._works.cache_clear()
    monkeypatch.setattr(tiled_softmax, "_suits_triton", lambda tile: tile.dtype == torch.float32)
    with pytest.warns(RuntimeWarning, match="Triton kernels .* do not work here") as told:
        assert all(x.isfinite().all() for x in outcome())
    assert len(told) == 1 and not tiled_softmax.use_triton


@slow("interpreted in a fresh interpreter; test_linear_logprobs has the plain form")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("part", ["variants", "vocabulary"])
def test_the_fused_kernels_equal_the_plain_form(part: str):
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    script = Path(__file__).parents[2] / "helpers" / "triton_script.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), part], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@slow("compiles 24 kernels; nothing in its place")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("everything", [True, False])
def test_the_fused_kernels_compile_for_every_gpu(
    capability: int, everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With bias, softcap and entropy, and without; in as much shared memory as every GPU has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cohort.models.lm_head import triton_kernels

    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas").exists():
        pytest.skip("this build of Triton has no assembler for NVIDIA's GPUs")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    types = {"inner": "fp32", "outer": "fp32", "slope": "fp32", "row_stride": "i64", "num_columns": "i32"}
    constants: dict[str, Any] = dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "HAS_ENTROPY"), everything)
    constants["BLOCK"] = triton_kernels.BLOCK
    if not everything:
        constants |= dict.fromkeys(("bias", "sums_exp_z", "entropies", "entropy_grads"))
    for kernel in (triton_kernels._softmax_kernel, triton_kernels._gradient_kernel):
        names = kernel.arg_names
        signature = {name: types.get(name, "*i64" if name == "columns" else "*fp32") for name in names}
        mine = {name: value for name, value in constants.items() if name in names}
        source = ASTSource(fn=kernel, signature={**signature, **dict.fromkeys(mine, "constexpr")}, constexprs=mine)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"].startswith(b"\x7fELF")
        assert compiled.metadata.shared <= 48 * 1024
