"""Checks, resuming, log, faults, saving and shutdown of a run. These modules know its settings."""
