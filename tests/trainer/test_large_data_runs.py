"""Runs whose data stay on disk are those whose data are in memory."""

from runs import assert_same_weights, changed, make_inputs, metric, train


def test_a_run_with_data_on_disk_is_the_same_bit_for_bit_also_when_it_resumes(tmp_path, monkeypatch):
    config = changed(make_inputs(tmp_path), train={"steps": 4, "micro_batch_tokens": "auto"})
    train(changed(config, run={"dir": str(tmp_path / "in_memory")}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
    on_disk = changed(config, run={"dir": str(tmp_path / "on_disk")})
    train(changed(on_disk, train={"steps": 2}))
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2, "training and held-out rows"
    train(on_disk, resume=True)
    assert_same_weights(tmp_path / "on_disk" / "final", tmp_path / "in_memory" / "final")
    for name in ("reward", "loss", "eval/accuracy"):
        values = metric(tmp_path / "on_disk", name)
        assert values and values[-1] == metric(tmp_path / "in_memory", name)[-1], name
