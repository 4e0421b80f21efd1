"""The demo: its tasks, each with a tiny base model (built by tools/demo_model)."""
