"""One optimizer step, whatever the layout."""

from trimaran.engine.parallelize import build_engine
from trimaran.engine.result import StepResult
from trimaran.engine.step import Engine
from trimaran.engine.trial import Trial, try_micro_batch

__all__ = ["Engine", "StepResult", "Trial", "build_engine", "try_micro_batch"]
