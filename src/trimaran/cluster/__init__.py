"""Where a job runs: `Cluster`, with figures that each have a source. No torch."""

from trimaran.cluster.cluster import Chip, Cluster, find_chip

__all__ = ["Chip", "Cluster", "find_chip"]
