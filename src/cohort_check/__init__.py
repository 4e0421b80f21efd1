"""Check configurations of Cohort and of other trainers before launch. Nothing in a checked file is run or fetched."""

from cohort_check.check_file import WORLD_SIZES, FileReport, check_file
from cohort_check.convert import convert_file
from cohort_check.findings import RULES, Finding
from cohort_check.launch import Launch

__all__ = ["RULES", "WORLD_SIZES", "FileReport", "Finding", "Launch", "check_file", "convert_file"]
