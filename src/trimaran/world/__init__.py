"""The processes of a run and what they stand on: environment, device, groups, place, randomness, workers.

Nothing is imported here: `environment` and `workers` are used before torch is, and without it.
"""
