"""Weights and state on disk."""

from trimaran.checkpoint.safetensors_folder import digest_files
from trimaran.checkpoint.save import save_trained_weights, save_weights
from trimaran.checkpoint.weights import LoadedWeights, load_weights

__all__ = ["LoadedWeights", "digest_files", "load_weights", "save_trained_weights", "save_weights"]
