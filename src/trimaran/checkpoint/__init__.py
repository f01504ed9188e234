"""Weights and state on disk."""

from trimaran.checkpoint.disk import discard_leftovers
from trimaran.checkpoint.export import ExportedWeights, export_weights
from trimaran.checkpoint.finding import (
    Checkpoint,
    Lineage,
    checkpoint_folder,
    find_candidates,
    find_checkpoint,
    list_steps,
    read_checkpoint,
    split_step,
)
from trimaran.checkpoint.hugging_face import describe_hugging_face
from trimaran.checkpoint.reading import open_checkpoint, verify_files
from trimaran.checkpoint.retention import Keeper, Retention
from trimaran.checkpoint.safetensors_folder import digest_files
from trimaran.checkpoint.save import save_trained_weights, save_weights
from trimaran.checkpoint.saving import Owner, Saved, Saver
from trimaran.checkpoint.state import NamedState, StateNames, restore_model
from trimaran.checkpoint.weights import LoadedWeights, load_weights

__all__ = [
    "Checkpoint",
    "ExportedWeights",
    "Keeper",
    "Lineage",
    "LoadedWeights",
    "NamedState",
    "Owner",
    "Retention",
    "Saved",
    "Saver",
    "StateNames",
    "checkpoint_folder",
    "describe_hugging_face",
    "digest_files",
    "discard_leftovers",
    "export_weights",
    "find_candidates",
    "find_checkpoint",
    "list_steps",
    "load_weights",
    "open_checkpoint",
    "read_checkpoint",
    "restore_model",
    "save_trained_weights",
    "save_weights",
    "split_step",
    "verify_files",
]
