"""train.py: it learns, its losses do not depend on how a mini-batch is split, and nothing fools a fork silently."""

import contextlib
import functools
import json
import math
import random
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finish, metrics, rejection, start
from torch.utils._python_dispatch import TorchDispatchMode

import loss
import model
import train as program
from analysis import runs
from analysis.runs import read_run
from data.loader import Bin, TrainLoader
from hessian import HessianHook
from lifecycle import resume
from runtime import checkpoint
from runtime.device import can_compile
from runtime.files import differing_files
from runtime.signals import LISTENED, NOT_FINITE
from scripts.load import load

FLAGS = {'adamw': ['--decay_lr=False', '--grad_clip=0.85'],
         'sophiag': ['--hessian_interval=2', '--lr_decay_iters=8', '--dropout=0']}


@pytest.fixture
def main(corpus):
    """main(out_dir, *flags): a run in this process, which may be one of several in the directory."""
    def call(out, *flags):
        program.main([*TINY, f'--dataset={corpus}', f'--out_dir={out}', '--learning_rate=1e-2', *flags])
    return call


@pytest.mark.parametrize('edit, words', [
    (lambda run: setattr(run.config, 'total_batch_size', 2), 'total_batch_size = 2: a setting keeps its value'),
    (lambda run: setattr(run, 'ema_loss', 0.0), "no attribute 'ema_loss'"),
    (lambda run: setattr(run.state, 'ema_loss', 0.0), "no attribute 'ema_loss'"),
])
def test_what_the_loop_would_not_follow_is_an_error(main, tmp_path, monkeypatch, edit, words):
    """A setting that is assigned while training, and attributes of Run and TrainState that are none of their fields."""
    monkeypatch.setattr(program, 'train_step', lambda run, *args: edit(run))
    with pytest.raises((SystemExit, AttributeError), match=words):
        main(tmp_path)


def grown(optimizer, lr):
    later = iter([False, True, False])
    optimizer.register_step_post_hook(lambda *args: next(later) and optimizer.add_param_group(dict(params=[])))


def scheduled(optimizer, lr):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *args: scheduler.step())


@pytest.mark.parametrize('own, words', [
    (lambda optimizer, lr: optimizer, ''),
    (lambda optimizer, lr: setattr(optimizer, 'lr', lr), 'no schedule changes the attribute lr of AdamW'),
    (lambda optimizer, lr: optimizer.param_groups[0].update(lr=0.02), 'param groups have learning rates of 1 to 2 ti'),
    (grown, 'AdamW: a param group was added while training'),
    (scheduled, 'AdamW: a scheduler, or its own step, has changed the learning rate')])
def test_a_learning_rate_that_is_not_the_schedules(main, tmp_path, monkeypatch, capsys, own, words):
    """It is said, and a scheduler that the loop would overrule stops the run."""
    def build(groups, s):
        optimizer = torch.optim.AdamW(groups, lr=s.learning_rate)
        own(optimizer, s.learning_rate)
        return optimizer

    monkeypatch.setitem(program.optimizers.OPTIMIZERS, 'mine', program.optimizers.Row(build, {}, 0.1))
    stopped = ''
    try:
        main(tmp_path, '--optimizer_name=mine', '--max_iters=3', '--eval_iters=1')
    except SystemExit as error:
        stopped = str(error)
    out = capsys.readouterr().out
    assert bool(stopped) == words.startswith('AdamW') and words in out + stopped
    assert bool(words) == bool(stopped or 'learning rates of' in out or 'attribute lr' in out)


def test_a_last_evaluation_that_is_not_finite_is_a_divergence(main, tmp_path, monkeypatch, capsys):
    """Evaluations before the last one may be."""
    monkeypatch.setattr(program, 'evaluate', lambda *args: (math.nan, math.nan))
    with pytest.raises(SystemExit) as stopped:
        main(tmp_path)
    assert stopped.value.code == NOT_FINITE
    line = 'iteration 10: the validation loss is not finite; resume with a lower --learning_rate'
    assert capsys.readouterr().err.startswith(line) and read_run(tmp_path).failed.startswith(line)


@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
def test_it_learns_and_leaves_its_records(finished, name, monkeypatch):
    out = finished(*FLAGS[name], name=name)
    losses = metrics(out)
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.25
    lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert all({'iter', 'tokens', 'time'} <= line.keys() for line in lines)
    assert [line['iter'] for line in lines if 'val/loss' in line] == [0, 5, 10]
    assert all(line['tokens'] == line['iter'] * 4 * 32 for line in lines)
    described = json.loads((out / 'config.json').read_text())
    assert described['config']['learning_rate'] == 0.01 and described['provenance']['learning_rate'] == 'flag'
    assert described['provenance']['weight_decay'] == f'optimizer {name}'
    assert (described['provenance']['gamma'] == f'not a setting of {name}') == (name == 'adamw')
    run, = runs.find_runs([out])
    extra = (name == 'sophiag') / 6  # of Sophia-G: a backward on half of the mini-batch, every second step
    assert run.flops_per_token() == pytest.approx(described['flops_per_token'] * (1 + extra))
    assert {'command', 'versions', 'git_commit', 'data'} <= described.keys()


def test_a_run_leaves_the_process_as_it_was(main, tmp_path):
    """Signal handlers, the hook for errors, and no process group, whether it was finished, stopped or refused."""
    def of_the_process():
        return [signal.getsignal(number) for number in LISTENED], sys.excepthook, torch.distributed.is_initialized()

    before = of_the_process()
    main(tmp_path, '--max_iters=1')
    with pytest.raises(SystemExit):
        main(tmp_path, '--max_iters=3', '--init_from=resume', '--max_hours=1e-9')
    for _ in range(2):
        assert 'holds checkpoints' in rejection(main, tmp_path, '--parallel=fsdp')
    assert of_the_process() == before


def test_logged_clipping_and_speed_add_up(finished):
    adamw = finished(*FLAGS['adamw'], name='adamw')
    norms = np.array(metrics(adamw, 'grad_norm'))
    assert norms.min() < 0.85 < norms.max()
    assert metrics(adamw, 'grad_clipped') == pytest.approx(np.cumsum(norms > 0.85) / np.arange(1, 11))
    tokens = [per_second * ms / 1e3
              for per_second, ms in zip(metrics(adamw, 'tokens_per_sec'), metrics(adamw, 'step_ms'))]
    assert tokens == pytest.approx([4 * 32] * 10)


@pytest.mark.parametrize('log_interval', [1, 2])
def test_the_time_of_an_iteration_holds_the_update_that_a_gpu_is_still_busy_with(main, tmp_path, monkeypatch,
                                                                                log_interval):
    """Updates take 10 s of a made-up clock, which passes once somebody waits for the device."""
    clock = dict(now=0.0, owed=0.0)

    def wait(device=None):
        clock.update(now=clock['now'] + clock['owed'], owed=0.0)

    def owe(*args, step=torch.amp.GradScaler.step):
        clock['owed'] += 10
        step(*args)

    clip = program.optim.clip_gradients
    monkeypatch.setattr(torch.amp.GradScaler, 'step', owe)
    monkeypatch.setattr(program.optim, 'clip_gradients', lambda *args: (wait(), clip(*args))[1])
    monkeypatch.setattr(program.optimizers, 'optimizer_metrics', lambda *_: wait() or {})
    monkeypatch.setattr(program.devices, 'synchronize', wait)
    monkeypatch.setattr(program.time, 'perf_counter', lambda: clock['now'])
    main(tmp_path, '--max_iters=4', '--eval_interval=4', f'--log_interval={log_interval}')
    assert metrics(tmp_path, 'tokens_per_sec')[-1] == pytest.approx(4 * 32 / 10)
    assert [json.loads(line)['time'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()][-1] == 40


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
def test_a_step_and_a_log_line_wait_for_the_device_once_each(main, tmp_path, monkeypatch, name, device):
    """But for the first step and those with an estimate."""
    found = dict(train_step=[], metrics_of=[])

    def counted(function, counts):
        def call(run, *args):
            with waits(device) as seen:
                result = function(run, *args)
            counts.append(len(seen))
            return result
        return call

    for function, counts in found.items():
        monkeypatch.setattr(program, function, counted(getattr(program, function), counts))
    main(tmp_path, f'--optimizer_name={name}', f'--device={device}', '--compile=False', '--max_iters=4')
    assert found['train_step'][1:] == [1, 1, 1] and found['metrics_of'] == [1, 1, 1, 1]


@contextlib.contextmanager
def waits(device):
    """Lists what waits for a GPU, or would: values that Python reads, and tensors made of its numbers."""
    if device == 'cuda':
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            yield seen
            torch.cuda.set_sync_debug_mode('default')
        seen[:] = [warning for warning in seen if 'synchronizing' in str(warning.message)]
        return
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist
    with Watch(), mock.patch.object(torch.Tensor, 'tolist', lambda tensor: (seen.append('tolist'), tolist(tensor))[1]):
        yield seen


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_a_batch_ramp_weights_every_sequence_alike_and_counts_its_tokens(main, tmp_path, monkeypatch, name):
    """3 of 4 sequences, in micro-batches of 2 and 1 or of 3; the first ones are of the estimate, too."""
    advance = TrainLoader.__next__
    monkeypatch.setattr(TrainLoader, '__next__', lambda loader: advance(loader)[:3])
    runs = [tmp_path / 'split', tmp_path / 'whole']
    for out, batch_size in zip(runs, (2, 4)):
        main(out, f'--optimizer_name={name}', '--hessian_interval=2', '--hessian_batch_size=1',
             f'--batch_size={batch_size}', '--max_iters=5', '--eval_iters=1')
    for key in 'train/loss', 'grad_norm', 'hessian_norm':
        assert metrics(runs[0], key) == pytest.approx(metrics(runs[1], key), rel=1e-3)
    for line in map(json.loads, (runs[0] / 'metrics.jsonl').read_text().splitlines()):
        assert line['tokens'] == line['iter'] * 3 * 32
        if 'step_ms' in line:
            assert line['tokens_per_sec'] * line['step_ms'] / 1e3 == pytest.approx(3 * 32)


MASK = """
def forward(self, idx, targets=None, forward=model.GPT.forward):
    if targets is not None:
        targets[torch.arange(idx.size(1)) < 8 * (idx[:, :1] % 5)] = -1
    return forward(self, idx, targets)
model.GPT.forward = forward
"""


@pytest.mark.parametrize('name', ['sophiag', 'sophiah'])
def test_a_mean_is_over_the_predictions_however_they_are_split(main, train, tmp_path, monkeypatch, name):
    """Of many sequences only some positions count, of some none. Without a single one a mini-batch stops the run."""
    monkeypatch.setattr(model.GPT, 'forward', model.GPT.forward)
    exec(MASK, dict(torch=torch, model=model))
    flags = ['--total_batch_size=8', '--max_iters=6', '--eval_iters=1', '--weight_decay=0.1', '--dropout=0.0',
             '--hessian_interval=2', '--hessian_batch_size=6']
    norms, clip = [], program.optim.clip_gradients
    monkeypatch.setattr(program.optim, 'clip_gradients', lambda params, max_norm: (
        norms.append(program.optim.global_norm([p.grad for p in params]).item()), clip(params, max_norm))[1])
    for size in 8, 2:
        main(tmp_path / f'{size}', *flags, f'--optimizer_name={name}', f'--batch_size={size}')
    # An edit finds the gradient of the mean before the clipping.
    assert norms == [*metrics(tmp_path / '8', 'grad_norm'), *metrics(tmp_path / '2', 'grad_norm')]
    train(tmp_path / 'ranks', *flags, '--batch_size=1', name=name, ranks=2, faults=MASK, check=True)
    for key in 'train/loss', 'grad_norm', 'param_norm', 'hessian_norm':
        whole = metrics(tmp_path / '8', key)
        for other in '2', 'ranks':
            assert metrics(tmp_path / other, key) == pytest.approx(whole, rel=1e-4), (key, other)
    monkeypatch.setattr(model.GPT, 'forward', lambda self, idx, targets, forward=model.GPT.forward: (
        targets.fill_(-1), forward(self, idx, targets))[1])
    with pytest.raises(SystemExit, match=str(NOT_FINITE)):
        main(tmp_path / 'none', *flags, f'--optimizer_name={name}')


def test_a_run_knows_the_code_that_ran_it_and_says_when_it_resumes_with_another(main, tmp_path, monkeypatch, capsys):
    main(tmp_path, '--max_iters=1')
    described = json.loads((tmp_path / 'config.json').read_text())
    assert described['code'] == checkpoint.load_checkpoint(tmp_path)[1]['code']
    main(tmp_path, '--max_iters=2', '--init_from=resume')
    assert 'the code' not in capsys.readouterr().out
    monkeypatch.setattr(resume, 'code_hashes', lambda: described['code'] | {'loss.py': 'edited'})
    for T in (3, 4):
        main(tmp_path, f'--max_iters={T}', '--init_from=resume')
    said = 'changed: the code is not the one that saved the checkpoint (loss.py)\n'
    assert capsys.readouterr().out.count(said) == 1
    about = json.loads((tmp_path / 'config.json').read_text())
    assert about['code']['loss.py'] == 'edited'
    assert [change for change in about['changes'] if change['key'] == 'code'] == [
        dict(iter=2, key='code', files=['loss.py'])]
    assert read_run(tmp_path).code_changes == ['its code was changed at iteration 2 (loss.py)']


def test_an_order_of_the_data_that_a_file_has_is_noticed_when_it_is_replaced(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TrainLoader, 'starts', lambda self, iteration: np.load(tmp_path / 'order.npy')[iteration])
    for i in (1, 2, 3):
        np.save(tmp_path / 'order.npy', np.arange(40).reshape(10, 4) * (1 if i < 3 else 2) + 1)
        main(tmp_path / 'out', f'--max_iters={i}', '--auto_resume=True', '--eval_iters=1')
        assert ('changed: the order of the data' in capsys.readouterr().out) == (i == 3)


@pytest.mark.skipif(not shutil.which('git'), reason='needs git')
def test_a_copy_has_a_commit_only_if_its_repository_tracks_it(tmp_path):
    """A source archive may lie in an unrelated repository, and someone may make it one."""
    def git(folder, *words):
        command = ['git', '-c', 'user.name=a', '-c', 'user.email=b', *words]
        return subprocess.check_output(command, cwd=folder, text=True)
    copy = tmp_path / 'copy/runtime/files.py'
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / 'runtime/files.py', copy)
    git_commit = runpy.run_path(copy)['git_commit']
    for folder in tmp_path, tmp_path / 'copy':
        git(folder, 'init', '--quiet')
        git(folder, 'commit', '--quiet', '--allow-empty', '--message=first')
        assert git_commit() is None
    git(copy.parent, 'add', 'files.py')
    git(copy.parent, 'commit', '--quiet', '--message=second')
    assert git_commit() == git(copy.parent, 'rev-parse', 'HEAD').strip()
    copy.write_text('changed')
    assert git_commit().endswith('+')


def test_code_hashes_in_a_directory_called_tests_and_behind_a_link(tmp_path, monkeypatch):
    """Also what git does not know, and where a link leads to it."""
    copy = tmp_path / 'tests/repository/runtime/files.py'
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / 'runtime/files.py', copy)
    more = copy.parents[1] / 'more.py'
    (tmp_path / 'link').symlink_to(copy.parents[1])
    code_hashes, found = runpy.run_path(copy)['code_hashes'], []
    for text, place in ('one = 1', more), ('one = 2', more), ('one = 2', tmp_path / 'link/more.py'):
        more.write_text(text)
        monkeypatch.setitem(sys.modules, 'more', SimpleNamespace(__file__=str(place)))
        found.append(code_hashes())
    assert all(code.keys() == {'more.py', 'runtime/files.py'} for code in found)
    assert differing_files(*found[:2]) == ['more.py'] and found[1] == found[2]


@pytest.mark.parametrize('owner, name', [(torch.amp.GradScaler, 'step'), (program.GPT, 'forward')])
def test_draws_from_global_generators_are_the_same_in_a_resumed_run(main, tmp_path, monkeypatch, owner, name):
    """By an optimizer, or by a forward pass in training; from whichever generator."""
    drawn, original = [], getattr(owner, name)

    def drawing(*args, **kwargs):
        if owner is not program.GPT or args[0].training:
            drawn.append((torch.rand(()).item(), np.random.random(), random.random()))
        return original(*args, **kwargs)
    monkeypatch.setattr(owner, name, drawing)
    monkeypatch.setattr(program.guards, 'check_forward', lambda *args: None)  # another forward at each start
    main(tmp_path / 'a', '--max_iters=3')
    main(tmp_path / 'b', '--max_iters=2', '--lr_decay_iters=3')
    main(tmp_path / 'b', '--max_iters=3', '--init_from=resume')
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:] and len({number for numbers in drawn for number in numbers}) == 3 * half >= 9


def test_a_schedule_of_another_setting_resumes(main, tmp_path, monkeypatch):
    """The loop may set other keys of the param groups than the learning rate."""
    set_learning_rate = program.optim.set_learning_rate

    def scheduled(optimizer, lr):
        set_learning_rate(optimizer, lr)
        for group in optimizer.param_groups:
            group['weight_decay'] = 10 * lr
    monkeypatch.setattr(program.optim, 'set_learning_rate', scheduled)
    main(tmp_path / 'whole', '--max_iters=4')
    main(tmp_path / 'half', '--max_iters=2', '--lr_decay_iters=4')
    main(tmp_path / 'half', '--max_iters=4', '--init_from=resume')
    assert metrics(tmp_path / 'half') == metrics(tmp_path / 'whole')


FREEZE = '''
forward, calls = model.MLP.forward, []
def freezing(self, x):
    calls.append(self.c_fc.weight.requires_grad_(len(calls) < 9))
    return forward(self, x)
model.MLP.forward = freezing
'''
SKIP = '''
block, calls = model.Block.forward, []
def skipping(self, x, divisor):
    calls.append(x)
    return x if len(calls) > 14 and os.environ['RANK'] == '1' and self.training else block(self, x, divisor)
model.Block.forward = skipping
'''


@pytest.mark.parametrize('faults, name', [
    ('model.MLP.forward = lambda self, x: x', 'mlp.c_fc'), (FREEZE, 'mlp.c_fc'), (SKIP, 'ln_1'),
    ("forward = model.MLP.forward\nmodel.MLP.forward = lambda self, x: "
     "forward(self, x) if os.environ['RANK'] == '0' else x", 'mlp.c_fc')])
def test_replicas_that_would_wait_for_a_gradient_end_with_a_line_each(train, tmp_path, faults, name):
    """A parameter is unused from the start, or while training, as where a block is skipped; on all ranks, or on one, as
    where a mixture of experts leaves out an expert."""
    done = train(tmp_path, '--eval_iters=1', ranks=2, faults=faults)
    assert done.code == 1
    for rank, line in enumerate(done.err.splitlines()):
        lacks = f'transformer.h.0.{name}.weight: has no gradient on rank {rank}, and the ranks wait for each other; '
        waits = 'rank 0: another rank has ended, or cannot be reached'
        assert line.startswith(waits if rank == 0 and 'RANK' in faults else lacks)
    assert rank == 1


def test_replicas_that_drift_apart_are_noticed(train, tmp_path):
    done = train(tmp_path, '--max_iters=2', ranks=2, faults="""
step = torch.amp.GradScaler.step
def drifting(scaler, optimizer):
    step(scaler, optimizer)
    with torch.no_grad():
        next(iter(optimizer.param_groups[0]['params'])).add_(float(os.environ['RANK']))
torch.amp.GradScaler.step = drifting
""")
    assert done.code == 0 and "warning: the ranks' weights have drifted apart" in done.err


def test_a_parameter_that_is_thawed_too_late_is_named(main, tmp_path, monkeypatch, capsys):
    """The optimizer has those that were trained when it was built; a parameter that is frozen later is skipped."""
    init, step = program.GPT.__init__, program.train_step

    def frozen(self, config):
        init(self, config)
        self.transformer.wpe.weight.requires_grad_(False)

    def thawing(run, sequences, iter_num):
        run.raw_model.transformer.wpe.weight.requires_grad_(iter_num > 0)
        return step(run, sequences, iter_num)

    monkeypatch.setattr(program, 'train_step', thawing)
    main(tmp_path / 'a', '--max_iters=2')
    assert not capsys.readouterr().err
    monkeypatch.setattr(program.GPT, '__init__', frozen)
    main(tmp_path / 'b', '--max_iters=2')
    assert 'warning: transformer.wpe.weight: is not trained' in capsys.readouterr().err


def test_a_group_that_is_left_out_is_one_line(main, tmp_path, monkeypatch):
    groups = program.optimizers.parameter_groups
    monkeypatch.setattr(program.optimizers, 'parameter_groups', lambda *args: groups(*args)[:-1])
    with pytest.raises(SystemExit, match='transformer.h.0.ln_1.weight: is in no group of parameter_groups'):
        main(tmp_path)


def test_parameters_in_a_list_of_pythons_are_one_line(main, tmp_path, monkeypatch):
    """PyTorch would neither train nor save them."""
    init = program.GPT.__init__

    def with_scales(self, config):
        init(self, config)
        self.transformer.h[0].scales = {'residual': torch.nn.Parameter(torch.ones(1))}

    monkeypatch.setattr(program.GPT, '__init__', with_scales)
    with pytest.raises(SystemExit, match='^transformer.h.0.scales: holds parameters that the model does not know'):
        main(tmp_path)


@pytest.mark.parametrize('edit, words', [
    (lambda logits, targets: logits if targets is None else 2 * logits.tanh(), 'returns other logits with targets'),
    (lambda logits, targets: logits if targets is None else logits - torch.nn.functional.one_hot(targets, 256),
     'returns other logits with targets'),
    (lambda logits, targets: logits * targets.shape[0], 'fails without targets'),
    (lambda logits, targets: logits[:, -1:] if targets is None else logits, '')])  # as nanoGPT's
def test_logits_that_depend_on_targets_are_noted(main, tmp_path, monkeypatch, capsys, edit, words):
    """A cap in the branch of the loss, a margin, a model that cannot sample."""
    def forward(self, idx, targets=None, forward=program.GPT.forward):
        logits, loss = forward(self, idx, targets)
        return edit(logits, targets), loss

    monkeypatch.setattr(program.GPT, 'forward', forward)
    main(tmp_path, '--max_iters=1', '--eval_iters=1')
    err = capsys.readouterr().err
    assert words in err if words else not err


@pytest.mark.parametrize('edit, leaks', [
    (dict(scaled_dot_product_attention=lambda sdpa, *qkv, is_causal, **options: sdpa(*qkv, **options)), True),
    (dict(scaled_dot_product_attention=lambda sdpa, q, *kv, is_causal, **options: sdpa(
        q, *kv, attn_mask=torch.ones(32, 32, dtype=bool).tril(1), **options)), True),
    (dict(scaled_dot_product_attention=lambda sdpa, q, *kv, is_causal, **options: sdpa(
        q, *kv, attn_mask=torch.ones(32, 32, dtype=bool).tril() | torch.eye(8).kron(torch.ones(4, 4)).bool(),
        **options)), True),
    (dict(gelu=lambda gelu, x, **options: gelu(x - x.mean((0, 1)), **options)), True),
    (dict(dropout=lambda dropout, x, p, training: dropout(x, p)), True),
    ({}, False)])
@pytest.mark.parametrize('flags', [[], ['--optimizer_name=sophiag', '--dtype=bfloat16', '--parallel=fsdp']])
def test_later_tokens_and_dropout_in_evaluation_are_noticed(main, tmp_path, monkeypatch, capsys, edit, leaks, flags):
    """Attention to all positions, to the next one, or in chunks; a statistic of the batch. GPT itself is causal."""
    for name, edited in edit.items():
        monkeypatch.setattr(torch.nn.functional, name, functools.partial(edited, getattr(torch.nn.functional, name)))
    main(tmp_path, *flags, '--dropout=0.2', '--max_iters=1', '--eval_iters=1')
    assert ('change the logits of earlier positions' in capsys.readouterr().err) == leaks


def masking(in_place):
    """A GPT.forward that leaves out the second half of each sequence."""
    def forward(self, idx, targets=None, forward=program.GPT.forward):
        if targets is not None:
            targets = targets if in_place else targets.clone()
            targets[:, idx.size(1) // 2:] = -1
        return forward(self, idx, targets)
    return forward


def test_a_mask_that_the_second_loss_does_not_see_stops_the_run_before_its_first_step(main, tmp_path, monkeypatch):
    """Gauss-Newton-Bartlett samples labels by `targets`; no other optimizer minds."""
    monkeypatch.setattr(program.GPT, 'forward', masking(in_place=False))
    flags = '--optimizer_name=sophiag', '--max_iters=1', '--eval_iters=1'
    message = rejection(main, tmp_path / 'a', *flags)
    assert message.startswith('model.py: GPT.forward leaves 32 of 64 positions out of the loss whose targets are not')
    assert not metrics(tmp_path / 'a')
    main(tmp_path / 'b', '--max_iters=1', '--eval_iters=1')
    monkeypatch.setattr(program.GPT, 'forward', masking(in_place=True))
    main(tmp_path / 'c', *flags)
    for key in 'val/loss', 'val/training_loss':  # the first is of all positions, whatever the mask
        copied, in_place = (metrics(tmp_path / name, key)[0] for name in 'bc')
        assert copied == pytest.approx(in_place, rel=1e-6)


@pytest.mark.parametrize('weight, words', [
    (0.01, 'of 0.01 to 0.01'), (1, ''), (torch.linspace(0.1, 1.9, 32), 'of 0.1 to 1.9'), (torch.tensor(1.05), ''),
    (1 + 9 * (torch.arange(32) == 5), 'of 1 to 10')])
def test_weights_in_the_loss_that_the_estimate_does_not_see_are_noted(main, tmp_path, monkeypatch, capsys, weight,
                                                                      words):
    plain = loss.token_loss
    monkeypatch.setattr(loss, 'token_loss', lambda logits, targets: weight * plain(logits, targets))
    main(tmp_path, '--optimizer_name=sophiag', '--max_iters=1', '--eval_iters=1')
    err = capsys.readouterr().err
    assert (f'predictions have weights {words} in the loss' in err) if words else not err


@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
def test_a_val_loss_that_is_not_the_plain_cross_entropy_is_noted(main, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(torch.nn.functional, 'cross_entropy', functools.partial(
        torch.nn.functional.cross_entropy, label_smoothing=0.1))
    main(tmp_path, f'--optimizer_name={name}', '--max_iters=1', '--eval_iters=1')
    assert 'loss.py: cross_entropy is not the plain one' in capsys.readouterr().err


def test_a_term_without_targets_is_the_same_in_evaluations_of_any_batch_size(main, tmp_path, monkeypatch):
    """Of five sequences the last batch has one."""
    def forward(self, idx, targets=None, forward=program.GPT.forward):
        logits, loss = forward(self, idx, targets)
        return logits, loss if loss is None else loss + 100 * self.transformer.wte(idx).square().mean()

    monkeypatch.setattr(program.GPT, 'forward', forward)
    for size in 4, 2:
        main(tmp_path / f'{size}', '--max_iters=1', '--eval_sequences=5', f'--batch_size={size}')
    one, two = (metrics(tmp_path / f'{size}', 'val/training_loss')[0] for size in (4, 2))
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize('shift', [0, 0.5])
def test_a_loss_of_other_logits_than_those_that_are_returned_is_noted(main, tmp_path, monkeypatch, capsys, shift):
    """Such as adjusted ones, from which Sophia-G does not draw labels."""
    prior, plain = -shift * torch.arange(1.0, 257).log(), loss.token_loss
    monkeypatch.setattr(loss, 'token_loss', lambda logits, targets: plain(logits + prior, targets))
    main(tmp_path, '--optimizer_name=sophiag', '--max_iters=1', '--eval_iters=1')
    err = capsys.readouterr().err
    assert ('of the Hessian of the loss in the logits is not that of ' in err) == bool(shift), err


def test_other_labels_are_not_taken_for_weights(main, tmp_path, monkeypatch, capsys):
    """Smoothed ones leave the Hessian in the logits as it is."""
    monkeypatch.setattr(loss, 'token_loss', lambda logits, targets: (
        0.8 * loss.cross_entropy(logits, targets) - 0.2 * logits.log_softmax(-1).mean(-1)))
    main(tmp_path, '--optimizer_name=sophiag', '--max_iters=1', '--eval_iters=1')
    assert not capsys.readouterr().err


@pytest.mark.parametrize('term, words', [
    (lambda model, logits: model.transformer.wpe.weight.square().sum(), True),
    (lambda model, logits: 100 * model.hidden.square().sum(), True),  # of several sequences
    (lambda model, logits: logits.logsumexp(-1).square().mean(), False)])
def test_terms_of_the_loss_that_the_estimate_does_not_see_are_noted(main, tmp_path, monkeypatch, capsys, term, words):
    """A z-loss is a function of the logits; a penalty on weights is not."""
    def forward(self, *args, forward=program.GPT.forward):
        handle = self.transformer.ln_f.register_forward_hook(
            lambda module, inputs, output: setattr(self, 'hidden', output.mean(1) - output.mean((0, 1))))
        logits, loss = forward(self, *args)
        handle.remove()
        return logits, loss if loss is None else loss + 0.1 * term(self, logits)

    monkeypatch.setattr(program.GPT, 'forward', forward)
    main(tmp_path, '--optimizer_name=sophiag', '--max_iters=1', '--eval_iters=1')
    assert ('that are not functions of the logits make ' in capsys.readouterr().err) == words


@pytest.mark.parametrize('optimizer, words', [('sophiah', True), ('sophiag', True), ('adamw', False)])
def test_terms_that_training_adds_to_the_models_loss_are_noted(main, tmp_path, monkeypatch, capsys, optimizer, words):
    """Such as the divergence of two forwards with dropout: estimates differentiate the model's loss. Dropout is not."""
    flags = f'--optimizer_name={optimizer}', '--dropout=0.2', '--max_iters=1', '--eval_iters=1'
    main(tmp_path / 'a', *flags)
    assert not capsys.readouterr().err

    def forward(self, idx, targets, forward=loss.Losses.forward, **second):
        outputs, other = forward(self, idx, targets, **second), self.model(idx, targets)[1]
        return outputs[0], outputs[1] + (outputs[1] - other).abs(), *outputs[2:]

    monkeypatch.setattr(loss.Losses, 'forward', forward)
    main(tmp_path / 'b', *flags)
    assert ('loss.py: Losses.forward returns ' in capsys.readouterr().err) == words


def test_a_module_in_evaluation_mode_stays_there(main, tmp_path, monkeypatch):
    """Such as a teacher, whose dropout would otherwise be on."""
    init, step, modes = program.GPT.__init__, program.train_step, []

    def with_frozen(self, config):
        init(self, config)
        self.transformer.ln_f.eval()

    def noting(run, *args):
        modes.append((run.raw_model.training, run.raw_model.transformer.ln_f.training))
        return step(run, *args)

    monkeypatch.setattr(program.GPT, '__init__', with_frozen)
    monkeypatch.setattr(program, 'train_step', noting)
    main(tmp_path, '--max_iters=2', '--eval_interval=1', '--eval_iters=1')
    assert modes == [(True, False)] * 2


def test_what_is_drawn_in_evaluations_is_the_same_after_a_resume(main, tmp_path, monkeypatch):
    drawn, evaluate = [], program.evaluate
    monkeypatch.setattr(program, 'evaluate', lambda *args: (drawn.append(torch.rand(()).item()), evaluate(*args))[1])
    main(tmp_path, '--max_iters=2', '--lr_decay_iters=3', '--eval_interval=2', '--eval_iters=1')
    main(tmp_path, '--max_iters=3', '--eval_interval=3', '--eval_iters=1', '--init_from=resume')
    assert len(drawn) == 3 and len(set(drawn)) == 1


def test_a_loss_of_other_sequences_is_forgotten_at_a_resume(main, tmp_path, monkeypatch):
    """Whatever setting of a fork chooses them; eval_iters alone changes nothing."""
    for steps, flags in enumerate([[], ['--eval_domain=a'], ['--eval_domain=a'], ['--eval_domain=b']], start=1):
        main(tmp_path, f'--max_iters={steps}', '--eval_interval=9', '--eval_sequences=2', f'--eval_iters={steps}',
             '--auto_resume=True', *flags)
        monkeypatch.setitem(program.DEFAULTS, 'eval_domain', program.setting(str, role='eval'))
    lines = runs.read_metrics(tmp_path / 'metrics.jsonl')
    assert [line['iter'] for line in lines if 'val/loss' in line] == [0, 2, 4]  # not 1 and 3, of other sequences


@pytest.mark.parametrize('name', ['adamw', 'sophiag', 'sophiah'])
def test_a_forward_may_change_ids_in_place(main, tmp_path, monkeypatch, name):
    """The checks before the first step use its mini-batch, and an estimate the sequences of the gradient."""
    def in_place(self, idx, targets=None, forward=program.GPT.forward):
        idx[idx % 4 == 1] += 1
        return forward(self, idx, targets)

    def plain(self, idx, targets=None, forward=program.GPT.forward):
        return forward(self, torch.where(idx % 4 == 1, idx + 1, idx), targets)

    losses = []
    for forward in in_place, plain:
        monkeypatch.setattr(program.GPT, 'forward', forward)
        main(tmp_path / forward.__name__, f'--optimizer_name={name}', '--max_iters=2', '--log_interval=1')
        lines = runs.read_metrics(tmp_path / forward.__name__ / 'metrics.jsonl')
        losses.append([(line.get('train/loss'), line.get('hessian_norm'), line.get('val/loss')) for line in lines])
    assert losses[0] == losses[1]


@pytest.mark.parametrize('always', [True, False])
def test_a_forward_that_changes_a_buffer_in_evaluation_is_noted(main, tmp_path, monkeypatch, capsys, always):
    """Counts of experts, with which training goes on, would have validation data in them."""
    def counting(self, *args, forward=program.GPT.forward):
        self.seen += always or self.training
        return forward(self, *args)

    init = program.GPT.__init__
    monkeypatch.setattr(program.GPT, '__init__', lambda self, config: (
        init(self, config), self.register_buffer('seen', torch.zeros(())))[0])
    monkeypatch.setattr(program.GPT, 'forward', counting)
    main(tmp_path, '--max_iters=1', '--eval_iters=1')
    assert ('GPT.forward changes the buffer seen in evaluation mode' in capsys.readouterr().err) == always


def test_what_the_constructor_draws_and_no_checkpoint_holds_is_that_of_the_first_seed(main, tmp_path, monkeypatch):
    """After a start from the weights of a run with another seed, a resume with a third one, and in scripts/eval.py."""
    def rotated(self, config, init=program.GPT.__init__):
        init(self, config)
        rotation = torch.nn.init.orthogonal_(torch.empty(config.n_embd, config.n_embd))
        self.transformer.wte.register_buffer('rotation', rotation, persistent=False)
        self.transformer.wte.register_forward_hook(lambda wte, args, output: output @ wte.rotation)

    monkeypatch.setattr(program.GPT, '__init__', rotated)
    main(tmp_path / 'a', '--max_iters=3')
    flags = '--learning_rate=0', '--max_iters=1', '--seed=2'
    main(tmp_path / 'b', f'--init_from={tmp_path / "a"}', *flags)
    main(tmp_path / 'b', '--init_from=resume', '--learning_rate=0', '--max_iters=2', '--seed=3')
    found = [line['val/loss'] for name in 'ab' for line in runs.read_metrics(tmp_path / name / 'metrics.jsonl')
             if 'val/loss' in line]
    assert len(found) >= 5 and {*found[-3:]} == {found[-4]}
    first, second = (load(tmp_path / name).model.transformer.wte.rotation for name in 'ab')
    assert torch.equal(first, second)


def test_an_estimate_of_more_sequences_than_labels_ends_the_run(main, tmp_path, monkeypatch):
    def start(self, *args, start=HessianHook.start):
        start(self, *args)
        self.rows_left *= 2
        return self.due

    monkeypatch.setattr(HessianHook, 'start', start)
    with pytest.raises(SystemExit, match='^GNBHook: has more sequences for an estimate than hessian_batch_size = 2'):
        main(tmp_path, '--optimizer_name=sophiag', '--hessian_batch_size=2', '--max_iters=1')


def test_a_further_validation_set_does_not_count_in_the_loss(main, tmp_path, monkeypatch):
    """With the weight that a Bin has by itself, val/loss would be the sum of two losses."""
    def opened(*args, open_dataset=program.open_dataset, **weight):
        data, val = open_dataset(*args)
        return data, val | dict(other=Bin(next(iter(val.values())).path.parent, 'val', **weight))

    flags = '--max_iters=1', '--eval_iters=1'
    monkeypatch.setattr(program, 'open_dataset', opened)
    assert 'sum to 2' in rejection(main, tmp_path / 'a', *flags)
    monkeypatch.setattr(program, 'open_dataset', functools.partial(opened, weight=0))
    main(tmp_path / 'b', *flags)
    assert metrics(tmp_path / 'b', 'val/loss') == metrics(tmp_path / 'b', 'val/loss/other')


@pytest.mark.parametrize('name', ['adamw', 'sophiag'])
@pytest.mark.parametrize('returned', [
    lambda logits, loss: (None, loss), lambda logits, loss: (loss, logits), lambda logits, loss: (logits, loss[None]),
    lambda logits, loss: dict(logits=logits, loss=loss), lambda logits, loss: SimpleNamespace(logits=logits)])
def test_a_forward_that_returns_something_else_is_one_line(main, tmp_path, monkeypatch, name, returned):
    forward = program.GPT.forward
    monkeypatch.setattr(program.GPT, 'forward', lambda *args: returned(*forward(*args)))
    assert 'must return the logits of all positions' in rejection(main, tmp_path, f'--optimizer_name={name}')


def test_a_buffer_that_no_checkpoint_brings_back_is_one_line(main, tmp_path, monkeypatch):
    def growing(self, *args):
        self.register_buffer('cache', torch.zeros(3), persistent=persistent)
        return forward(self, *args)
    forward, persistent = program.GPT.forward, True
    monkeypatch.setattr(program.GPT, 'forward', growing)
    assert 'makes or resizes the buffer cache, so that no checkpoint' in rejection(main, tmp_path / 'a')
    persistent = False
    main(tmp_path / 'b', '--max_iters=1', '--eval_iters=1')


def test_a_forward_of_16_bit_kernels_is_checked_in_16_bits(main, tmp_path, monkeypatch):
    def attention(q, k, v, **options):
        assert q.dtype == torch.bfloat16
        return sdpa(q, k, v, **options)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', attention)
    main(tmp_path, '--optimizer_name=sophiag', '--dtype=bfloat16', '--max_iters=1', '--eval_iters=1')


def test_the_first_update_is_checked_and_frees_what_the_check_needs(main, tmp_path, monkeypatch):
    """A second optimizer state, and a number that no checkpoint can hold."""
    ended, check = [], program.guards.check_first_update
    with monkeypatch.context() as patch:
        patch.setattr(program, 'close_run', ended.append)
        main(tmp_path / 'a', '--max_iters=1')
    assert ended[0].fresh is None

    def spoiling(run, step):
        run.state.clipped = np.float64(0.5)
        check(run, step)
    monkeypatch.setattr(program.guards, 'check_first_update', spoiling)
    assert 'TrainState.clipped: a checkpoint cannot hold a float64 there' in rejection(main, tmp_path / 'b')
    assert not checkpoint.checkpoints(tmp_path / 'b')


@pytest.mark.gpu
def test_gpu_agrees_with_cpu(train, tmp_path):
    assert train(tmp_path / 'cpu', '--dropout=0', name='sophiag').code == 0
    for dtype, compile, slack, parallel in (
            ('float32', False, 2e-2, 'ddp'), ('bfloat16', True, 5e-2, 'ddp'), ('float16', False, 5e-2, 'ddp'),
            ('float32', False, 2e-2, 'fsdp'), ('bfloat16', True, 5e-2, 'fsdp')):
        out = tmp_path / f'{dtype}-{parallel}'
        done = finish(start(out, '--dropout=0', '--device=cuda', f'--dtype={dtype}', f'--parallel={parallel}',
                            f'--compile={compile and can_compile("cuda")}', name='sophiag'))
        assert done.code == 0, done.err
        assert metrics(out) == pytest.approx(metrics(tmp_path / 'cpu'), abs=slack)


@pytest.mark.gpu
@pytest.mark.parametrize('name, dtype, parallel', [('adamw', 'float16', 'ddp'), ('sophiag', 'bfloat16', 'fsdp')])
def test_gpu_resumes(corpus, tmp_path, name, dtype, parallel):
    """The optimizer's state, fused AdamW's counters and the loss scale come back to the device."""
    flags = ['--device=cuda', '--compile=False', f'--dtype={dtype}', f'--parallel={parallel}', '--lr_decay_iters=10']
    for out, stops in ('whole', [10]), ('parts', [5, 10]):
        for stop in stops:
            done = finish(start(tmp_path / out, *flags, f'--max_iters={stop}', '--auto_resume=True', name=name))
            assert done.code == 0, done.err
    # Some kernels add up in another order each time.
    for key, slack in {'train/loss': 1e-2, 'val/loss': 1e-2, 'momentum_norm': 0.1}.items():
        assert metrics(tmp_path / 'parts', key) == pytest.approx(metrics(tmp_path / 'whole', key), rel=slack), key
    whole, parts = (checkpoint.load_checkpoint(tmp_path / out)[1] for out in ('whole', 'parts'))
    assert whole['scaler'] == parts['scaler'] and bool(whole['scaler']) == (dtype == 'float16')


def schedule(name, **settings):
    """The learning rates of 101 iterations: peak 1, warm-up 10, final 0.1."""
    c = SimpleNamespace(**{**dict(schedule=name, decay_lr=True, learning_rate=1.0, min_lr=0.1, warmup_iters=10,
                                  lr_decay_iters=100, cooldown_iters=20 * (name == 'wsd')), **settings})
    return [program.learning_rate_at(c, i) for i in range(101)]


def test_shapes_of_schedules():
    found = {name: schedule(name) for name in ('cosine', 'linear', 'wsd', 'constant')}
    for lrs in found.values():
        assert lrs[:10] == [(i + 1) / 11 for i in range(10)] and lrs[10] == 1
    assert found['cosine'][10:] == [0.1 + 0.5 * (1 + math.cos(math.pi * (i / 90))) * (1.0 - 0.1) for i in range(91)]
    assert found['linear'][55] == pytest.approx(0.55) and found['linear'][100] == pytest.approx(0.1)
    assert set(found['wsd'][10:81]) == {1.0} and found['wsd'][81] < 1
    assert found['wsd'][90] == pytest.approx(0.55) and found['wsd'][100] == pytest.approx(0.1)
    assert set(found['constant'][10:]) == {1.0}
    # Any schedule decays in the last cooldown_iters.
    cooled = schedule('cosine', cooldown_iters=20)
    assert set(cooled[10:81]) == {1.0} and cooled[90] == pytest.approx(0.55)
    assert cooled[85] - 0.1 == pytest.approx(0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    # Longer than planned: the final learning rate.
    assert schedule('linear', lr_decay_iters=50)[70] == schedule('wsd', lr_decay_iters=50)[70] == pytest.approx(0.1)
    assert schedule('wsd', decay_lr=False) == [1.0] * 101


def test_settings_of_schedules():
    def resolve(*flags):
        return program.resolve([*TINY, *flags])

    assert resolve('--schedule=wsd', '--max_iters=50').cooldown_iters == 10
    assert [resolve('--schedule=wsd', f'--warmup_iters={n}').cooldown_iters for n in (2, 9, 99)] == [2, 1, 0]
    assert resolve().cooldown_iters == 0
    assert resolve('--schedule=constant', '--warmup_iters=20').cooldown_iters == 0
    for flags, message in [
            (['--learning_rate=1e-3', '--min_lr=2e-3'], '--min_lr=0.002: must be at most learning_rate = 0.001'),
            (['--schedule=constant', '--cooldown_iters=9'], '--cooldown_iters=9: must be 0 for --schedule=constant'),
            (['--schedule=wsd', '--cooldown_iters=9'], '--cooldown_iters=9: must be at most 8')]:
        assert message in rejection(resolve, *flags)
