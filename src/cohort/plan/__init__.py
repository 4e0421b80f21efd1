"""Predict a run's steps, memory and time before anything is loaded."""

from cohort.plan.geometry import RunPlan, plan_run

__all__ = ["RunPlan", "plan_run"]
