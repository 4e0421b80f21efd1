"""How a run goes: one table of rules, evaluated after every step."""
