"""What can happen to a run of days, done to the real train.py as a process: it resumes exactly, or says why not."""

import collections
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import OPTIMIZERS, ROOT, STOP_IN_EVALUATION, finish, iterations, metrics, rejection, start, write_bins

from data.loader import sequence_starts
from runtime import checkpoint, runlog
from runtime.signals import NOT_FINITE, STARTED, STOPPED, StopSignals

TIMING = {'time', 'step_ms', 'hessian_ms', 'tokens_per_sec', 'mfu', 'memory_gb'}


@pytest.fixture(scope='module')
def reference(train, tmp_path_factory):
    """reference(name, ranks): the out_dir of an undisturbed run."""
    made = {}

    def get(name='adamw', ranks=1):
        if (name, ranks) not in made:
            out = tmp_path_factory.mktemp(f'{name}{ranks}')
            done = train(out, name=name, ranks=ranks)
            assert done.code == 0, done.err
            made[name, ranks] = out
        return made[name, ranks]
    return get


def state(out, iteration=10):
    return checkpoint.load(checkpoint.path_of(out, iteration))[1]


def assert_same_run(a, b):
    """Both runs ended in the same state, bit for bit, and have logged the same."""
    for ours, theirs in zip(state(a)['model'].items(), state(b)['model'].items()):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    ours, theirs = (dict(state(out)['train_state'], seconds=None) for out in (a, b))
    assert ours == theirs and state(a)['best_val_loss'] == state(b)['best_val_loss']
    ours, theirs = state(a)['optimizer']['state'], state(b)['optimizer']['state']
    assert ours.keys() == theirs.keys()
    for index, entries in ours.items():
        assert entries.keys() == theirs[index].keys()
        assert all(torch.equal(value, theirs[index][key]) for key, value in entries.items())
    logs = [[{k: v for k, v in json.loads(line).items() if k not in TIMING}
             for line in (out / 'metrics.jsonl').read_text().splitlines()] for out in (a, b)]
    assert logs[0] == logs[1]


def content(out):
    return {p: p.read_bytes() for p in sorted(out.rglob('*')) if p.is_file() and p.name != 'lock'}


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('ranks', [1, 2])
def test_resume_is_bit_exact(train, reference, tmp_path, ranks, name):
    """Cut before, at, and after a Hessian iteration."""
    for cut in (4, 5, 6):
        faults = f'at({cut - 1}, kill(signal.SIGTERM))'
        done = train(tmp_path, '--init_from=auto', name=name, ranks=ranks, faults=faults)
        assert done.code == STOPPED and f'stopped at iteration {cut} by SIGTERM' in done.out, done.err
    done = train(tmp_path, '--init_from=resume', name=name, ranks=ranks)
    assert done.code == 0 and 'ckpt_00000006.pt at iteration 6 of 10' in done.out, done.err
    assert_same_run(tmp_path, reference(name, ranks))


def test_resume_on_another_world_size_and_micro_batch(train, reference, tmp_path):
    assert train(tmp_path, name='sophiah', faults='at(4, kill(signal.SIGTERM))').code == STOPPED
    done = train(tmp_path, '--init_from=resume', '--batch_size=1', '--eval_iters=8', name='sophiah', ranks=2)
    assert done.code == 0 and 'changed: batch_size = 1, was 2' in done.out
    for key in ('train/loss', 'val/loss', 'hessian_norm'):
        assert metrics(tmp_path, key) == pytest.approx(metrics(reference('sophiah'), key), rel=1e-4)


def test_a_resumed_run_has_its_own_settings_and_counts_on(train, tmp_path):
    """Tokens of mini-batches of different size, and seconds; the optimizer takes the new β1."""
    assert train(tmp_path).code == 0
    assert train(tmp_path, '--init_from=resume', '--total_batch_size=8', '--beta1=0.5', '--max_iters=12').code == 0
    assert metrics(tmp_path, 'tokens')[-1] == (10 * 4 + 2 * 8) * 32
    times = metrics(tmp_path, 'time')
    assert times == sorted(times) and times[-1] > 0
    assert all(group['betas'][0] == 0.5 for group in state(tmp_path, 12)['optimizer']['param_groups'])


def test_changed_settings_stay_in_config_json(train, tmp_path):
    """Their values, and from which iteration they apply, over later resumes as well."""
    def changes():
        found = json.loads((tmp_path / 'config.json').read_text())['changes']
        return sorted(found, key=lambda change: (change['iter'], change['key']))

    assert train(tmp_path, '--max_iters=4').code == 0 and changes() == []
    flags = ['--init_from=auto', '--max_iters=6', '--lr_decay_iters=4', '--min_lr=5e-4', '--grad_clip=0.5']
    assert train(tmp_path, *flags).code == 0
    expected = [{'iter': 4, 'key': 'grad_clip', 'from': 1.0, 'to': 0.5},
                {'iter': 4, 'key': 'max_iters', 'from': 4, 'to': 6}]
    assert changes() == expected
    assert train(tmp_path, *flags, '--grad_clip=0').code == 0
    assert changes() == [*expected, {'iter': 6, 'key': 'grad_clip', 'from': 0.5, 'to': 0.0}]


# ----------------------------------------------------------------------------------------------------------------------
# Stops


def test_a_signal_from_outside_saves_and_stops(train, tmp_path):
    process = start(tmp_path, '--max_iters=1000000', '--eval_interval=1000000')
    for line in process.stdout:
        if line.startswith('iter 20/'):
            process.send_signal(signal.SIGINT)
            break
    code, out, err = finish(process)
    assert code == STOPPED and err.startswith('Ctrl-C: stopping after this iteration') and err.count('\n') == 1
    (iteration,) = iterations(tmp_path)
    assert f'stopped at iteration {iteration} by SIGINT' in out
    assert len(metrics(tmp_path)) == iteration == state(tmp_path, iteration)['iter_num']


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_an_iteration_saves_and_stops_after_it(train, tmp_path, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f'{number.name} is ignored here, as under nohup')
    done = train(tmp_path, faults=f'at(6, kill({int(number)}))')
    assert done.code == STOPPED and f'stopped at iteration 7 by {number.name}' in done.out
    assert done.err == f'{number.name}: stopping after this iteration, with a checkpoint\n'
    assert iterations(tmp_path) == [7, 5] and len(metrics(tmp_path)) == 7


def test_a_stop_during_evaluation_makes_it_again_later(train, reference, tmp_path):
    """Only one of two ranks gets the signal, in the midst of the second evaluation; both stop together."""
    done = train(tmp_path, ranks=2, faults=STOP_IN_EVALUATION)
    assert done.code == STOPPED and 'stopped at iteration 5 by another rank' in done.out, done.err
    assert iterations(tmp_path) == [5] and len(metrics(tmp_path, 'val/loss')) == 1
    assert train(tmp_path, '--init_from=auto', ranks=2).code == 0
    assert_same_run(tmp_path, reference('adamw', 2))


def test_sigusr1_saves_and_continues(train, reference, tmp_path):
    done = train(tmp_path, '--keep_checkpoints=5', faults='at(2, kill(signal.SIGUSR1))')
    assert done.code == 0 and iterations(tmp_path) == [10, 5, 3]
    assert_same_run(tmp_path, reference())


def test_sigusr1_before_the_loop_ends_no_run(train, tmp_path):
    done = train(tmp_path, faults="""
open_run = checkpoint.open_run
def signalled(*args, **kwargs):
    kill(signal.SIGUSR1)()
    return open_run(*args, **kwargs)
checkpoint.open_run = signalled
""")
    assert done.code == 0 and iterations(tmp_path)[0] == 10, done.err


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs /dev/full')
def test_a_log_that_cannot_be_written_ends_no_run(train, reference, tmp_path):
    """As where it goes to a full disk, or the terminal has gone."""
    done = train(tmp_path, faults="""
def fill():
    for stream in (1, 2):
        os.dup2(os.open('/dev/full', os.O_WRONLY), stream)
at(3, fill)
""")
    assert done.code == 0 and 'iter 2' in done.out and 'iter 4' not in done.out
    assert_same_run(tmp_path, reference())


def test_max_hours_stops(train, tmp_path):
    """The hour is over as iteration 3 begins, the last one then, however busy the machine is."""
    done = train(tmp_path, '--max_iters=1000000', '--eval_interval=1000000', '--max_hours=1', faults="""
from runtime.signals import StopSignals
def hour():
    stops, = (o for o in gc.get_objects() if isinstance(o, StopSignals))
    stops.deadline -= 3600
at(3, hour)
""")
    assert done.code == STOPPED and 'by max_hours' in done.out
    assert iterations(tmp_path) == [len(metrics(tmp_path))] == [4]


def test_max_hours_are_hours(monkeypatch):
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    assert StopSignals(2.0).deadline - STARTED == pytest.approx(7200) and StopSignals().deadline == float('inf')


def test_a_second_ctrl_c_ends_at_once(train, tmp_path):
    faults = """
at(3, kill(signal.SIGINT))
at(3, lambda: time.sleep(1.1))
at(3, kill(signal.SIGINT))
"""
    assert train(tmp_path, faults=faults).code == -signal.SIGINT and not iterations(tmp_path)


def test_eval_only_writes_nothing(train, reference, tmp_path):
    before = content(reference())
    done = train(reference(), '--eval_only=True', '--init_from=resume')
    assert done.code == 0 and f'val loss {metrics(reference(), "val/loss")[-1]:.4f}' in done.out
    assert content(reference()) == before
    assert train(tmp_path / 'new', '--eval_only=True').code == 0 and not (tmp_path / 'new').exists()


# ----------------------------------------------------------------------------------------------------------------------
# Saving


def test_killed_while_saving(train, reference, tmp_path):
    """kill -9 with half of the second checkpoint written: the run resumes from the first, as if undisturbed."""
    done = train(tmp_path, '--eval_interval=5', faults="""
save, calls = torch.save, []
def interrupted(state, f):
    calls.append(1)
    save(state, f)
    if len(calls) == 2:
        f.truncate(f.tell() // 2)
        kill(signal.SIGKILL)()
torch.save = interrupted
""")
    assert done.code == -signal.SIGKILL
    assert iterations(tmp_path) == [5] and list(tmp_path.glob('*.partial'))
    assert train(tmp_path, '--init_from=auto').code == 0
    assert not list(tmp_path.glob('*.partial'))
    assert_same_run(tmp_path, reference())


FULL_DISK = """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""


def test_full_disk(train, reference, tmp_path):
    """No file may grow beyond 20 kB while the run wants to save: it says so, continues, and saves later if it can."""
    faults = (FULL_DISK + 'at(2, kill(signal.SIGUSR1))\nat(4, lambda: limit(20_000))',
              FULL_DISK + 'at(4, lambda: limit(20_000))\nat(7, lambda: limit(-1))')
    stays, passes = (train(tmp_path / out, faults=fault) for out, fault in zip(('stays', 'passes'), faults))
    assert stays.code == 1 and 'the last checkpoint could not be saved' in stays.err
    assert iterations(tmp_path / 'stays') == [3] and checkpoint.newest(tmp_path / 'stays')
    assert passes.code == 0 and iterations(tmp_path / 'passes') == [10]
    for done, out in ((stays, 'stays'), (passes, 'passes')):
        assert 'ckpt_00000005.pt: could not be saved (File too large); older checkpoints are kept' in done.err
        assert not list((tmp_path / out).glob('*.partial'))
        assert metrics(tmp_path / out) == metrics(reference())


def test_the_best_is_the_lowest_that_was_saved(train, tmp_path):
    """The disk is full at the lowest loss, that of iteration 4; afterwards it grows, but stays below that of 2."""
    flags = ['--eval_interval=2', '--keep_checkpoints=9', '--decay_lr=False', '--max_iters=8']
    done = train(tmp_path, *flags, faults=FULL_DISK + """
def worse():
    for group in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)][0].param_groups:
        group['maximize'] = True
at(3, lambda: limit(20_000))
at(4, worse)
at(4, lambda: limit(-1))
""")
    losses = dict(zip(range(0, 10, 2), metrics(tmp_path, 'val/loss')))
    assert done.code == 0 and iterations(tmp_path) == [8, 6, 2], done.err
    assert losses[4] < losses[6] < losses[2], losses
    best = checkpoint.load(tmp_path / 'best.pt')[1]
    assert best['iter_num'] == 6 and best['best_val_loss'] == losses[6]


def test_a_line_of_metrics_is_written_whole_or_not(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    runlog.append_line(path, '{"iter": 1}')
    code = FULL_DISK + f"""
import pathlib
limit(20)
runlog.append_line(pathlib.Path({str(path)!r}), '{{"iter": 2, "long": 1}}')
"""
    done = subprocess.run([sys.executable, '-c', f'from runtime import runlog\n{code}'], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and 'a line could not be written' in done.stderr
    assert path.read_text() == '{"iter": 1}\n'


def test_what_will_be_written_again_is_dropped_from_the_log(tmp_path):
    """And what a crash has torn; the evaluation of the checkpoint's own iteration stays."""
    path = tmp_path / 'metrics.jsonl'
    good = '{"iter": 4, "lr": 1}\n{"iter": 5, "val/loss": 3}\n'
    path.write_text(good + '{"iter": 5, "lr": 1}\n{"iter": 6, "l\n3\n')
    runlog.rewind_log(path, 5, 5)
    assert path.read_text() == good


def test_without_always_save_checkpoint_the_best_and_the_last_are_saved(train, tmp_path):
    """The loss grows from the fifth iteration on."""
    done = train(tmp_path, '--always_save_checkpoint=False', '--eval_interval=2', '--decay_lr=False', faults="""
def worse():
    for group in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)][0].param_groups:
        group['maximize'] = True
at(4, worse)
""")
    assert done.code == 0 and iterations(tmp_path) == [10, 4], metrics(tmp_path, 'val/loss')
    assert checkpoint.load(tmp_path / 'best.pt')[1]['iter_num'] == 4


def test_the_best_is_no_loss_before_the_first_iteration(train, tmp_path):
    """The run only makes the loss worse; the initial weights are not saved, so they are not the best."""
    done = train(tmp_path, '--always_save_checkpoint=False', '--decay_lr=False', '--learning_rate=1')
    before, *losses = metrics(tmp_path, 'val/loss')
    assert done.code == 0 and before < min(losses)
    assert checkpoint.load(tmp_path / 'best.pt')[1]['best_val_loss'] == min(losses)


def test_bias_correction_is_not_changed_at_resume(train, tmp_path):
    """The estimates so far were not counted."""
    assert train(tmp_path, '--max_iters=5', name='sophiag').code == 0
    done = train(tmp_path, '--init_from=resume', '--hessian_bias_correction=True', name='sophiag')
    assert done.code == 1 and 'was trained with --hessian_bias_correction=False; resume with it' in done.err


@pytest.mark.parametrize('dropout', [0.0, 0.1])
def test_an_optimizer_that_draws_does_so_alike_on_every_rank(train, tmp_path, dropout):
    done = train(tmp_path, f'--dropout={dropout}', ranks=2, faults="""
step = torch.optim.AdamW.step
def noisy(self, *args):
    step(self, *args)
    with torch.no_grad():
        tensors = [p.add_(1e-3 * torch.randn_like(p)) for group in self.param_groups for p in group['params']]
    print('weights', sum(t.double().sum().item() for t in tensors))
torch.optim.AdamW.step = noisy
""")
    sums = collections.Counter(line for line in done.out.splitlines() if line.startswith('weights'))
    assert done.code == 0 and len(sums) == 10 and set(sums.values()) == {2}, sums


def test_retention(tmp_path):
    for i, best in ((1, True), (2, False), (3, False), (12, False)):
        checkpoint.save(tmp_path, dict(model={}, model_args={}, iter_num=i, config={}), best=best, keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ['ckpt_00000012.pt', 'ckpt_00000003.pt', 'best.pt']
    assert checkpoint.load(tmp_path / 'best.pt')[1]['iter_num'] == 1
    # A damaged newer checkpoint that a resumed run has skipped does not count as one of those kept.
    checkpoint.save(tmp_path, dict(model={}, model_args={}, iter_num=4, config={}), keep=2)
    assert iterations(tmp_path) == [12, 4, 3]
    for i in iterations(tmp_path):
        checkpoint.path_of(tmp_path, i).write_bytes(b'')
    assert checkpoint.newest(tmp_path).name == 'best.pt', 'better than none'


def test_a_file_takes_the_place_of_shards_even_without_hard_links(tmp_path, monkeypatch):
    def no_link(*args):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(os, 'link', no_link)
    (tmp_path / 'ckpt_00000003').mkdir()
    (tmp_path / 'ckpt_00000003' / 'state.json').touch()
    (tmp_path / 'best').symlink_to('ckpt_00000003')
    path = checkpoint.save(tmp_path, dict(model={}, model_args={}, iter_num=3, config={}), best=True)
    assert path == checkpoint.path_of(tmp_path, 3) == tmp_path / 'ckpt_00000003.pt'
    assert checkpoint.load(checkpoint.path_of(tmp_path, checkpoint.BEST))[0].name == 'best.pt'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['best.pt', 'ckpt_00000003.pt']


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def seen(fd):
        synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), [p.suffix for p in tmp_path.iterdir()]))
        fsync(fd)

    monkeypatch.setattr(os, 'fsync', seen)
    checkpoint.save(tmp_path, dict(model={}, model_args={}, iter_num=3, config={}))
    assert synced == [(False, ['.partial']), (True, ['.pt'])]


# ----------------------------------------------------------------------------------------------------------------------
# Files that are not what they should be


class Exploit:
    def __reduce__(self):
        return os.mkdir, ('exploited',)


def hostile(path):
    """A file that torch.save could have made, whose pickle runs code."""
    torch.save(dict(model={}, model_args={}, iter_num=3, config={}), path)
    with zipfile.ZipFile(path) as old:
        names = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as new:
        for name, data in names.items():
            new.writestr(name, pickle.dumps(Exploit()) if name.endswith('data.pkl') else data)


def test_damaged_and_foreign_checkpoints_are_rejected(reference, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = checkpoint.path_of(reference(), 10).read_bytes()
    bad = tmp_path / 'ckpt_00000099.pt'
    for size in [0, 1, 1000, *np.random.default_rng(0).integers(0, len(good), 20), len(good) - 1]:
        bad.write_bytes(good[:size])
        assert str(bad) in rejection(checkpoint.load, bad)
    for position in np.random.default_rng(1).integers(0, len(good), 30):
        damaged = bytearray(good)
        damaged[position] ^= 1
        bad.write_bytes(damaged)
        try:  # a bit of padding or of a file's date may flip without harm
            loaded = checkpoint.load(bad)[1]
        except SystemExit:
            continue
        assert all(torch.equal(t, state(reference())['model'][name]) for name, t in loaded['model'].items())
    bad.write_text('not a checkpoint')
    assert 'truncated, or something else' in rejection(checkpoint.load, bad)
    torch.save(dict(model={}, model_args={}, iter_num=3, config=Exploit()), bad, _use_new_zipfile_serialization=False)
    rejection(checkpoint.load, bad)
    for wrong in ([1], {'weights': 1}, dict(model={}, model_args={}, iter_num='3', config={})):
        torch.save(wrong, bad)
        assert 'not a checkpoint of this repository (it' in rejection(checkpoint.load, bad)
    hostile(bad)
    assert 'could run code' in rejection(checkpoint.load, bad)
    shutil.copy(checkpoint.path_of(reference(), 5), tmp_path)
    assert checkpoint.newest(tmp_path).name == 'ckpt_00000005.pt'
    assert 'ckpt_00000099.pt: not a checkpoint' in capsys.readouterr().err
    (tmp_path / 'ckpt_00000005.pt').write_bytes(good[:-1])
    assert 'none of its 2 checkpoints can be read' in rejection(checkpoint.newest, tmp_path)
    assert not (tmp_path / 'exploited').exists()


def test_a_damaged_checkpoint_is_skipped(train, reference, tmp_path):
    shutil.copytree(reference(), tmp_path, dirs_exist_ok=True)
    newest = checkpoint.path_of(tmp_path, 10)
    newest.write_bytes(newest.read_bytes()[:-1000])
    done = train(tmp_path, '--init_from=resume')
    assert done.code == 0 and 'warning' in done.err and str(newest) in done.err
    assert 'ckpt_00000005.pt at iteration 5 of 10' in done.out
    assert_same_run(tmp_path, reference())


def test_errors_are_one_line_and_overwrite_nothing(train, reference, tmp_path, corpus):
    """All that a user may get wrong with a run's files, in an out_dir with checkpoints or beside it."""
    out = shutil.copytree(reference(), tmp_path / 'run')
    stranger = shutil.copytree(reference(), tmp_path / 'stranger')
    for path in stranger.glob('*.pt'):
        path.unlink()
    hostile(stranger / 'ckpt_00000003.pt')
    tokens = np.arange(6000) % 251

    def damaged(name, split='train', **kwargs):
        return write_bins(tmp_path / name, tokens, tokens[:3000], **kwargs) / f'{split}.bin'

    other = damaged('other')
    truncated = damaged('truncated')
    truncated.write_bytes(truncated.read_bytes()[:-100])
    large = damaged('large')
    ids = tokens.astype('<u2')
    ids[3000] = 256
    large.write_bytes(ids.tobytes())
    lies = damaged('lies').with_name('meta.json')
    lies.write_text(lies.read_text().replace('"tokens": 6000', '"tokens": "6000"'))
    narrow = damaged('narrow', vocab_size=100)
    config = tmp_path / 'broken.py'
    config.write_text('n_layer = 1\nmax_iters = = 3\n')
    (tmp_path / 'file').write_text('')
    before = content(tmp_path)
    # flags, out_dir, words of the message
    cases = [
        ([], out, 'holds checkpoints, which a new run would overwrite; continue that run by --init_from=resume'),
        (['--init_from=resume', '--n_embd=64'], out, 'is a model with another n_embd (32 there, 64 asked for); '),
        (['--init_from=resume', '--optimizer_name=lion'], out, 'was trained with --optimizer_name=adamw'),
        (['--init_from=auto', f'--dataset={other.parent}'], out, '(train, val.bin differs)'),
        (['--init_from=resume'], stranger, 'none of its 1 checkpoints can be read'),
        (['--init_from=auto'], stranger, 'none of its 1 checkpoints can be read'),
        (['--init_from=resume'], tmp_path / 'other', 'nothing to resume; check --out_dir'),
        (['--init_from=resume'], tmp_path / 'nowhere', 'nothing to resume; check --out_dir'),
        ([], tmp_path / 'file' / 'out', 'cannot be written (Not a directory); set --out_dir'),
        ([f'--dataset={truncated.parent}'], tmp_path / 'new', f'{truncated}: holds 5950 tokens, meta.json says 6000'),
        ([f'--dataset={large.parent}'], tmp_path / 'new', f'{large}: token id 256 is beyond the vocabulary of 256'),
        ([f'--dataset={lies.parent}'], tmp_path / 'new', f"{lies}: not a valid meta.json"),
        ([f'--dataset={narrow.parent}'], tmp_path / 'new', f'{narrow}: token id 250 is beyond the vocabulary of 100'),
        ([config], tmp_path / 'new', f'{config}:2: invalid syntax'),
        (['--keep_checkpoints=1'], tmp_path / 'new', '--keep_checkpoints=1: must be at least 2'),
        (['--init_from=elsewhere'], tmp_path / 'new', '--init_from=elsewhere: must be'),
    ]
    for flags, directory, words in cases:
        done = train(directory, *flags)
        lines = [line for line in done.err.splitlines() if not line.startswith('warning: ')]
        assert done.code == 1 and len(lines) == 1 and words in lines[0], (flags, done.err)
    assert content(tmp_path) == before and not (tmp_path / 'new').exists()
    done = train(out, '--init_from=resume', f'--dataset={other.parent}', '--ignore_data_change=True', '--max_iters=12')
    assert done.code == 0 and iterations(out)[0] == 12
    assert state(out, 12)['best_val_loss'] == min(metrics(out, 'val/loss')[-2:])  # of this data set: at 10 and 12


def test_best_loss_is_of_the_same_sequences(train, reference, tmp_path):
    """A lower loss on other validation sequences, before a resume with another eval_iters, does not stay the best."""
    out = shutil.copytree(reference(), tmp_path / 'out')
    path = checkpoint.path_of(out, 10)
    saved = torch.load(path, weights_only=True)
    saved.get('train_state', {})['best_val_loss'] = saved['best_val_loss'] = 0.0
    torch.save(saved, path)
    for eval_iters, best in ((saved['config']['eval_iters'], 0.0), (3, None)):
        assert train(out, '--init_from=resume', '--max_iters=12', f'--eval_iters={eval_iters}').code == 0
        assert state(out, 12)['best_val_loss'] == (min(metrics(out, 'val/loss')[-2:]) if best is None else best)
        checkpoint.path_of(out, 12).unlink()


def test_one_run_in_an_out_dir(train, tmp_path):
    checkpoint.lock_out_dir(tmp_path)
    done = train(tmp_path, ranks=2)
    assert done.code == 1
    assert done.err.count(f'{tmp_path}: another run (process {os.getpid()} on ') == 1  # not once per rank
    assert not (tmp_path / 'metrics.jsonl').exists()
    checkpoint.LOCKS.pop().close()
    assert train(tmp_path).code == 0


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


def test_nan_on_one_rank_stops_all_and_names_the_sequences(train, corpus, tmp_path):
    done = train(tmp_path, ranks=2, faults='at(6, spoil(float("nan")), rank=1)')
    starts = sequence_starts(1337, 6, 4, 50_000, 32)[1::2].tolist()
    assert done.code == NOT_FINITE
    where = f'rank 1, micro-batch 0: sequences of {corpus}/train.bin at {starts}'
    assert (f'iteration 6: the loss is not finite ({where}); '
            'nothing of it was saved; resume with a lower --learning_rate, or skip it by --skip_nonfinite=1'
            ) in done.err.splitlines()
    assert (tmp_path / 'failed.txt').read_text().strip() in done.err.splitlines()
    assert iterations(tmp_path) == [5] and len(metrics(tmp_path)) == 6
    assert train(tmp_path, '--init_from=resume').code == 0 and not (tmp_path / 'failed.txt').exists()


def test_skip_nonfinite_skips_and_lets_nothing_in(train, tmp_path):
    """Iteration 4 is a Hessian iteration: neither its gradient nor its ĥ may enter. Of iterations in a row one may be
    skipped, with others between them several; a stop in between changes nothing."""
    tolerant, stopped, strict = (
        train(tmp_path / out, '--skip_nonfinite=1', '--init_from=auto', name='sophiag', faults=faults)
        for out, faults in (('one', 'at(4, spoil(float("inf")))\nat(7, spoil(float("nan")))'),
                            ('two', 'at(6, spoil(float("nan")))\nat(6, kill(signal.SIGTERM))'),
                            ('two', 'at(7, spoil(float("nan")))')))
    assert stopped.code == STOPPED and 'iter 6: the loss is not finite; skipped' in stopped.out
    latest = state(tmp_path / 'one')['train_state']['latest_losses']
    assert len(latest) == 8 and np.isfinite(latest).all()  # with NaN among them no spike would be seen any more
    assert tolerant.code == 0 and 'iter 4: the loss is not finite; skipped (rank 0, micro-batch 0' in tolerant.out
    lines = {line['iter']: line for line in map(json.loads, (tmp_path / 'one/metrics.jsonl').open()) if 'lr' in line}
    for key in ('momentum_norm', 'hessian_norm', 'param_norm'):
        assert lines[4][key] == lines[3][key]
    assert lines[8]['hessian_norm'] != lines[7]['hessian_norm'] and 'train/loss' not in lines[4]
    assert strict.code == NOT_FINITE and len(strict.err.splitlines()) == 1
    assert 'iteration 7: the loss is not finite' in strict.err


def test_a_skipped_first_iteration_is_made_up_for(train, tmp_path):
    """AdaHessian cannot step without an estimate, and Sophia's steps would be sign steps until the next one."""
    for name, sequences in [('adahessian', 'own'), ('adahessian', 'fresh'), ('sophiag', 'own'), ('sophiag', 'fresh')]:
        out = tmp_path / name / sequences
        assert train(out, '--skip_nonfinite=1', '--hessian_interval=5', f'--hessian_sequences={sequences}', name=name,
                     faults='at(0, spoil(float("nan")))').code == 0
        lines = [json.loads(line) for line in (out / 'metrics.jsonl').open()]
        norms = {line['iter']: line['hessian_norm'] for line in lines if 'hessian_norm' in line}
        assert 0 < norms[1] == norms[4] != norms[5]


@pytest.mark.parametrize('name, estimator, dtype', [
    ('sophiag', 'GaussNewtonBartlett', 'float32'), ('sophiah', 'Hutchinson', 'float32'),
    ('sophiah', 'Hutchinson', 'float16')])
def test_a_hessian_estimate_that_is_not_finite_stops_the_run(train, tmp_path, name, estimator, dtype):
    """Hessian-vector products have no loss scale that could be to blame."""
    done = train(tmp_path, f'--dtype={dtype}', name=name, faults=f"""
import sophia
estimate = sophia.{estimator}.estimate
at(4, lambda: setattr(sophia.{estimator}, 'estimate',
                      lambda self, *args: [h * float('inf') for h in estimate(self, *args)]))
""")
    assert done.code == NOT_FINITE and len(done.err.splitlines()) == 1
    assert 'iteration 4: a Hessian estimate is not finite' in done.err and not iterations(tmp_path)


def test_parameters_that_are_not_finite_are_not_saved(train, tmp_path):
    done = train(tmp_path, faults="""
def spoiled(self, closure=None):
    self.param_groups[0]['params'][0].data.fill_(float('nan'))
at(4, lambda: setattr(torch.optim.AdamW, 'step', spoiled))
""")
    assert done.code == NOT_FINITE and 'iteration 5: the parameters are not finite' in done.err
    assert not iterations(tmp_path)


def test_a_loss_spike_is_logged(train, tmp_path):
    done = train(tmp_path, '--max_iters=115', '--eval_interval=200', '--log_interval=50', faults='at(110, spoil(50.0))')
    assert done.code == 0 and 'iter 110: loss spike' in done.out
    assert len(metrics(tmp_path, 'loss_spike')) == 1


def test_overflows_of_float16_are_no_error(train, tmp_path):
    """From a loss scale that is far too high, the run finds its own, and keeps it."""
    flags, faults = ['--dtype=float16', '--eval_interval=30', '--init_from=auto'], """
Scaler = torch.amp.GradScaler
torch.amp.GradScaler = lambda *args, **kwargs: Scaler(*args, init_scale=2.0 ** 30, **kwargs)
"""
    done = train(tmp_path, *flags, '--max_iters=30', name='sophiag', faults=faults)
    assert done.code == 0 and 'not finite' not in done.out + done.err
    assert state(tmp_path, 30)['scaler']['scale'] < 2.0 ** 25
    assert metrics(tmp_path)[-1] < metrics(tmp_path)[0] - 0.1
    assert 0 < metrics(tmp_path, 'grad_norm')[-1] < 10  # that of the loss, not of the scaled one
    assert train(tmp_path, *flags, '--max_iters=31', name='sophiag', faults=faults).code == 0
    assert state(tmp_path, 31)['scaler']['scale'] == state(tmp_path, 30)['scaler']['scale']


def test_float16_gives_up_after_forty_overflows(train, tmp_path):
    done = train(tmp_path, '--dtype=float16', '--max_iters=50', '--eval_interval=50', faults="""
clip = optimizers.optim.clip_gradients
optimizers.optim.clip_gradients = lambda *args: clip(*args) * float('inf')
""")
    assert done.code == NOT_FINITE and 'iteration 40: the gradient is not finite' in done.err
    assert done.err.rstrip().endswith('or skip it by --skip_nonfinite=41')


# ----------------------------------------------------------------------------------------------------------------------
# Ranks and memory


def test_a_dead_rank_ends_the_run_with_its_own_message(train, tmp_path):
    done = train(tmp_path, ranks=2, faults='at(3, raises(ValueError("of its own")), rank=1)')
    assert done.code == 1
    assert 'rank 1:\nTraceback' in done.err and 'ValueError: of its own' in done.err
    assert 'rank 0: another rank has died' in done.err


def test_torchrun_restarts_resume(train, reference, tmp_path):
    """A rank is killed from outside; torchrun starts both again, and the run ends as if undisturbed."""
    done = finish(start(tmp_path, torchrun=['--nproc_per_node=2', '--max-restarts=1'], faults="""
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    at(7, kill(signal.SIGKILL), rank=1)
"""))
    assert done.code == 0 and 'ckpt_00000005.pt at iteration 5 of 10' in done.out, done.err
    assert_same_run(tmp_path, reference('adamw', 2))


def test_torchrun_does_not_restart_a_run_that_gave_up(tmp_path):
    """It would train the same iterations again, to the same end."""
    done = finish(start(tmp_path, torchrun=['--nproc_per_node=2', '--max-restarts=2'], faults="""
at(7, spoil(float('nan')), rank=1)
"""))
    assert done.code == 1 and 'not restarted, for it would fail again: iteration 7: the loss is not fini' in done.err
    assert done.out.count('iter 5: val loss') == 1


def test_memory_does_not_grow(train, tmp_path):
    done = train(tmp_path, '--max_iters=600', '--eval_interval=20', '--log_interval=100', name='sophiag')
    assert done.code == 0
    _, _, early, *_, late = metrics(tmp_path, 'memory_gb')
    assert late - early < 0.008  # 8 MB in 400 iterations and 20 saves
