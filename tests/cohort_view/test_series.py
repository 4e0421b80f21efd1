"""Metrics as columns, and curves of few points that keep every extreme."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cohort.health.metrics_table import MetricsBuilder
from cohort_view import series
from cohort_view.json_lines import parse_lines
from cohort_view.run import ViewedRun
from cohort_view.series import bucket_means, curves_csv, downsample
from cohort_view.values import to_json
from completions_files import answering
from selection import examples

curves, metrics_list = answering(series.curves), answering(series.metrics_list)

NAN = float("nan")


def lines(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def viewed(folder: Path, *rows: dict, run_id: str = "a") -> ViewedRun:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(lines(*rows))
    run = ViewedRun(folder, run_id)
    run.refresh()
    return run


def train(step: int, **values: object) -> dict:
    return {"step": step, "kind": "train", **values}


def test_columns_and_missing_values():
    builder = MetricsBuilder()
    builder.append([train(1, a=1.0), train(2, b=2), {"step": 2, "kind": "eval", "eval/x": 0.5}])
    line = b'{"step": 3, "kind": "train", "a": null, "b": NaN, "c": "text", "d": true, "e": [1], "f": 1e400}\n'
    builder.append(list(parse_lines(line)))
    table = builder.table()
    assert table.steps.tolist() == [1, 2, 3]
    assert table.names == ["a", "b", "d"]
    np.testing.assert_array_equal(table.column("a"), [1.0, NAN, NAN])
    np.testing.assert_array_equal(table.column("b"), [NAN, 2.0, NAN])
    np.testing.assert_array_equal(table.column("nowhere"), [NAN, NAN, NAN])
    assert table.eval.names == ["eval/x"]
    assert (table.last("a"), table.last("nowhere")) == (1.0, None)
    assert table.row(2) == {"b": 2.0}
    assert table.row(7) == {}


def test_lines_that_are_no_rows_are_told():
    block = lines(train(1, a=1.0)) + b'{"a": 2}\nnothing\n{"step": "2"}\n{"step": -1}\n{"step": true}\n{"step": 2}\n'
    builder = MetricsBuilder()
    assert builder.append(list(parse_lines(block))) == [True, False, False, False, False, False, True]
    assert builder.table().steps.tolist() == [1, 2]


def test_the_last_row_of_a_step_counts():
    builder = MetricsBuilder()
    builder.append([train(step, a=step) for step in (1, 2, 3, 4)])
    before = builder.table()
    builder.append([train(3, a=30, b=1)])
    builder.append([train(4, a=40), train(5, a=50), train(5, a=51)])
    table = builder.table()
    assert table.steps.tolist() == [1, 2, 3, 4, 5]
    assert table.column("a").tolist() == [1, 2, 30, 40, 51]
    np.testing.assert_array_equal(table.column("b"), [NAN, NAN, 1, NAN, NAN])
    assert before.column("a").tolist() == [1, 2, 3, 4]  # a table never changes


@examples(300, quick=40)
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), max_size=60), st.integers(1, 7))
def test_tables_agree_with_a_dictionary(rows: list[tuple[int, str]], block_rows: int):
    builder, truth = MetricsBuilder(), {}
    for start in range(0, len(rows), block_rows):
        block = [train(step, **{name: start + n}) for n, (step, name) in enumerate(rows[start : start + block_rows])]
        builder.append(block)
        truth |= {row["step"]: row for row in block}
        table = builder.table()
        assert table.steps.tolist() == sorted(truth)
        for name in "ab":
            np.testing.assert_array_equal(table.column(name), [truth[s].get(name, NAN) for s in sorted(truth)])


@examples(500, quick=60)
@given(
    hnp.arrays(np.float64, st.integers(0, 500), elements=st.floats(-1e6, 1e6) | st.just(NAN)),
    st.integers(1, 100),
)
def test_downsampling_keeps_extremes_and_ends(values: np.ndarray, points: int):
    kept = downsample(values, points)
    assert len(kept) <= max(points, 4)
    assert (np.diff(kept) > 0).all()
    found, given_values = values[kept], values[np.isfinite(values)]
    if len(given_values):
        assert np.nanmin(found) == given_values.min()
        assert np.nanmax(found) == given_values.max()
        known = np.flatnonzero(np.isfinite(values))
        assert known[0] in kept
        assert known[-1] in kept


def test_each_bucket_keeps_its_extremes():
    values = np.zeros(1000)
    values[[123, 555]] = 9.0, -9.0
    kept = downsample(values, 40)  # 10 buckets of 100
    assert {0, 99, 100, 123, 199, 500, 555, 599, 900, 999} <= set(kept.tolist())


def test_a_gap_stays_a_gap():
    values = np.ones(1000)
    values[400:600] = NAN
    kept = downsample(values, 40)
    assert np.isnan(values[kept]).any()


def test_means_are_those_of_all_values_of_a_bucket(tmp_path: Path):
    rows = [train(step, reward=5.0 if step % 50 == 1 else 0.0) for step in range(1, 1001)]
    run = viewed(tmp_path / "a", *rows)
    sparse, whole = curves([run], ["reward"], points=40).curves[0], curves([run], ["reward"]).curves[0]
    assert max(sparse.y) == 5
    assert sparse.means is not None
    np.testing.assert_allclose(sparse.means, 0.1)  # of 100 values, two are 5
    assert curves([run], ["reward"], points=1000).curves[0].means is None
    assert whole.means is not None and len(whole.means) == len(whole.x)


def test_means_leave_missing_values_out():
    values = np.array([1.0, NAN, 3.0, NAN, NAN, NAN, NAN, NAN, 7.0])
    np.testing.assert_array_equal(bucket_means(values, 12), [2, 2, 2, NAN, NAN, NAN, 7, 7, 7])


def test_curves_over_steps(tmp_path: Path):
    rows = [train(step, reward=step / 10) for step in range(1, 6)]
    run = viewed(tmp_path / "a", *rows, {"step": 2, "kind": "eval", "eval/accuracy": 0.5})
    found = curves([run], ["reward", "eval/accuracy", "nowhere"], start=2, stop=4)
    reward, accuracy, nowhere = found.curves
    assert (reward.run, reward.name, reward.total) == ("a", "reward", 3)
    assert (reward.x, reward.y) == ([2, 3, 4], [0.2, 0.3, 0.4])
    assert (accuracy.x, accuracy.y) == ([2], [0.5])
    assert (nowhere.x, nowhere.total) == ([], 0)


def test_curves_over_seconds_since_the_start(tmp_path: Path):
    run = viewed(
        tmp_path / "a",
        train(1, timestamp=107.0, step_time=5.0, reward=1.0),
        {"step": 1, "kind": "eval", "timestamp": 110.0, "eval/accuracy": 0.5},
    )
    assert curves([run], ["reward"], "time").curves[0].x == [5.0]  # no start event: when step 1 began
    (tmp_path / "a" / "events.jsonl").write_bytes(lines({"timestamp": 100.0, "step": 0, "event": "start"}))
    run.refresh()
    reward, accuracy = curves([run], ["reward", "eval/accuracy"], "time").curves
    assert (reward.x, accuracy.x) == ([7.0], [10.0])


def test_time_never_goes_back(tmp_path: Path):
    run = viewed(tmp_path / "a", *(train(n, timestamp=t, reward=1) for n, t in enumerate((10.0, 12.0, 11.0, 13.0), 1)))
    assert curves([run], ["reward"], "time").curves[0].x == [0, 2, 2, 3]


def test_a_metric_of_few_steps_has_no_gaps(tmp_path: Path):
    rows = [train(step, reward=1.0, **({"parity": 0.1} if step % 10 == 0 else {})) for step in range(1, 101)]
    parity = curves([viewed(tmp_path / "a", *rows)], ["parity"]).curves[0]
    assert parity.x == list(range(10, 101, 10))
    assert np.isfinite(parity.y).all()


def test_a_source_that_some_steps_lack_has_no_gaps(tmp_path: Path):
    rows = [train(1, **{"sources/a/reward": 0.25}), train(2, **{"sources/b/reward": 1}), train(3, x=1)]
    names = ["sources/a/reward", "eval/sources/a/reward", "x"]
    run = viewed(tmp_path / "a", *rows, train(4, **{"sources/a/reward": 0.75, "x": 2}))
    source, held_out, other = curves([run], names).curves
    assert (source.x, source.y) == ([1, 4], [0.25, 0.75])
    assert held_out.x == []
    assert (other.x, other.y) == ([1, 2, 3, 4], [None, None, 1, 2])


def test_csv_has_every_point(tmp_path: Path):
    rows = [train(step, timestamp=float(step), a=step / 4) for step in (1, 2)]
    first = viewed(tmp_path / "a", *rows, {"step": 2, "kind": "eval", "timestamp": 2.5, "eval/x": 1})
    second = viewed(tmp_path / "b", train(1, a=None, b=7), train(2, a=0.1), run_id='b",')
    assert "".join(curves_csv([first, second], ["a", "eval/x"])) == (
        'run,step,timestamp,a,eval/x\na,1,1.0,0.25,\na,2,2.0,0.5,\na,2,2.5,,1.0\n"b"",",2,,0.1,\n'
    )


def test_list_of_metrics(tmp_path: Path):
    run = viewed(tmp_path / "a", train(1, reward=0.5, x=None), {"step": 1, "kind": "eval", "eval/reward": 0.25})
    reward, held_out = metrics_list(run).metrics
    assert (reward.name, reward.group) == ("reward", "Reward")
    assert (reward.last, reward.num_points) == (0.5, 1)
    assert (held_out.name, held_out.group) == ("eval/reward", "Held-out")


@pytest.mark.parametrize("value", [NAN, float("inf"), np.float64(NAN), np.array([NAN])])
def test_json_has_no_nan(value):
    assert to_json({"x": value}) in ('{"x":null}', '{"x":[null]}')
