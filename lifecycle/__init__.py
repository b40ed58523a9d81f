"""The parts of a run that know its settings: checks, resuming, log, faults, saving, the end."""
