"""Sample on a fleet of servers of any kind: supervision, request scheduling and weight updates."""
