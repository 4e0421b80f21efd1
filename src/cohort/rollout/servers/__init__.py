"""Servers that sample, whatever program they are: kept running, given requests, and brought up to date."""

from cohort.rollout.servers.engine import Channel, ServerEngine
from cohort.rollout.servers.fleet import Fleet
from cohort.rollout.servers.handles import FleetLimits, RemoteServer, RunningServer, ServerHandle
from cohort.rollout.servers.requests import BusyError, Client, GeneratedGroup, GenerateRequest, ServerError

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
