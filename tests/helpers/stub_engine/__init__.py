"""A third rollout engine, as one folder and one config class: a server over HTTP that samples tokens by chance."""
