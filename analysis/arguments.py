"""Types of command-line flags."""

import argparse


def at_least(low, kind=int):
    """Return an argparse type: numbers of `kind` from `low` on."""
    def number(text):
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f'{text}: must be at least {low}')
        return value
    return number
