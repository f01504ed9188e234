"""Does a job do what it says? Small checks on one device, before any large run. Is a layout equal to one process?"""

from trimaran.prove.bench import Limits
from trimaran.prove.check import CHECKS, check_job
from trimaran.prove.finding import Finding
from trimaran.prove.verify import verify_job
from trimaran.prove.verify_compare import Difference, Row, Verification

__all__ = ["CHECKS", "Difference", "Finding", "Limits", "Row", "Verification", "check_job", "verify_job"]
