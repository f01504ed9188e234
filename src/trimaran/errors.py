"""The exception tree. Every error a user can cause carries value, rule and remedy."""

from __future__ import annotations


class TrimaranError(Exception):
    """Base of everything this package raises on purpose.

    `value` says what is wrong, with the offending value; `rule` what holds in general;
    `remedy` what to do now. All three are sentences. `exit_code` is what the command line returns.
    """

    exit_code = 1

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(value, rule, remedy)
        self.value = value
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.value}\n{self.rule} {self.remedy}".rstrip()


class UsageError(TrimaranError):
    """The command line, or a call, does not say something that can be done."""

    exit_code = 2


class JobError(TrimaranError):
    """The job contradicts itself, or the model does not do what the job says."""


class DataError(TrimaranError):
    """A source, a sample or a batch cannot be used."""


class LossError(JobError):
    """A loss or metric does not keep its contract of (total, weight)."""


class OptimizerError(JobError):
    """An optimizer, a schedule or a parameter group cannot be built as described."""


class LayoutError(TrimaranError):
    """A layout contradicts itself, the job, or the number of processes."""

    exit_code = 2


class ClusterError(TrimaranError):
    """A chip, node or link is unknown, or this machine lacks what was asked for."""


class RunError(TrimaranError):
    """A run directory belongs to something else, or a run cannot go on."""


class CheckpointError(TrimaranError):
    """Saved weights or state are damaged, or do not fit what they are loaded into."""


class NumericsError(TrimaranError):
    """Numbers left the range in which training means anything."""


class WorkerError(TrimaranError):
    """A worker process died, raised, or stopped answering."""


class DrillError(TrimaranError):
    """A fault that was made on purpose."""
