"""The run folder: every format once, the writer beside the reader; logs and trackers."""
