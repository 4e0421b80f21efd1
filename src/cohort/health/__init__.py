"""How a run goes: warning signs in its metrics."""
