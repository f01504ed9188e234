"""Does a job do what it says? Small checks on one device, before any large run."""

from trimaran.prove.bench import Limits
from trimaran.prove.check import CHECKS, check_job
from trimaran.prove.finding import Finding

__all__ = ["CHECKS", "Finding", "Limits", "check_job"]
