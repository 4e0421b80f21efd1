"""What training knew of each token, in tokens/: aligned with the completions, bounded on disk, free of side effects."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import cohort
from cohort.records import ForwardOnlyOutputs, TrainSequence
from cohort.run.tokens import TokenRecords, prepare_tokens_file
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train
from selection import slow

TWO_TURNS = TrainSequence(
    token_ids=np.array([7, 8, 9, 5]),
    loss_mask=np.array([False, True, False, True]),
    sampling_logprobs=np.array([-1.0, -2.0]),
    advantages=np.array([0.5, 0.5]),
    loss_weights=np.array([0.25, 0.25]),
    shared_prefix_tokens=1,
    index=0,
    group=0,
    trajectory=1,
)


def test_a_row_has_all_tokens_of_its_trajectory(tmp_path: Path):
    outputs = ForwardOnlyOutputs(logprobs={0: np.array([-1.5, -2.5])})
    prepare_tokens_file(
        tmp_path / "f.parquet", num_trajectories=2, sequences=[TWO_TURNS], outputs=outputs, with_context=True
    )()
    broken, row = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert broken == dict.fromkeys(row)  # infrastructure broke it: it was not trained
    assert row == {
        "logprobs": [None, -1.5, None, -2.5],
        "entropies": [None] * 4,
        "advantages": [0.0, 0.5, 0.0, 0.5],
        "loss_weights": [0.0, 0.25, 0.0, 0.25],
        "loss_mask": [False, True, False, True],
    }


@pytest.mark.parametrize(
    ("num_steps", "left"),
    [
        (5, [1, 2, 3, 4, 5]),
        (6, [1, 3, 4, 5, 6]),
        (7, [1, 3, 5, 6, 7]),
        (9, [1, 3, 5, 7, 9]),
        (33, [1, 10, 14, 22, 33]),
    ],
)
def test_old_steps_are_thinned_out_evenly(num_steps: int, left: list[int], tmp_path: Path):
    write(tmp_path / "one", [1], max_bytes=10_000)
    size = tokens_file(tmp_path / "one", 1).stat().st_size
    folder = tmp_path / "tokens"
    write(folder, range(1, num_steps + 1), max_bytes=6 * size - 1)
    assert steps_in(folder) == left
    write(folder, [num_steps + 1], max_bytes=size)
    assert steps_in(folder) == [num_steps + 1]
    write(folder, [num_steps + 2], max_bytes=size - 1)  # a bound, whatever a step takes
    assert steps_in(folder) == []


def test_the_last_steps_are_kept_within_a_size(tmp_path: Path):
    write(tmp_path / "a", range(1, 8), max_bytes=10**9, max_recent=3)
    assert steps_in(tmp_path / "a") == [5, 6, 7]
    size = tokens_file(tmp_path / "a", 7).stat().st_size
    write(tmp_path / "b", range(1, 8), max_bytes=2 * size, max_recent=3)
    assert steps_in(tmp_path / "b") == [6, 7]
    write(tmp_path / "a", [8], max_bytes=10**9)  # resumed with record_tokens: true
    assert steps_in(tmp_path / "a") == [5, 6, 7, 8]


def test_of_a_large_step_the_first_groups_are_recorded(tmp_path: Path):
    sequences = [replace(TWO_TURNS, index=n, group=n // 2, trajectory=n) for n in range(6)]  # of 4 tokens each

    def chosen(max_step_tokens: float) -> list[int]:
        records = TokenRecords(tmp_path, max_bytes=10**9, max_step_tokens=max_step_tokens)
        return [s.index for s in records.chosen(sequences)]

    assert chosen(math.inf) == chosen(24) == [0, 1, 2, 3, 4, 5]
    assert chosen(23) == chosen(16) == [0, 1, 2, 3]
    assert chosen(15) == chosen(1) == [0, 1]
    arguments = {"num_trajectories": 6, "outputs": ForwardOnlyOutputs(), "with_context": True}
    for name, of_step in (("all", sequences), ("some", sequences[:2])):
        prepare_tokens_file(tmp_path / name, sequences=of_step, **arguments)()
    all_rows, some = (pq.read_table(tmp_path / name).to_pylist() for name in ("all", "some"))
    assert some == [*all_rows[:2], *[dict.fromkeys(all_rows[0])] * 4]


def write(folder: Path, steps: Iterable[int], *, max_bytes: int, max_recent: int | None = None) -> None:
    records = TokenRecords(folder, max_bytes=max_bytes, max_recent=max_recent)
    for step in steps:
        outputs, file = ForwardOnlyOutputs(), records.file(step)
        prepare_tokens_file(file, num_trajectories=2, sequences=[TWO_TURNS], outputs=outputs, with_context=True)()
        records.add(step)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("step-")) for file in folder.iterdir())


def tokens_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


@pytest.mark.parametrize(
    "algorithm",
    [{}, *(pytest.param(a, marks=slow("with a reference")) for a in ({"beta": 0.1}, {"beta": 0.1, "kl_in": "reward"}))],
    ids=str,
)
def test_recording_changes_no_weight_and_agrees_with_the_metrics(algorithm: dict[str, object], tmp_path: Path):
    config = changed(
        {**make_inputs(tmp_path), "algorithm": algorithm},
        train={"steps": 2, "updates_per_rollout": 2, "learning_rate": 1e-3},
    )
    plain = train(changed(config, run={"dir": str(tmp_path / "plain"), "record_tokens": False}))
    run = train(config).run_dir
    assert not (plain.run_dir / "tokens").exists()
    assert_same_weights(run / "final", plain.final_dir)
    for step in (1, 2):
        rows = pq.read_table(tokens_file(run / "tokens", step)).to_pylist()
        completions = pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()
        differences = []
        for row, completion in zip(rows, completions, strict=True):
            num_tokens = len(completion["completion_token_ids"])
            assert {len(values) for values in row.values()} == {num_tokens} and all(row["loss_mask"])
            assert np.mean(row["advantages"]) == pytest.approx(completion["advantage"], abs=1e-6)
            assert (row["logprobs"][0] is None) == (not algorithm and completion["advantage"] == 0)
            known = zip(row["logprobs"], completion["sampling_logprobs"], strict=True)
            differences += [abs(a - b) for a, b in known if a is not None]
            assert all(0 <= x <= math.log(1000) for x in row["entropies"] if x is not None)
        assert ("reference_logprobs" in rows[0]) == bool(algorithm)
        assert max(differences) == pytest.approx(
            metric(run, "sampling/sampling_logp_difference/max")[step - 1], abs=1e-6
        )


def test_resuming_removes_what_was_recorded_after_the_checkpoint(tmp_path: Path):
    config = changed(make_inputs(tmp_path), train={"steps": 3}, run={"record_tokens": True})
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(3))
    recorded = tokens_file(tmp_path / "run" / "tokens", 3).read_bytes()
    tokens_file(tmp_path / "run" / "tokens", 9).write_bytes(recorded)
    tokens_file(tmp_path / "run" / "tokens", 1).write_bytes(b"stays")
    train(config, resume=True)  # from step 2
    assert sorted(path.name for path in (tmp_path / "run" / "tokens").iterdir()) == [
        f"step-{step:06d}.parquet" for step in (1, 2, 3)
    ]
    assert tokens_file(tmp_path / "run" / "tokens", 1).read_bytes() == b"stays"
    assert tokens_file(tmp_path / "run" / "tokens", 3).read_bytes() == recorded
