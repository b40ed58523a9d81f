"""Command-line arguments: a parser, a type of number."""

import argparse
import math


def argument_parser(doc, **options):
    """Return an ArgumentParser that prints `doc` as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def at_least(low, kind=int, at_most=math.inf):
    """Return an argparse type for numbers of `kind` from `low` to `at_most`."""
    def number(text):
        value = kind(text)
        if not low <= value <= at_most:
            raise argparse.ArgumentTypeError(f'{text}: must be at least {low}'
                                             + f' and at most {at_most}' * (at_most < math.inf))
        return value
    return number
