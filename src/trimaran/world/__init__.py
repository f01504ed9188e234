"""The processes of a run and what they stand on: environment, device, groups, place, randomness, workers."""

from trimaran.world.device import describe_device, find_local_chip, memory_bytes, set_numerics
from trimaran.world.environment import WorkerEnvironment, discover
from trimaran.world.groups import World, close_world, join_default_group, open_world
from trimaran.world.place import AXES, Place, place_of
from trimaran.world.rng import derive_seed, seed_everything, seed_forward

__all__ = [
    "AXES",
    "Place",
    "WorkerEnvironment",
    "World",
    "close_world",
    "derive_seed",
    "describe_device",
    "discover",
    "find_local_chip",
    "join_default_group",
    "memory_bytes",
    "open_world",
    "place_of",
    "seed_everything",
    "seed_forward",
    "set_numerics",
]
