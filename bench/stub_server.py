"""Stub servers with vLLM's endpoint for tokens: replies differ in their first token, and take the time of their tokens.

`rollout_workers.py` starts it with the arguments COUNT FILE SPEEDUP. Listens on COUNT ports, which it prints as JSON,
until its input ends. FILE has a completion as JSON, without the bracket at its start, with `FIRST_TOKEN` in place of
the first token. Does as little as possible, so that it takes few of the cores that are measured.
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
FIRST_TOKEN = "the first token"


def share_of(seed: int) -> float:
    """A number from 0 to 1 that looks random."""
    return (seed * 2_654_435_761 % 2**32) / 2**32


def latency_s(seed: int, speedup: float) -> float:
    """How long a stub server takes for a reply."""
    return REPLY_TOKENS * TOKEN_S * (1 - SPREAD + 2 * SPREAD * share_of(seed)) / speedup


class StubServer(asyncio.Protocol):
    """A connection with one request after the other."""

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
            request, self.received, self.length = bytes(self.received), bytearray(), 0
            self.answer(request)

    def answer(self, request: bytes) -> None:
        """Answer a request, one for completions after the time that they take."""
        if request.startswith(b"POST"):
            seed, n = (int(re.search(rb'"%b": ?(\d+)' % name, request)[1]) for name in (b"seed", b"n"))
            choices = b",".join(b'{"index":%d,%b' % (index, self.completion(seed + index)) for index in range(n))
            asyncio.get_running_loop().call_later(
                latency_s(seed, self.speedup), self.reply, b'{"choices":[' + choices + b"]}"
            )
        else:
            self.reply(b'{"data":[{"max_model_len":100000}]}')

    def completion(self, seed: int) -> bytes:
        """The completion of a seed: conversations of a group soon differ, so that no two share a request."""
        return self.choice.replace(json.dumps(FIRST_TOKEN).encode(), b"%d" % (20 + int(380 * share_of(seed))))

    def reply(self, body: bytes) -> None:
        """Send an answer."""
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


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
