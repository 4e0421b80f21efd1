"""Middleware for vLLM's API server (`--middleware`): reject requests to incomplete weights.

Standard library only, since vLLM's environment does not have Cohort.
"""

from cohort_server_auth import App, Receive, Scope, Send, answer

_BROKEN = b'{"error": "an update of this server\'s weights is incomplete: it answers again after a complete one"}'


class RequireWholeWeights:
    """ASGI middleware that answers no request after an update of weights broke off, until one is complete.

    While an update is under way vLLM is paused and keeps requests waiting; it must not resume before the end.
    """

    open_while_broken = frozenset(
        {"/health", "/version", "/v1/models", "/get_world_size", "/weight_info", "/server_info"}
        | {"/pause", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"}
        | {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
    )

    def __init__(self, app: App):
        """Wrap an application."""
        self.app = app
        self.is_updating = self.is_broken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what samples no tokens, and everything while the weights are whole."""
        path = scope.get("path", "")
        refused = (self.is_broken and path not in self.open_while_broken) or (self.is_updating and path == "/resume")
        if scope["type"] == "http" and refused:
            await answer(send, 503, _BROKEN, b"application/json")
        elif path in ("/update_weights", "/finish_weight_update"):
            await self._update(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _update(self, scope: Scope, receive: Receive, send: Send) -> None:
        succeeded = False

        async def watch(message: Scope) -> None:
            nonlocal succeeded
            if message["type"] == "http.response.start" and message["status"] == 200:
                succeeded = True
                if scope["path"] == "/finish_weight_update":
                    self.is_updating = self.is_broken = False
                else:  # the first are the declared tensors, which match
                    self.is_updating = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if not succeeded:
                self.is_broken |= self.is_updating
