"""A case of soak.py, and the differences that it finds."""

import random
import shutil

import pytest
import soak
import torch

from runtime import checkpoint


@pytest.fixture(scope='module')
def run(fork, corpus):
    return lambda out, *flags, **kwargs: fork('train.py', f'--out_dir={out}', f'--dataset={corpus}', *flags, **kwargs)


def test_random_settings_with_faults(run, tmp_path):
    assert not soak.attempt(random.Random(0), tmp_path, run)


def test_differences_between_runs_are_found(finished, tmp_path):
    a, same = finished(), shutil.copytree(finished(), tmp_path / 'same')
    path = checkpoint.path_of(same, 10)
    intact, state = path.read_bytes(), torch.load(path, weights_only=True)
    state['optimizer']['state']['transformer.wte.weight']['exp_avg'][0] += 1e-9
    torch.save(state, path)
    assert soak.compare(a, same) == 'run.last.optimizer.state.transformer.wte.weight.exp_avg differs'
    path.write_bytes(intact)
    assert not soak.compare(a, same)
    log = same / 'metrics.jsonl'
    log.write_text(''.join(log.read_text().splitlines(keepends=True)[:-1]))
    assert soak.compare(a, same).endswith('is missing')
