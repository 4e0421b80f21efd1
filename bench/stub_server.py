"""Stub servers with vLLM's endpoint for tokens: every reply is the same, and takes the time of its tokens.

`rollout_workers.py` starts it with the arguments COUNT FILE SPEEDUP. Listens on COUNT ports, which it prints as JSON,
until its input ends. FILE has a completion as JSON, without the bracket at its start. Does as little as possible, so
that it takes few of the cores that are measured.
"""

import asyncio
import json
import re
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

REPLY_TOKENS, TOKEN_S, SPREAD = 256, 0.02, 0.2


def latency_s(seed: int, speedup: float) -> float:
    """How long a stub server takes for a reply."""
    share = (seed * 2_654_435_761 % 2**32) / 2**32
    return REPLY_TOKENS * TOKEN_S * (1 - SPREAD + 2 * SPREAD * share) / speedup


class StubServer(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, choice: bytes, speedup: float):
        self.choice, self.speedup = choice, speedup
        self.received = bytearray()
        self.length = 0

    def connection_made(self, transport: Any) -> None:
        """Keep the connection."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once the request is there."""
        self.received += data
        if not self.length and (end := self.received.find(b"\r\n\r\n")) >= 0:
            size = re.search(rb"content-length: (\d+)", self.received[:end].lower())
            self.length = end + 4 + (int(size[1]) if size else 0)
        if self.length and len(self.received) >= self.length:
            self.answer()

    def answer(self) -> None:
        """Answer a request, one for completions after the time that they take."""
        if self.received.startswith(b"POST"):
            seed, n = (int(re.search(rb'"%b": ?(\d+)' % name, self.received)[1]) for name in (b"seed", b"n"))
            choices = b",".join(b'{"index":%d,%b' % (index, self.choice) for index in range(n))
            asyncio.get_running_loop().call_later(
                latency_s(seed, self.speedup), self.reply, b'{"choices":[' + choices + b"]}"
            )
        else:
            self.reply(b'{"data":[{"max_model_len":100000}]}')

    def reply(self, body: bytes) -> None:
        """Send an answer and close the connection."""
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()


async def serve(count: int, choice: bytes, speedup: float) -> None:
    """Listen on so many ports, and print them."""
    loop = asyncio.get_running_loop()
    protocol = partial(StubServer, choice, speedup)
    servers = [await loop.create_server(protocol, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent ends


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection for each request
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), float(sys.argv[3])))
