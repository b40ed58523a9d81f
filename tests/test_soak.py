"""A few of the random cases that dev/soak.py tries by the hundred, and that those cases can fail."""

import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY
from test_checkpoint import good, resumed  # noqa: F401 - a fixture

import train as train_module
from dev import cases, soak
from model import GPT, GPTConfig
from runtime import checkpoint, hf


@pytest.mark.parametrize('seed', range(4))
def test_random_settings_stopped_and_resumed(train, tmp_path, seed):
    """Bit for bit the run that was never stopped."""
    assert not cases.try_settings(random.Random(seed), tmp_path, train)


def test_soak_runs_train_py(tmp_path, corpus):
    with soak.forks(tmp_path) as train:
        done = train(tmp_path / 'out', *TINY, f'--dataset={corpus}', '--learning_rate=1e-3', '--max_iters=2')
        failed = train(tmp_path / 'out', *TINY, f'--dataset={corpus}', '--learning_rate=1e-3')
    assert done.code == 0 and 'saved' in done.out and not done.err
    assert failed.code == 1 and 'holds checkpoints' in failed.err


def test_random_settings_are_valid_and_of_every_kind(monkeypatch):
    drawn = [cases.settings(random.Random(seed)) for seed in range(150)]
    for s in drawn:
        train_module.resolve([f'--{key}={value}' for key, value in s.items()])
    assert {'adamw', 'sophiag', 'sophiah', 'muon', 'torch:SGD'} <= {s['optimizer_name'] for s in drawn}
    assert {s.get('parallel') for s in drawn} == {None, 'ddp', 'fsdp'}
    ends = [end for seed, s in enumerate(drawn) for end in cases.interruptions(random.Random(seed), s)]
    assert all(any(word in f'{end}' for end in ends) for word in ('SIGTERM', 'SIGUSR1', 'fsync', 'max_hours'))


def test_differences_between_runs_are_found(train, tmp_path):
    """Another seed, other weights, another optimizer's state, a missing line."""
    for name, flags in {'a': [], 'same': [], 'other': ['--seed=2']}.items():
        assert train(tmp_path / name, '--max_iters=2', '--eval_interval=1', *flags).code == 0
    assert not cases.difference(tmp_path / 'a', tmp_path / 'same')
    assert cases.difference(tmp_path / 'a', tmp_path / 'other').startswith('last checkpoint: state.model.')
    path = checkpoint.path_of(tmp_path / 'same', 2)
    state = torch.load(path, weights_only=True)
    state['optimizer']['state'][0]['exp_avg'][0] += 1e-9
    path.unlink()
    torch.save(state, path)
    assert 'optimizer.state.0.exp_avg: other numbers' in cases.difference(tmp_path / 'a', tmp_path / 'same')
    path.unlink()
    path.hardlink_to(checkpoint.path_of(tmp_path / 'a', 2))
    log = tmp_path / 'same/metrics.jsonl'
    log.write_text(''.join(log.read_text().splitlines(keepends=True)[:-1]))
    assert cases.difference(tmp_path / 'a', tmp_path / 'same').startswith('metrics.jsonl: state: of length')


@pytest.mark.parametrize('seed', range(4))
def test_checkpoints_with_something_wrong(good, tmp_path, seed):  # noqa: F811
    rng, bad = random.Random(seed), tmp_path / 'ckpt_00000003.pt'
    for _ in range(25):
        assert not cases.try_file(rng, good[0], bad, lambda: resumed(bad))


@pytest.mark.parametrize('seed', range(4))
def test_hugging_face_folders_with_something_wrong(tmp_path, seed):
    pytest.importorskip('safetensors', reason='needs requirements-hf.txt')
    model, rng = GPT(GPTConfig(block_size=12, vocab_size=50, n_layer=2, n_head=2, n_embd=16, bias=True)), random.Random(
        seed)
    (tmp_path / 'good').mkdir()
    hf.write(tmp_path / 'good', vars(model.config), model.state_dict())
    for _ in range(25):
        assert not cases.try_folder(rng, tmp_path / 'good', tmp_path / 'bad')


def test_what_says_more_than_one_line_is_found(tmp_path):
    def exits(message):
        raise SystemExit(message)
    assert not cases.one_line(lambda: None, 'x') and not cases.one_line(lambda: exits('x: broken'), 'x')
    assert 'said' in cases.one_line(lambda: exits('x: broken\nfor two reasons'), 'x')
    assert 'said' in cases.one_line(lambda: exits('something is broken'), 'x')
    assert 'ZeroDivisionError' in cases.one_line(lambda: 1 / 0, 'x')


def test_standard_streams_that_fail(corpus, tmp_path):
    """A full one and one without a reader, in an encoding without most characters."""
    flags = ['--n_layer=1', '--n_head=1', '--n_embd=8', '--model_size=tiny', '--block_size=8', '--total_batch_size=2',
             '--batch_size=2', '--max_iters=3', '--warmup_iters=1', '--eval_iters=1', '--eval_interval=3',
             '--log_interval=1', '--device=cpu', '--learning_rate=1e-2', f'--dataset={corpus}']
    assert not cases.try_streams(random.Random(5), tmp_path / 'run', flags)
    assert 'exit code 1' in cases.try_streams(random.Random(5), tmp_path / 'again', [*flags, '--n_head=3'])


def test_prepare_with_killed_processes(tmp_path):
    """Of it and of its workers, at random moments."""
    text = cases.text_file(tmp_path / 'text.txt', documents=20)
    command = [sys.executable, 'data/text/prepare.py', text, '--out_dir', tmp_path / 'whole', '--tokenizer=byte',
               '--val_fraction=0.1']
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert not cases.try_prepare(random.Random(0), tmp_path / 'killed', text, tmp_path / 'whole')
    (tmp_path / 'whole/val.bin').write_bytes(b'other')
    assert 'other bins' in cases.try_prepare(random.Random(0), tmp_path / 'again', text, tmp_path / 'whole')
