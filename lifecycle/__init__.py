"""What keeps a run alive and knows its settings: checks, resuming, log, faults, saving, the end."""
