"""Environments of libraries, each over `async def run(row, model)`. A library is imported when a run uses it."""
