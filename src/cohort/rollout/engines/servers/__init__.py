"""Sample on a fleet of servers of any kind: supervision, request scheduling and weight updates."""

from cohort.rollout.engines.servers.fleet import Fleet
from cohort.rollout.engines.servers.handles import FleetLimits, RemoteServer, RunningServer, ServerHandle
from cohort.rollout.engines.servers.requests import BusyError, Client, GeneratedGroup, GenerateRequest, ServerError
from cohort.rollout.engines.servers.server_engine import Channel, ServerEngine

__all__ = [
    "BusyError",
    "Channel",
    "Client",
    "Fleet",
    "FleetLimits",
    "GenerateRequest",
    "GeneratedGroup",
    "RemoteServer",
    "RunningServer",
    "ServerEngine",
    "ServerError",
    "ServerHandle",
]
