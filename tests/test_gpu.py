"""dev/gpu.sh: its data come back without loss, its commands are those of the plan, and finished steps are skipped."""

import os
import shlex
import subprocess
import sys
import tarfile

import numpy as np
from conftest import ROOT, write_bins

import train
from data.loader import open_dataset


def gpu_sh(work, *words, python):
    """What the script prints."""
    return subprocess.run(['bash', 'dev/gpu.sh', *map(str, words)], env=dict(os.environ, WORK=str(work), PYTHON=python),
                          cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_packed_data_come_back_and_the_pieces_held_out_are_not_for_training(tmp_path):
    work, pieces = tmp_path / 'gpu', np.arange(91 * 10240) // 10240
    write_bins(tmp_path / 'bins', pieces, np.arange(1500), vocab_size=50257)
    (tmp_path / 'model.py').touch()
    gpu_sh(work, 'pack', tmp_path / 'bins', tmp_path, python=sys.executable)
    with tarfile.open(work / 'data.tar.xz') as archive:
        archive.extractall(tmp_path / 'there', filter='data')
    there = tmp_path / 'there/data'
    train_data, val = open_dataset(f'{there}/books:1,{there}/heldout:0', 64)
    (books,) = train_data.bins
    held = np.isin(pieces, (44, 89))
    assert np.array_equal(val['heldout'].tokens, pieces[held]) and np.array_equal(val['books'].tokens, np.arange(1500))
    assert np.array_equal(books.tokens, pieces[~held]) and (there / 'nanoGPT/model.py').exists()


def test_the_commands_are_those_of_the_plan(tmp_path):
    """The settings of records/gpu_30m, and one change."""
    said = gpu_sh(tmp_path, 'runs', 'speed', python='echo')
    assert len(said.splitlines()) == 12 and gpu_sh(tmp_path, 'runs', 'speed', python='echo') == ''  # all is there
    runs = {path.parent.name: train.resolve(shlex.split(path.read_text())[1:])
            for path in tmp_path.glob('runs/*/finished.txt')}
    assert {name: (c.optimizer_name, c.seed, c.hessian_clip, c.grad_clip, c.learning_rate)
            for name, c in runs.items()} == {
        **{f'hessian_clip_{seed}': ('sophiag', seed, 1, 1, 0.0016) for seed in (1338, 1339, 1340)},
        **{f'no_grad_clip_{seed}': ('sophiag', seed, 0, 0, 0.0016) for seed in (1338, 1339)},
        'adamw_1341': ('adamw', 1341, 0, 1, 0.0048)}
    for c in runs.values():
        assert (c.model_size, c.total_batch_size, c.batch_size, c.max_iters, c.warmup_iters, c.beta1) == (
            '30M', 32, 32, 3000, 1000, 0.9)
        if c.optimizer_name == 'sophiag':
            assert (c.gamma, c.beta2, c.hessian_batch_size, c.hessian_parts) == (0.15, 0.99, 16, 1)
    assert f'--baseline={tmp_path}/data/nanoGPT' in (tmp_path / 'results/speed_125M.json').read_text()
    with tarfile.open(tmp_path / 'gpu.tar.gz') as archive:
        assert {'runs/adamw_1341/finished.txt', 'results/speed_355M_sophiag.json'} <= {*archive.getnames()}


def test_a_step_that_fails_is_not_finished(tmp_path):
    said = gpu_sh(tmp_path, 'speed', python='false')
    assert said.count('failed:') == 6 and not [*tmp_path.glob('results/*.json')]
