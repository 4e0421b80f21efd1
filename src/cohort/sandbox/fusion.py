"""The backend `sandbox_fusion`: a SandboxFusion server runs the guest program."""

import httpx2

from cohort.sandbox.interpreter import GUEST_SOURCE
from cohort.sandbox.limits import Limits
from cohort.sandbox.process import Conversation, ProcessResult

_PROGRAM = """import sys
sys.argv = ["guest", {settings!r}]
exec(compile({source!r}, "guest.py", "exec"), {{"__name__": "__main__"}})
"""
_ANSWER_S = 30.0  # for the server's queue and the transfer, besides the run


class SandboxFusion:
    """A remote sandbox (`POST /run_code`). What it holds is the server's business; the guest limits itself too."""

    name = "sandbox_fusion"
    holds_sessions = False
    guest_filter = b""
    counts_processes = False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = httpx2.Client()

    def missing(self) -> str | None:
        """See `Backend`."""
        return None

    def run(self, settings: str, request: bytes | Conversation, limits: Limits, *, toolchain: bool) -> ProcessResult:
        """See `Backend`.

        Raises:
            OSError: no answer, or the server says that its sandbox failed.
        """
        assert isinstance(request, bytes), "it holds no sessions"
        body = {
            "language": "python",
            "code": _PROGRAM.format(settings=settings, source=GUEST_SOURCE.read_text()),
            "stdin": request.decode(),
            "run_timeout": limits.wall_s,
        }
        try:
            response = self._client.post(f"{self._url}/run_code", json=body, timeout=limits.wall_s + _ANSWER_S)
            response.raise_for_status()
            answer = response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise OSError(f"{self._url}/run_code: {error}") from error
        ran = answer.get("run_result") or {}
        if answer.get("status") == "SandboxError" or not isinstance(ran.get("stdout"), str):
            raise OSError(f"{self._url}/run_code: {answer.get('message') or answer.get('status')}")
        timed_out = ran.get("status") == "TimeLimitExceeded"
        return ProcessResult(
            output=ran["stdout"].encode()[: limits.channel_bytes],
            errors=str(ran.get("stderr") or "").encode()[:4096],
            ending="wall time" if timed_out else "exited",
            exit_code=None if timed_out else ran.get("return_code"),
            wall_s=float(ran.get("execution_time") or 0.0),
        )
