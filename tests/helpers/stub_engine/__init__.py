"""A third rollout engine: a server over HTTP that samples tokens by chance. A folder to be copied as it is."""
