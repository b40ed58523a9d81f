"""Failures of long runs: train.py as a process resumes exactly, or says in one line why not."""

import json
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import soak
import torch
from conftest import command, iterations, metrics, rejection, write_bins

import train as program
from lifecycle import resume
from model import GPT
from runtime import checkpoint
from runtime.files import FAILED, save_pt
from runtime.signals import NOT_FINITE, STOPPED
from scripts import eval as evaluation
from train import resolve

FULL_DISK = """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""
# Rank 1 gets a signal during its second evaluation.
STOP_IN_EVALUATION = """
validate, calls = loader.ValidationLoader.__iter__, []
def interrupted(self):
    calls.append(1)
    for batch in validate(self):
        yield batch
        if len(calls) == 2 and os.environ['RANK'] == '1':
            os.kill(os.getpid(), signal.SIGTERM)
loader.ValidationLoader.__iter__ = interrupted
"""


@pytest.fixture
def copy(finished, tmp_path):
    """Return the directory of a copy of a finished run of AdamW."""
    return shutil.copytree(finished(), tmp_path / 'copy', symlinks=True)


def state(out, iteration=10):
    return checkpoint.load_checkpoint(checkpoint.path_of(out, iteration))[1]


def content(out):
    return {p: p.read_bytes() for p in sorted(out.rglob('*')) if p.is_file() and p.name != 'lock'}


@pytest.mark.parametrize('name, ranks, fault', [
    ('schedulefree:AdamWScheduleFree', 1, 'at(7, kill(signal.SIGTERM))'), ('sophiah', 1, 'at(4, kill(signal.SIGHUP))'),
    ('sophiag', 2, STOP_IN_EVALUATION), ('sophiag', 3, 'at(4, kill(signal.SIGINT))')],
    ids=['schedulefree', 'sophiah', 'in an evaluation', 'three ranks'])
def test_a_signal_stops_all_ranks_and_the_resumed_run_is_the_same(train, finished, tmp_path, name, ranks, fault):
    """The signal comes between Hessian estimates, or in an evaluation, which the resumed run makes again."""
    one_each = ['--batch_size=1', '--total_batch_size=3'] if ranks > 2 else []
    done = train(tmp_path, *one_each, name=name, ranks=ranks, faults=fault)
    iteration, = re.findall(r'stopped at iteration (\d) by', done.out)
    assert done.code == STOPPED and iterations(tmp_path)[0] == int(iteration), done.err
    done = train(tmp_path, '--init_from=resume', *one_each, name=name, ranks=ranks)
    assert done.code == 0 and f'at iteration {iteration} of 10' in done.out, done.err
    assert not soak.compare(tmp_path, finished(*one_each, name=name, ranks=ranks))
    assert metrics(tmp_path, 'time') == sorted(metrics(tmp_path, 'time'))


def test_a_shorter_horizon_from_a_copied_checkpoint_is_the_uninterrupted_run(train, tmp_path):
    """A cooldown from a longer run's checkpoint, before its own cooldown, ends with the same weights bit for bit."""
    flags = ['--cooldown_iters=3', '--schedule=wsd']
    short, longer, branch = (tmp_path / name for name in ('short', 'longer', 'branch'))
    assert train(short, *flags, name='sophiag').code == 0
    assert train(longer, *flags, '--max_iters=20', name='sophiag', faults='at(5, kill(signal.SIGTERM))').code == STOPPED
    branch.mkdir()
    shutil.copy(longer / 'ckpt_00000006.pt', branch)
    done = train(branch, *flags, '--init_from=resume', '--max_iters=10', name='sophiag')
    assert done.code == 0 and 'changed: max_iters = 10, was 20' in done.out, done.err
    ours, theirs = state(branch), state(short)
    assert not soak.first_difference([ours['model'], ours['optimizer']['state']],
                                     [theirs['model'], theirs['optimizer']['state']])


def test_sigusr1_saves_and_continues(train, finished, tmp_path):
    done = train(tmp_path, '--keep_checkpoints=5', faults='at(2, kill(signal.SIGUSR1))')
    assert done.code == 0 and iterations(tmp_path) == [10, 5, 3]
    assert not soak.compare(tmp_path, finished())


def test_eval_only_writes_nothing(train, copy, tmp_path):
    before = content(copy)
    done = train(copy, '--eval_only=True')  # evaluates the newest checkpoint
    assert done.code == 0 and f'val loss {metrics(copy, "val/loss")[-1]:.4f}' in done.out
    assert content(copy) == before
    done = train(tmp_path / 'new', '--eval_only=True')
    assert done.code == 1 and 'has no checkpoint; ' in done.err and not (tmp_path / 'new').exists()


def test_a_run_starts_from_the_weights_of_another(train, finished, tmp_path, capsys):
    """Optimizer and schedule may differ, the same command resumes it, and eval.py reads it."""
    source, out = finished(), tmp_path / 'new'
    flags = [f'--init_from={source}', '--schedule=constant', '--auto_resume=True']
    assert train(out, *flags, name='lion', faults='at(7, kill(signal.SIGTERM))').code == STOPPED
    assert metrics(out, 'val/loss')[0] == metrics(source, 'val/loss')[-1]
    train(out, *flags, name='lion', check=True)
    evaluation.main([str(out), '--device=cpu', '--eval_sequences=16'])
    assert json.loads(capsys.readouterr().out)['loss'] == pytest.approx(metrics(out, 'val/loss')[-1], rel=1e-5)


class Adapted(GPT):
    """A model to which weights have been added."""

    def __init__(self, config):
        super().__init__(config)
        self.adapter = torch.nn.Parameter(torch.zeros(3))


def test_what_a_checkpoint_lacks_is_new_and_said(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, 'check_same_tokenizer', lambda *_: None)
    data = SimpleNamespace(path='bins', vocab_size=300, tokenizer=dict(tokenizer='bytes and 44 more ids'))
    path, weights = checkpoint.path_of(finished(), 10), state(finished())['model']

    def started(*flags, cls=GPT):
        origin = resume.Origin({}, 0)
        c = resolve([f'--init_from={path.parent}', '--learning_rate=1', '--device=cpu', *flags])
        return c, resume.pretrained_model(cls, c, data, origin), origin.differences

    c, model, notes = started(cls=Adapted)
    assert (c.n_layer, c.n_embd, c.block_size) == (1, 32, 32)  # the model's
    assert notes == ['the ids 256 to 299 are new, and so are their embeddings',
                     f'adapter is new, because {path} does not have it']
    rows = model.lm_head.weight
    assert rows is model.transformer.wte.weight and len(rows) == 300 and (rows[256:].std(1) > 0).all()
    assert torch.equal(rows[:256], weights['lm_head.weight'])
    first = started('--block_size=16')[1].transformer.wpe.weight
    assert torch.equal(first, weights['transformer.wpe.weight'][:16])
    assert '--n_layer=2: must be 1, as in the pretrained weights' in rejection(started, '--n_layer=2')
    assert ('--block_size=64: must be at most 32, the number of position embeddings in '
            f'{path}') in rejection(started, '--block_size=64')

    saved, path = state(finished()), tmp_path / 'ckpt_00000010.pt'
    padded = torch.cat([weights['lm_head.weight'], torch.ones(64, 32)])
    saved['model'] |= {'lm_head.weight': padded, 'transformer.wte.weight': padded}
    del saved['model']['transformer.wpe.weight']
    save_pt(path, dict(saved, model_args=dict(saved['model_args'], vocab_size=320)))
    c, model, _ = started('--block_size=64')  # Without embeddings of positions a block may be longer.
    assert c.block_size == 64 and (model.lm_head.weight[256:] != 1).all()  # New ids replace padding.
    data.tokenizer, data.vocab_size = saved['tokenizer'], 256
    assert torch.equal(started()[1].lm_head.weight, padded)


def test_killed_while_saving(train, finished, tmp_path):
    """After kill -9 with half of the second checkpoint written, the run resumes exactly from the first."""
    done = train(tmp_path, faults="""
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
    assert train(tmp_path, '--auto_resume=True').code == 0
    assert not list(tmp_path.glob('*.partial'))
    assert not soak.compare(tmp_path, finished())


def test_full_disk(train, finished, tmp_path):
    """If no file may grow beyond 20 kB, the run warns, continues, and saves when it can."""
    stays, passes = (train(tmp_path / out, faults=f'{FULL_DISK}at(4, lambda: limit(20_000))\nat({until}, lambda: '
                           'limit(-1))') for out, until in (('stays', 99), ('passes', 7)))
    assert stays.code == 1 and not iterations(tmp_path / 'stays')
    assert f'{tmp_path / "stays"}: the last checkpoint could not be saved; the newest one there: none' in stays.err
    assert 'done:' not in stays.out
    assert passes.code == 0 and iterations(tmp_path / 'passes') == [10]
    for out, done in (tmp_path / 'stays', stays), (tmp_path / 'passes', passes):
        assert f'{out}/ckpt_00000005.pt: could not be saved (File too large); training continues' in done.err
        assert not list(out.glob('*.partial')) and metrics(out) == metrics(finished())
    shards = train(tmp_path / 'shards', '--parallel=fsdp', ranks=2, faults=FULL_DISK + ''.join(
        f'at({i}, lambda: limit({size}), {rank})\n' for i, size in ((4, 20_000), (7, -1)) for rank in range(2)))
    assert shards.code == 0 and 'ckpt_00000005: could not be saved (rank' in shards.err, shards.err
    assert iterations(tmp_path / 'shards') == [10] and not list((tmp_path / 'shards').glob('*.partial'))


def test_without_always_save_checkpoint_the_best_and_the_last_are_saved(train, tmp_path):
    """The loss grows from the fifth iteration on."""
    done = train(tmp_path, '--always_save_checkpoint=False', '--decay_lr=False', '--eval_interval=2', faults="""
def worse():
    for group in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)][0].param_groups:
        group['maximize'] = True
at(4, worse)
""")
    assert done.code == 0 and iterations(tmp_path) == [10, 4], metrics(tmp_path, 'val/loss')
    best = checkpoint.load_checkpoint(tmp_path / 'best.pt')[1]
    assert best['iter_num'] == 4 and best['best_val_loss'] == min(metrics(tmp_path, 'val/loss'))


def test_errors_are_one_line_and_overwrite_nothing(copy, tmp_path):
    tokens = np.arange(6000) % 251
    other = write_bins(tmp_path / 'other', tokens, tokens[:3000])
    (tmp_path / 'file').write_text('')
    (copy / FAILED).write_text('iteration 11: the loss is not finite\n')
    before = content(tmp_path)
    for directory, flags, words in [
            (copy, ['--auto_resume=True', f'--init_from={tmp_path}'], 'was started from init_from = scratch'),
            (copy, ['--init_from=resume', '--n_embd=64'], 'differs in n_embd (32 in the checkpoint, 64 requested)'),
            (copy, ['--init_from=resume', '--optimizer_name=lion'], 'was trained with --optimizer_name=adamw'),
            (copy, ['--init_from=resume', '--max_iters=5'], 'is at iteration 10 already; set at least that'),
            (copy, ['--auto_resume=True', f'--dataset={other}'], '(train, val.bin differs)'),
            (tmp_path / 'file/out', [], f'{tmp_path}/file/out: Not a directory')]:
        assert words in rejection(program.main, command(directory, *flags)[1:])
    for flag in '--init_from=resume', '--eval_only=True':
        assert f'{copy}: was started by "python' in rejection(program.main, [f'--out_dir={copy}', flag])
    assert 'openwebtext' in rejection(program.main, [  # pretrained weights have nothing to do with the run in out_dir
        f'--out_dir={copy}', '--eval_only=True', f'--init_from={copy}/best.pt'])
    assert content(tmp_path) == before
    program.main(command(copy, '--init_from=resume', f'--dataset={other}', '--ignore_data_change=True',
                         '--max_iters=12')[1:])
    assert iterations(copy)[0] == 12 and not (copy / FAILED).exists()
    assert state(copy, 12)['best_val_loss'] == min(metrics(copy, 'val/loss')[-2:])  # on this data set, at 10 and 12


def test_a_checkpoint_from_before_version_0_2_is_one_line(copy, tmp_path):
    newest, other = checkpoint.checkpoints(copy)
    other.unlink()
    old = state(copy)
    del old['optimizer']['shapes']
    save_pt(newest, old)
    message = f'{newest}: a checkpoint from before version 0.2, which only the version that wrote it can read'
    for flag in '--auto_resume=True', '--eval_only=True', f'--init_from={copy}':
        out = tmp_path / 'new' if 'init_from' in flag else copy
        assert rejection(program.main, command(out, flag)[1:]) == message
    assert rejection(evaluation.main, [str(newest)]) == message


def test_nan_on_one_rank_stops_all(train, tmp_path):
    done = train(tmp_path, ranks=2, faults='at(6, spoil(float("nan")), rank=1)')
    assert done.code == NOT_FINITE
    line = ('iteration 6: the loss is not finite; resume with a lower --learning_rate, or skip it with '
            '--skip_nonfinite=1. Nothing of the iteration was saved')
    assert done.err.splitlines() == [line] and (tmp_path / 'failed.txt').read_text().strip() == line
    assert iterations(tmp_path) == [5] and len(metrics(tmp_path)) == 6


def test_skip_nonfinite_skips_and_lets_nothing_in(train, tmp_path):
    """Neither the gradient nor the ĥ of iteration 4 may enter. Only one iteration in a row may be skipped."""
    tolerant, strict = (
        train(tmp_path / out, '--skip_nonfinite=1', name='sophiag',
              faults=f'at({first}, spoil(float("inf")))\nat(7, spoil(float("nan")))')
        for out, first in (('one', 4), ('two', 6)))
    assert tolerant.code == 0 and 'iter 4: the loss is not finite; skipped\n' in tolerant.out
    lines = {line['iter']: line for line in map(json.loads, (tmp_path / 'one/metrics.jsonl').open()) if 'lr' in line}
    for key in ('momentum_norm', 'hessian_norm', 'param_norm'):
        assert lines[4][key] == lines[3][key]
    assert lines[8]['hessian_norm'] != lines[7]['hessian_norm'] and 'train/loss' not in lines[4]
    assert strict.code == NOT_FINITE and len(strict.err.splitlines()) == 1
    assert 'iteration 7: the loss is not finite' in strict.err


def test_overflows_of_float16_are_no_error(train, tmp_path):
    """The run lowers a loss scale that is far too high, and a resume keeps its own."""
    flags, faults = ['--dtype=float16', '--eval_interval=30', '--auto_resume=True'], """
Scaler = torch.amp.GradScaler
torch.amp.GradScaler = lambda *args, **kwargs: Scaler(*args, init_scale=2.0 ** 30, **kwargs)
"""
    done = train(tmp_path, *flags, '--max_iters=30', name='sophiag', faults=faults)
    assert done.code == 0 and 'not finite' not in done.out + done.err
    assert state(tmp_path, 30)['scaler']['scale'] < 2.0 ** 25
    assert metrics(tmp_path)[-1] < metrics(tmp_path)[0] - 0.1
    assert 0 < metrics(tmp_path, 'grad_norm')[-1] < 10  # It belongs to the loss, not to the scaled loss.
    assert train(tmp_path, *flags, '--max_iters=31', name='sophiag', faults=faults).code == 0
    assert state(tmp_path, 31)['scaler']['scale'] == state(tmp_path, 30)['scaler']['scale']


def test_a_dead_rank_ends_the_run_with_its_own_message(train, tmp_path):
    done = train(tmp_path, ranks=2, faults="""
def fail():
    raise ValueError('of its own')
at(3, fail, rank=1)
""")
    assert done.code == 1
    assert '[rank1]: Traceback' in done.err and '[rank1]: ValueError: of its own' in done.err


def test_a_killed_rank_ends_the_other_and_the_restarted_run_is_the_same(train, finished, tmp_path):
    """torchrun with --max-restarts does the same."""
    done = train(tmp_path, '--auto_resume=True', name='sophiag', ranks=2, faults='at(7, kill(signal.SIGKILL), rank=1)')
    assert done.code == 1 and 'rank 0: another rank has ended' in done.err
    done = train(tmp_path, '--auto_resume=True', name='sophiag', ranks=2)
    assert done.code == 0 and 'ckpt_00000005.pt at iteration 5 of 10' in done.out, done.err
    assert not soak.compare(tmp_path, finished(name='sophiag', ranks=2))
