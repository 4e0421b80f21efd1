"""Predict a run's steps, memory and time before anything is loaded."""

from cohort.plan.schedule import RunSchedule, plan_run

__all__ = ["RunSchedule", "plan_run"]
