"""Damaged files of a run: each kind is noticed, and the run goes on from the newest whole checkpoint."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cohort as library
from cohort.errors import UserError
from cohort.run.files import MANIFEST, checkpoints, find_damage, read_manifest, read_metrics, split_by_size
from commands import Ended, assert_refused
from runs import Notes, assert_same_weights, changed, make_inputs, metric, stop_after, train
from selection import mostly_slow
from test_launched_ranks import LaunchedRank
from waiting import free_port


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def remove(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def nulls(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


WEIGHTS, SHARD, METADATA = "model.safetensors", "optimizer/__0_0.distcp", "optimizer/.metadata"
STATE = "trainer_state.json"
DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    (cut, WEIGHTS, r"model\.safetensors has [\d,]+ bytes instead of [\d,]+"),
    (flip, WEIGHTS, "model.safetensors has changed"),
    (remove, WEIGHTS, "model.safetensors is missing"),
    (cut, SHARD, r"optimizer/__0_0\.distcp has [\d,]+ bytes instead of [\d,]+"),
    (flip, SHARD, r"optimizer/__0_0\.distcp has changed"),
    (nulls, SHARD, r"optimizer/__0_0\.distcp has changed"),
    (remove, METADATA, r"optimizer/\.metadata is missing"),
    (cut, METADATA, r"optimizer/\.metadata has [\d,]+ bytes"),
    (remove, "optimizer", r"optimizer/\.metadata is missing"),
    (empty, STATE, r"trainer_state\.json has 0 bytes instead of [\d,]+"),
    (cut, STATE, r"trainer_state\.json has [\d,]+ bytes"),
    (nulls, STATE, r"trainer_state\.json has changed"),
    (remove, STATE, r"trainer_state\.json is missing"),
    (flip, "config.json", r"config\.json has changed"),
    (remove, "tokenizer.json", r"tokenizer\.json is missing"),
    (empty, MANIFEST, r"manifest\.json cannot be read"),
    (cut, MANIFEST, r"manifest\.json cannot be read"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_inputs(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def whole(config: dict[str, Any]) -> Path:
    """The run that nothing happened to."""
    return train(changed(config, run={"dir": f"{config['run']['dir']}-whole"})).run_dir


@pytest.fixture(scope="module")
def interrupted(config: dict[str, Any]) -> Path:
    """A run that was interrupted after the checkpoint step-4."""
    with pytest.raises(KeyboardInterrupt):
        library.train(config, display=stop_after(5))
    return Path(config["run"]["dir"])


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


@pytest.mark.parametrize(("damage", "name", "story"), DAMAGE)
def test_every_kind_is_noticed(run: Path, cohort, damage, name: str, story: str):
    damage(run / "checkpoints" / "step-4" / name)
    before = sorted(p.relative_to(run) for p in run.rglob("*"))
    ended = cohort("verify", run)
    assert ended.code == 1
    assert ended.err == ""
    lines = dict(line.split(": ", 1) for line in ended.out.splitlines())
    assert re.search(f"damaged: .*{story}", lines["step-4"]), ended.out
    assert lines["step-2"].startswith("intact (")
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == before


@pytest.mark.parametrize("kind", mostly_slow([1, 8, 11, 15], 8, 11, reason="the rest is found by `cohort verify`"))
def test_the_run_goes_on_from_the_newest_whole_one(config, whole: Path, run: Path, kind: int):
    damage, name, story = DAMAGE[kind]
    damage(run / "checkpoints" / "step-4" / name)
    notes = Notes()
    again = changed(config, run={"dir": str(run), "keep_checkpoints": 2})
    library.train(again, display=notes)
    assert any(
        re.fullmatch(
            f"checkpoint step-4 is damaged: .*{story}.* Renamed to damaged-step-4; resuming from step-2",
            note,
        )
        for note in notes.told
    ), notes.told
    assert_same_weights(run / "final", whole / "final")
    for of in ("loss", "eval/accuracy", "num_tokens"):
        assert metric(run, of) == metric(whole, of)
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["damaged-step-4", "step-4", "step-6"]


def test_large_checkpoints_are_told_while_they_are_read(config, run: Path, monkeypatch):
    monkeypatch.setattr("cohort.trainer.checkpointer._SLOW_BYTES", 1_000)
    notes = Notes()
    library.train(changed(config, run={"dir": str(run)}), display=notes)
    assert "verifying step-4 (0 GB)" in notes.told


def test_where_all_are_damaged_nothing_is_touched(config, run: Path):
    for number in (2, 4):
        flip(run / "checkpoints" / f"step-{number}" / WEIGHTS)
    before = sorted(p.relative_to(run) for p in run.rglob("*"))
    with pytest.raises(
        UserError, match=r"has no intact checkpoint to resume from\.\ncheckpoint step-4 is damaged"
    ) as caught:
        train(changed(config, run={"dir": str(run)}))
    assert "\ncheckpoint step-2 is damaged: model.safetensors has changed\n" in str(caught.value)
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == before


def test_an_earlier_version_left_no_manifest(config, whole: Path, run: Path, cohort):
    for number in (2, 4):
        (run / "checkpoints" / f"step-{number}" / MANIFEST).unlink()
    ended = cohort("verify", run)
    assert (ended.code, ended.out.splitlines()[1]) == (
        0,
        "step-4: unknown: it has no manifest (written by an earlier version)",
    )
    notes = Notes()
    library.train(changed(config, run={"dir": str(run)}), display=notes)
    assert "checkpoint step-4 has no manifest (written by an earlier version): its files are not verified" in notes.told
    assert_same_weights(run / "final", whole / "final")


def test_an_optimizer_of_an_earlier_version_that_cannot_be_read(config, run: Path):
    (run / "checkpoints" / "step-4" / MANIFEST).unlink()
    cut(run / "checkpoints" / "step-4" / METADATA)
    with pytest.raises(UserError, match=r"step-4' is damaged: cannot read the optimizer state"):
        train(changed(config, run={"dir": str(run)}))


def test_bad_lines_of_the_metrics_are_left_out(config, whole: Path, run: Path, cohort):
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    first_bad = len(lines) + 1
    file.write_bytes(b"".join([*lines, b'{"step": 3, "rew\n', b"\xff\xfe\n", b"3\n", b'{"step": 5, "re']))
    told = f"lines {first_bad}, {first_bad + 1}, {first_bad + 2} cannot be read"
    assert f"metrics.jsonl: damaged: {told}" in cohort("verify", run).out
    notes = Notes()
    library.train(changed(config, run={"dir": str(run)}), display=notes)
    assert f"metrics.jsonl: {told} and will be dropped" in notes.told
    assert metric(run, "loss") == metric(whole, "loss")
    assert read_metrics(file)[1] == []


def test_an_empty_summary_is_written_again(config, whole: Path, tmp_path: Path, cohort):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    empty(run / "summary.json")
    ended = cohort("verify", run)
    assert ended.code == 1 and "summary.json: damaged" in ended.out
    result = train(changed(config, run={"dir": str(run)}))
    assert result.summary["steps"] == 6
    assert_same_weights(run / "final", whole / "final")
    assert cohort("verify", run) == Ended(code=0, out=cohort("verify", run).out, err="")


def test_a_trained_model_without_checkpoints_is_never_deleted(config, whole: Path, tmp_path: Path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    empty(run / "summary.json")
    with pytest.raises(UserError, match=r"holds a trained model and no checkpoint to resume from; use a new run.dir"):
        train(changed(config, run={"dir": str(run)}))
    assert_same_weights(run / "final", whole / "final")


def test_what_is_no_run(tmp_path: Path, cohort):
    assert_refused(cohort("verify", tmp_path), "RUN: ", "is not a run folder; use the run.dir of a run")


def test_ranks_look_together(config, whole: Path, run: Path, tmp_path: Path):
    """Three ranks share the files, and all go on from the same checkpoint."""
    flip(run / "checkpoints" / "step-4" / SHARD)
    raw = changed(config, run={"dir": str(run)}, hardware={"device": "cpu"})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(raw))
    place = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": free_port()}
    first, *others = [end.end() for end in [LaunchedRank(path, RANK=r, LOCAL_RANK=r, **place) for r in range(3)]]
    assert (first.code, *(other.code for other in others)) == (0, 0, 0), first.err
    assert "Renamed to damaged-step-4; resuming from step-2" in first.out.replace("\n", " ")
    assert metric(run, "loss") == pytest.approx(metric(whole, "loss"), rel=1e-4, abs=1e-7)
    newest = checkpoints(run / "checkpoints")[-1]
    manifest = read_manifest(newest)
    assert manifest is not None
    assert {f"optimizer/__{rank}_0.distcp" for rank in range(3)} < manifest.keys()  # each rank's own
    assert find_damage(newest, manifest) == []


def test_files_are_shared_out_by_size():
    files = {f"{number}": (size, "") for number, size in enumerate((7, 5, 3, 3, 2, 1))}
    shares = split_by_size(files, 3)
    assert sorted(sum(size for size, _ in share.values()) for share in shares) == [7, 7, 7]
    assert {name: of for share in shares for name, of in share.items()} == files
    assert list(map(len, split_by_size({}, 2))) == [0, 0]
