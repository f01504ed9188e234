"""One optimizer step, whatever the layout."""

from trimaran.engine.measure import evaluation_mode
from trimaran.engine.memory import StateBytes, measure_state_bytes, predict_state_bytes
from trimaran.engine.parallelize import build_engine
from trimaran.engine.result import StepResult
from trimaran.engine.step import Engine
from trimaran.engine.trial import Trial, try_micro_batch

__all__ = [
    "Engine",
    "StateBytes",
    "StepResult",
    "Trial",
    "build_engine",
    "evaluation_mode",
    "measure_state_bytes",
    "predict_state_bytes",
    "try_micro_batch",
]
