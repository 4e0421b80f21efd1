"""Ask whoever answers on a new connection to prove that it is a server of this run, before anything else is sent.

Between the choice of a port and the server's start, or after the server's end, any process can listen there. Without
the proof it would get the secret of all servers, prompts and weights.
"""

import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2 as httpx

from cohort.rollout.engines.servers.handles import ServerError
from cohort.rollout.engines.servers.secret import Secret
from cohort.rollout.engines.servers.server_side.cohort_server_proof import PROOF_CHARACTERS, PROOF_PATH, server_proof

if TYPE_CHECKING:  # comes with httpx2
    from httpcore2 import AsyncNetworkStream, NetworkStream

CONNECTED = "connection.connect_tcp.complete"  # httpcore's trace event whose `return_value` is a new connection
_MAX_HEADER_BYTES = 4096


class _Exchange:
    """The request for a proof, and its answer as it arrives."""

    def __init__(self, url: str, secret: Secret):
        """Prepare a request with a fresh nonce."""
        address = urlsplit(url)
        assert address.port is not None, "the run has chosen the port"
        nonce = secrets.token_hex(16).encode()
        self._url = url
        self._expected = server_proof(secret.text.encode(), nonce, address.port)
        self._received = b""
        self.request = b"GET %s?nonce=%s HTTP/1.1\r\nHost: %s\r\n\r\n" % (
            PROOF_PATH.encode(),
            nonce,
            address.netloc.encode(),
        )

    def is_complete(self, data: bytes) -> bool:
        """Take bytes of the answer; return whether it is complete, and right.

        Raises:
            ServerError: the answer is wrong.
            httpx.RemoteProtocolError: the connection was closed.
        """
        self._received += data
        header, end, body = self._received.partition(b"\r\n\r\n")
        if len(header) <= _MAX_HEADER_BYTES and len(body) < PROOF_CHARACTERS:
            if not data:
                raise httpx.RemoteProtocolError("the connection was closed before the server had proved who it is")
            return False
        if not end or not secrets.compare_digest(body, self._expected):
            raise ServerError(
                f"the process that answers at {self._url} is not the server that this run has started: it cannot prove "
                f"that it knows the run's secret, and was sent nothing; another process has taken the port"
            )
        return True


def check_server(stream: "NetworkStream", url: str, secret: Secret, *, timeout_s: float | None) -> None:
    """Check the server at the other end of a new connection, and close the connection if it fails.

    Args:
        stream: the connection.
        url: the server's address.
        secret: what the server must know.
        timeout_s: maximum time per read and write.

    Raises:
        ServerError: the process there does not know the secret.
        httpx.RemoteProtocolError: it closed the connection.
    """
    exchange = _Exchange(url, secret)
    try:
        stream.write(exchange.request, timeout_s)
        while not exchange.is_complete(stream.read(_MAX_HEADER_BYTES, timeout_s)):
            pass
    except BaseException:
        stream.close()
        raise


async def check_server_async(stream: "AsyncNetworkStream", url: str, secret: Secret) -> None:
    """Do the same as `check_server` without blocking; the caller has a timeout."""
    exchange = _Exchange(url, secret)
    try:
        await stream.write(exchange.request)
        while not exchange.is_complete(await stream.read(_MAX_HEADER_BYTES)):
            pass
    except BaseException:
        await stream.aclose()
        raise
