"""Random numbers that are pure functions of (seed, stream, iteration), from the counter-based generator Philox.

Global generators are seeded from them before each use. So a run draws the same numbers with any number of ranks,
micro-batch and optimizer, and after any interruption, and checkpoints hold no generator's state."""

import random

import numpy as np
import torch

# Streams, the second half of Philox's key
SEQUENCES, LABELS, VECTORS, DROPOUT, AUGMENTATION, LOOP = range(6)


def keyed_bits(seed, stream, iteration, n=1):
    """Return `n` random uint64, a pure function of the arguments, the same in every version of NumPy (raw Philox)."""
    return keyed_generator(seed, stream, iteration).bit_generator.random_raw(n)


def keyed_generator(seed, stream, iteration, place=0):
    """Return a NumPy generator for an iteration's `place`, such as a sequence, a pure function of the arguments."""
    key = np.array([seed % 2 ** 64, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, place, iteration], dtype=np.uint64)))


def keyed_seed(seed, stream, iteration, rank=0):
    """Return a 63-bit seed for a PyTorch generator, another one on each rank."""
    return int(keyed_bits(seed, stream, iteration, rank + 1)[rank] >> 1)


def seed_all(seed):
    """Seed the global generators of PyTorch, NumPy and Python, for code that draws from them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2 ** 32)
    random.seed(seed)


def keyed_uniforms(seed, stream, iteration, shape):
    """Return a float32 tensor of uniform random numbers in [0, 1), a pure function of the arguments."""
    bits = keyed_bits(seed, stream, iteration, int(np.prod(shape)))
    return torch.from_numpy(((bits >> np.uint64(40)) * np.float32(2 ** -24)).astype(np.float32).reshape(shape))
