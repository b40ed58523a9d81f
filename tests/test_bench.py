"""dev/bench.py: its columns and its baselines; and that it steps as train.py does."""

import json

import pytest
import torch
from conftest import TINY, metrics

import train
from dev import bench
from runtime.distributed import World

MODEL = '--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --total_batch_size=4 --batch_size=2 --device=cpu'
BASELINE = '''
import dataclasses
import model
from runtime import gpt
import torch

GPTConfig = dataclasses.make_dataclass('GPTConfig', gpt.NANOGPT_ARGS)


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(model.GPTConfig(**vars(config)))

    def forward(self, idx, targets):
        assert idx.is_contiguous() and targets.is_contiguous()
        logits = super().forward(idx)[0]
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas)
'''


def test_a_config_may_begin_with_variables_of_the_environment():
    assert bench.environment_of("A=1 B='x=2' --batch_size=3 C=4") == (dict(A='1', B='x=2'), ['--batch_size=3', 'C=4'])
    assert bench.environment_of('config/quickstart.py --seed=1') == ({}, ['config/quickstart.py', '--seed=1'])


def test_every_column_is_measured_where_it_exists(tmp_path):
    (tmp_path / 'peer').mkdir()
    (tmp_path / 'peer' / 'model.py').write_text(BASELINE)
    bench.main(['--rounds', '1', '--baseline', str(tmp_path / 'peer'), '--output',
                str(tmp_path / 'bench.json'), '--profile', str(tmp_path / 'profile.txt'),
                MODEL, f'{MODEL} --optimizer_name=sophiag'])
    profiles = (tmp_path / 'profile.txt').read_text()
    assert profiles.count('aten::mm ') == 4 and profiles.count(f'{MODEL}\n') == 2
    report = json.loads((tmp_path / 'bench.json').read_text())
    adamw, sophiag, peer = rows = report['results']
    assert 'optimizer_name=sophiag' in sophiag['config'] and peer['config'] == f'peer: {adamw["config"]}'
    assert adamw['loss'] == pytest.approx(peer['loss'], rel=1e-5)  # the same weights and sequences
    for row in rows:
        for key in ('step_ms', 'tokens_per_sec', 'optimizer_ms', 'over_adamw', 'memory_gb'):
            assert row[key] > 0, key
        assert ('hessian_ms' in row) == (row is sophiag)
        assert 'mfu' not in row  # of a CPU, whose peak is not known
    assert report['about']['torch'] == torch.__version__


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_it_steps_as_train_py_does(corpus, tmp_path, name, monkeypatch):
    """Iterations 0 and 1, on the same sequences."""
    flags = [*TINY, f'--optimizer_name={name}', '--decay_lr=False', '--learning_rate=1e-2', '--max_iters=2',
             f'--dataset={corpus}', f'--out_dir={tmp_path}']
    train.main(flags)
    c = train.resolve(flags)
    data = train.open_dataset(c.dataset, c.block_size)[0]
    loader = train.TrainLoader(data, c.seed, c.total_batch_size, c.block_size, 0, 1, c.device)
    monkeypatch.setattr(bench.Case, 'batch', lambda self: next(loader))
    case = bench.Case(c, World('cpu', 'gloo'))
    assert case.losses[:2] == pytest.approx(metrics(tmp_path), abs=2e-6)
    case.take_turn()
    assert case.profile().count('aten::mm ') == 2 and [len(one) for one in case.seconds.values()] == [1, 1]
