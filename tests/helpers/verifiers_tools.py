"""A taskset of verifiers with a tool."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Lookup(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look(self, key: str) -> str:
        """Look a key up."""
        return f"{key} is 7"


class LookupTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Lookup(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "7")


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LookupTask]:
        yield LookupTask(vf.TaskData(prompt="What is k?"), self.config.task)


__all__ = ["LookupTaskset"]

if __name__ == "__main__":
    Lookup.run()  # in the process that verifiers starts for it
