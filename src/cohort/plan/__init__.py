"""Predict a run's steps, memory and time before anything is loaded."""

from cohort.plan.schedule import RunSchedule, schedule_run

__all__ = ["RunSchedule", "schedule_run"]
