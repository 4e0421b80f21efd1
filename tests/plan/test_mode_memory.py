"""Memory of every mode: what PyTorch's allocator gives to a real step, against the closed form of `cohort plan`.

The modes are those of `bench/modes.py`; one that is added there is compared here.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import modes
from allocations import Phase, changes, counting
from harness import write_model
from modes import MODES, PARTS, SIZES, Measured, configuration, measure, measure_apart, processes_of
from selection import mostly_slow, slow

CLOSE = 0.05
SIZE = SIZES["tiny"]
QUICK = ("one completion", "nf4", "critic")
ALONE = [name for name, mode in MODES.items() if processes_of(mode) == 1]
APART = [name for name, mode in MODES.items() if processes_of(mode) > 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(SIZE.shape, tmp_path_factory.mktemp("modes") / "model")


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """Compiling an optimizer's step takes longer than everything else here, and its state is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def compare(measured: Measured) -> None:
    """Every part that lasts, and the most of forward and backward."""
    for part in PARTS[:-1]:
        assert measured.counted[part] == pytest.approx(measured.planned[part], rel=CLOSE, abs=2048), part
    if "activations" in measured.counted:
        assert sum(measured.counted.values()) == pytest.approx(sum(measured.planned.values()), rel=CLOSE)


@pytest.mark.parametrize("name", mostly_slow(ALONE, *QUICK, reason="other modes of the same comparison"))
def test_memory_is_what_the_plan_says(name: str, model: Path) -> None:
    if "adamw_8bit" in name:
        pytest.importorskip("torchao")
    compare(measure(configuration(MODES[name], SIZE, model), SIZE))


@slow("several processes; one is measured")
def test_memory_of_several_processes_is_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts; `bench/plan_verify.py` and its tests compare the most of a step with several processes."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    found, failed = measure_apart(APART, "tiny")
    assert list(found) == APART and not failed
    for measured in found.values():
        compare(measured)


def test_another_optimizer_than_the_planned_one_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the plan is of SGD, which keeps nothing, and the step is AdamW's."""
    sgd, planned = configuration(MODES["sgd"], SIZE, model), modes.planned_parts
    monkeypatch.setattr(modes, "planned_parts", lambda _, device: planned(sgd, device))
    with pytest.raises(AssertionError, match="optimizer"):
        compare(measure(configuration({}, SIZE, model), SIZE))


def test_a_copy_that_nobody_foresaw_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every weight is there twice, where no part of the program looks for it."""
    copies = []

    def build(*args: object, **how: object) -> object:
        worker = built(*args, **how)
        copies.extend(p.detach().clone() for p in worker.policy.model.parameters())
        return worker

    built = modes.build_worker
    monkeypatch.setattr(modes, "build_worker", build)
    with pytest.raises(AssertionError, match="weights"):
        compare(measure(configuration({}, SIZE, model), SIZE))


def test_the_table_compares_with_the_first() -> None:
    """Literal numbers, and no share where nothing is known of a peak."""
    first = Measured(counted=dict.fromkeys(PARTS, 10**6), planned={}, update_bytes=0, seconds=2.0)
    second = Measured(counted={"weights": 5 * 10**5}, planned={}, update_bytes=0, seconds=3.0)
    *_, one, two = modes.table({"float32": first, "two processes": second}).splitlines()
    assert one == "| the defaults | 1.0 | 1.0 | 1.0 | 1.0 | 1.00x | 2.00 | 1.00x |"
    assert two == "| `hardware.processes: 2` | 0.5 |  |  |  |  | 3.00 | 1.50x |"
    *_, failed = modes.table({"float32": first}, {"sgd": "ImportError: no"}).splitlines()
    assert failed == "| `optim.name: sgd`: ImportError: no |  |  |  |  |  |  |  |"


def test_allocations_are_counted_to_the_byte() -> None:
    """Literal: 1,000 numbers of 4 bytes, twice as many, and for a moment three times."""
    with counting(torch.device("cpu")) as counted:
        kept = torch.zeros(1000)
        with counted.phase("some"):
            x = kept * 2
            x = x + kept
    assert counted.phases["some"].before == 4000
    assert counted.phases["some"].after == 8000
    assert counted.phases["some"].peak == 12_000
    assert x.sum() == 0


def test_what_was_there_before_is_not_counted_when_it_goes() -> None:
    """Neither what an earlier count has seen, nor what lies where it saw something."""
    with counting(torch.device("cpu")) as counted, counted.phase("some"):
        seen, gone = torch.zeros(1000), torch.zeros(3000)
    del gone
    unseen = [torch.zeros(2990) for _ in range(20)]  # the allocator gives the same place out again
    with counting(torch.device("cpu")) as counted, counted.phase("some"):
        del seen
        unseen.clear()
        kept = torch.zeros(10)
    assert counted.phases["some"] == Phase(before=0, peak=40, after=40)
    assert kept.sum() == 0


def test_a_release_that_was_not_recorded_shows_when_its_place_is_taken() -> None:
    """Literal: of 100 bytes at address 1 the release was missed, of 200 at address 2 it was recorded twice."""
    sizes = [(1, 100), (2, 200), (1, 50), (2, -200), (2, -200), (1, -50)]
    events = [
        SimpleNamespace(start_time_ns=at, extra_fields=SimpleNamespace(ptr=ptr, alloc_size=size))
        for at, (ptr, size) in enumerate(sizes)
    ]
    assert [size for _, size in changes(events)] == [100, 200, -50, -200, 0, -50]
