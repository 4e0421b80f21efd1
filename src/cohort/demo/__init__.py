"""The demo: a tiny base model, its word problems, and code to rebuild both from scratch."""
