"""The processes of a run and what they stand on: environment, device, groups, place, randomness, workers."""

from trimaran.world.groups import World, close_world, join_default_group, open_world
from trimaran.world.place import AXES, Place, place_of
from trimaran.world.rng import derive_seed, seed_everything, seed_forward

__all__ = [
    "AXES",
    "Place",
    "World",
    "close_world",
    "derive_seed",
    "join_default_group",
    "open_world",
    "place_of",
    "seed_everything",
    "seed_forward",
]
