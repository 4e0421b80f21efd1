"""The HTTP server of the page: routes, access checks, live events."""
