"""scripts/rehearse.py: the unedited repository passes, and edits that keep state in a wrong place are found."""

import re
import shutil

import pytest

from scripts import rehearse

TINY = ['--model_size=tiny', '--optimizer_name=sophiag', '--n_layer=1', '--n_embd=16', '--block_size=16', '--steps=7']


@pytest.fixture
def report(fork, corpus, monkeypatch, capsys):
    """report(code, *argv): the exit status and the output of a rehearsal of the repository with the edits of `code`."""
    def run(code, *argv):
        def launch(argv, ranks=1, first=None):
            done = fork(*argv, faults=code, ranks=ranks, check=True)
            return done.out + done.err

        monkeypatch.setattr(rehearse, 'launch', launch)
        monkeypatch.setattr(rehearse.os, 'cpu_count', lambda: 1)  # `fork` is for one thread
        with pytest.raises(SystemExit) as ended:
            rehearse.main([*TINY, f'--dataset={corpus}', *argv])
        return ended.value.code, capsys.readouterr().out
    return run


def test_the_repository_passes(report):
    status, text = report('', '--dropout=0.1', '--only', 'again', 'resumed', 'evaluated', 'micro-batches', 'two ranks',
                          'sharded', 'recomputed')
    assert not status, text
    again, resumed, *rounded = text.splitlines()[:7]
    assert again.split() == ['again', 'equal'] and resumed.split() == ['resumed', 'equal']
    assert all('equal' in line for line in rounded) and 'warning' not in text


def edited(module, function, old, new):
    """The code that replaces words in a function of a module."""
    return f'import {module}\nexec(inspect.getsource({module}.{function}).replace({old!r}, {new!r}), vars({module}))\n'


# The edits of a fork: (its code; what a rehearsal compares; what it says)
WINDOW = '''
import collections, sophia
update = sophia.Sophia.update_hessian
def update_hessian(self, estimates):
    window = vars(self).setdefault('window', collections.deque(maxlen=3))
    window.append([h.clone() for h in estimates])
    update(self, [sum(hs) / len(hs) for hs in zip(*window)])
sophia.Sophia.update_hessian = update_hessian
'''
MODULE = '''
import sophia
sophia.SECOND_MOMENT = {}
update = sophia.Sophia.step
@torch.no_grad()
def scaled(self, closure=None):
    for group in self.param_groups:
        for p in group['params']:
            v = sophia.SECOND_MOMENT.setdefault(p, torch.zeros_like(p)).lerp_(p.grad ** 2, 0.1)
            p.grad.div_(v.sqrt() + 1e-3)
    return update(self, closure)
sophia.Sophia.step = scaled
'''
HOOK = '''
import hessian
finish = hessian.HessianHook.finish
def adapted(self):
    self.interval += self.due
    return finish(self)
hessian.HessianHook.finish = adapted
'''
AVERAGE = '''
import dataclasses, train
@dataclasses.dataclass
class Run(train.Run):
    average: dict = dataclasses.field(default_factory=dict)
step = train.train_step
def averaged(run, *args):
    found = step(run, *args)
    with torch.no_grad():
        for p in run.params:
            run.average.setdefault(p, p.clone()).lerp_(p, 0.5)
    return found
train.Run, train.train_step = Run, averaged
'''
MODEL = '''
forward = model.GPT.forward
def counting(self, idx, targets=None):
    self.calls = vars(self).get('calls', 0) + 1
    logits, loss = forward(self, idx, targets)
    return logits, loss if loss is None else loss * (1 + 0.01 * self.calls)
model.GPT.forward = counting
'''
PLACES = MODULE + HOOK + AVERAGE + MODEL  # of which each is named
RAMP = '''
import train
advance = loader.TrainLoader.__next__
def ramped(self):
    self.total_batch_size = min(8, 2 + 2 * (self.iteration // 3))
    return advance(self)
loader.TrainLoader.__next__ = ramped
'''
STREAM = '''
def starts(self, iteration):
    self.stream = vars(self).get('stream') or iter(range(0, 9999, 7))
    return loader.np.array([next(self.stream) for _ in range(self.total_batch_size)])
loader.TrainLoader.starts = starts
'''
MEAN = '''
import train
step, measure, losses = train.train_step, train.metrics_of, []  # since the last line of the log
def noted(run, *args):
    found = step(run, *args)
    losses.append(found.loss)
    return found
def averaged(*args):
    mean = sum(losses) / len(losses)
    losses.clear()
    return dict(measure(*args), loss_mean=mean)
train.train_step, train.metrics_of = noted, averaged
'''
ANNEALED = '''
import loss
plain, advance, loss.FACTOR = loss.token_loss, loader.TrainLoader.__next__, 2.0
loss.token_loss = lambda *args: plain(*args) * loss.FACTOR
def annealed(self):
    loss.FACTOR = 2 - self.iteration / 10  # which the evaluation before has read
    return advance(self)
loader.TrainLoader.__next__ = annealed
'''
PREVIOUS = '''
import hessian
def labels(self, X, Y):
    self.previous, rows = (X, Y), getattr(self, 'previous', (X, Y))
    if n := self.take_rows(X):
        self.rows.append(tuple(tokens[:n] for tokens in rows))
    return {}
hessian.HutchinsonHook.labels = labels
'''
LINE = '''
import train
evaluate = train.evaluate_and_save
def logged(run):
    evaluate(run)
    run.log.record(run.state, 'accuracy', dict(accuracy=0.5))  # a resume removes lines without 'val/'
train.evaluate_and_save = logged
'''
LENGTH = '''
advance = loader.TrainLoader.__next__
loader.TrainLoader.__next__ = lambda self: advance(self)[:, :int(torch.randint(8, 17, ()))]
'''
RANDOM = '''
def augment(self, sequences, generators):
    return (sequences + loader.np.random.randint(0, 2, sequences.shape).astype(sequences.dtype)) % 251
loader.TrainLoader.augment = augment
'''
FILE = '''
import train
step, close, losses = train.train_step, train.close_run, []
def noted(run, *args):
    found = step(run, *args)
    losses.append(found.loss)
    with open(Path(run.config.out_dir, 'losses.txt'), 'a') as file:
        print(found.loss, file=file)
    return found
def closed(run):
    Path(run.config.out_dir, 'sum.txt').write_text(f'{sum(losses)}')
    close(run)
train.train_step, train.close_run = noted, closed
'''
LINES = '''
import train
step = train.train_step
def noted(run, sequences, iteration):
    found, path = step(run, sequences, iteration), Path(run.config.out_dir, 'losses.txt')
    kept = path.read_text().splitlines()[:iteration] if iteration else []
    path.write_text(''.join(f'{line}\\n' for line in [*kept, found.loss]))
    return found
train.train_step = noted
'''
SHARE = '''
import train
step, measure, means = train.train_step, train.metrics_of, []
def noted(run, sequences, *args):
    means.append(sequences.float().mean().item())
    return step(run, sequences, *args)
def measured(run, *args):
    with open(Path(run.config.out_dir, 'means.txt'), 'a') as file:  # on every rank
        print(means[-1], file=file)
    return dict(measure(run, *args), mean_id=means[-1])
train.train_step, train.metrics_of = noted, measured
'''
SPARSE = '''
import sophia
sophia.Sophia.rule = lambda self, params, grads, *rest: sophia.sophia_update(
    params, [g * (g.abs() > g.abs().mean()) for g in grads], *rest)
'''
TRUST_RATIO = edited('sophia', 'sophia_update', 'clip_(update, rho)', '''clip_(update, rho)
    for p, u in zip(params, update):
        u.mul_(p.norm() / (u.norm() + 1e-12))''') + '''
sophia.Sophia.rule = staticmethod(sophia.sophia_update)
'''
CAPPED = '''
import train
make, head = train.make_model, torch.nn.Linear.forward
def made(*args):
    found = make(*args)
    found[0].lm_head.cap = 0.2
    return found
def capped(self, x):
    logits = head(self, x)
    return self.cap * torch.tanh(logits / self.cap) if hasattr(self, 'cap') else logits
train.make_model, torch.nn.Linear.forward = made, capped
'''
STATISTIC = '''
make, forward = model.Block.__init__, model.Block.forward
def made(self, config):
    make(self, config)
    self.register_buffer('scale', torch.ones(()))
def scaled(self, x, *args):
    self.scale = self.scale.lerp(x.detach().std(), 0.1)
    return forward(self, x / self.scale, *args)
model.Block.__init__, model.Block.forward = made, scaled
'''
ACCURACY = edited('train', 'evaluate', 'training_loss, count])', '(logits.argmax(-1) == Y).float().mean(), '
                  'torch.ones(())])')  # a mean over batches, of which the last has padding
OF_MICRO_BATCHES = edited('train', 'train_step', 'loss * (count / positions)', 'loss / len(micro_batches)')
AVERAGING = '''
forward = model.GPT.forward
def averaging(self, *args):
    with torch.no_grad():
        self.transformer.wpe.weight.mul_(0.999)
    return forward(self, *args)
model.GPT.forward = averaging
'''
AFTERWARDS = edited('train', 'train_step', ''' or hessian.finish()
    if not problem:
        scaler.step(run.optimizer)''', '''
    if not problem:
        scaler.step(run.optimizer)
        hessian.finish()''')
PENALTY = '''
import train
step = train.train_step
def penalized(run, *args):
    found = step(run, *args)
    return found._replace(loss=found.loss + 0.1)
train.train_step = penalized
'''
BY_VALUE = '''
import train
clip = train.optim.clip_gradients
def by_value(params, max_norm):
    norm = clip(params, 0)
    torch.nn.utils.clip_grad_value_(params, 1e-3)
    return norm
train.optim.clip_gradients = by_value
'''
ALL_DECAY = '''
import train
set_rate = train.optim.set_learning_rate
def scheduled(optimizer, lr):
    set_rate(optimizer, lr)
    for group in optimizer.param_groups:
        group['weight_decay'] = 0.1 * lr / 0.01
train.optim.set_learning_rate = scheduled
'''
TWICE = '''
import loss
forward = loss.Losses.forward
def twice(self, X, Y, **labels):
    one, two = (forward(self, X, Y.clone(), **labels) for _ in range(2))
    return one[0], (one[1] + two[1]) / 2, *one[2:]
loss.Losses.forward = twice
'''
NO_END = '''
import train
train.learning_rate_at = lambda c, i: c.learning_rate / (1 + i) ** 0.5
'''
HALF_RATE = '''
import train
set_lr = train.optim.set_learning_rate
train.optim.set_learning_rate = lambda optimizer, lr: set_lr(optimizer, lr / 2)
'''
TWO_UPDATES = '''
import train
check = train.guards.check_first_update
def updated_again(run, step):
    check(run, step)
    train.train_step(run, torch.zeros(8, 17, dtype=torch.int64), run.state.iter)
train.guards.check_first_update = updated_again
'''
MORE_ROWS = '''
import hessian
start = hessian.HessianHook.start
def doubled(self, *args):
    due = start(self, *args)
    self.rows_left *= 2
    return due
hessian.HessianHook.start = doubled
'''
FROM_FIRST = '''
def update_ema(self, group, params, targets):
    for h, target in zip(self.buffers(params, 'hessian'), targets):
        h.lerp_(target, 1 - group['betas'][1] if h.any() else 1)
optimizers.Sophia.update_ema = update_ema
'''
OFTEN = '''
import hessian
hessian.HessianHook.is_due = classmethod(lambda cls, iteration, interval: iteration < 2 or iteration % interval == 0)
'''
BETA2 = '''
import train
set_scheduled = train.optim.set_learning_rate
def with_beta2(optimizer, lr):
    set_scheduled(optimizer, lr)
    for group in optimizer.param_groups:
        group['betas'] = 0.96, 1 - 10 * lr
train.optim.set_learning_rate = with_beta2
'''
WEIGHT_NORM = '''
make = model.GPT.__init__
def made(self, config):
    make(self, config)
    torch.nn.utils.parametrizations.weight_norm(self.transformer.h[0].mlp.c_fc)
model.GPT.__init__ = made
'''
DEPTHWISE = '''
make, forward = model.Block.__init__, model.Block.forward
def made(self, config):
    make(self, config)
    self.conv = torch.nn.Conv1d(16, 16, 3, padding=2, groups=16, bias=False)
def mixed(self, x, *args):
    return forward(self, x + self.conv(x.transpose(1, 2))[..., :x.size(1)].transpose(1, 2), *args)
model.Block.__init__, model.Block.forward = made, mixed
'''


@pytest.mark.parametrize('code, comparison, words', [
    (WINDOW, 'resumed', 'window'),
    (PLACES, 'resumed', "a resume does not bring back … Run.average ('0 items' instead of … hook.interval (2 instead "
     "of … sophia.SECOND_MOMENT ('0 items' instead of … raw_model.calls ("),
    (RAMP, 'resumed', 'DIFFERS from step 3: '),
    (STREAM, 'resumed', 'DIFFERS from step 3: '),
    (MEAN, 'resumed', 'DIFFERS from step 3: loss_mean is '),
    (ANNEALED, 'resumed', 'DIFFERS from step 6: val/training_loss is '),
    (PREVIOUS, 'resumed', 'DIFFERS from step 6: '),
    (LINE, 'resumed', 'DIFFERS from step 3: accuracy is nothing instead of 0.5'),
    (RANDOM, 'again', 'DIFFERS from step 2: '),
    (FILE, 'resumed', 'equal; a resume does not bring back … file sum.txt (… file losses.txt ('),
    (SHARE, 'two ranks', 'DIFFERS from step 0: mean_id is '),
    (SPARSE, 'sharded', 'DIFFERS from step 0: momentum_norm is '),
    (TRUST_RATIO, 'sharded', 'DIFFERS from step 2: weights.'),
    (CAPPED, 'evaluated', 'DIFFERS: scripts/eval.py measures '),
    (STATISTIC, 'recomputed', 'DIFFERS from step '),
    (OF_MICRO_BATCHES, 'micro-batches', 'DIFFERS from step 0: grad_norm is '),
    (ACCURACY, 'micro-batches', ': val/training_loss is '),
    (AVERAGING, 'micro-batches', 'DIFFERS from step '),
], ids=['window', 'places', 'ramp', 'stream', 'mean',
        'annealed', 'previous', 'line', 'random', 'file', 'share', 'sparse', 'trust_ratio', 'capped', 'statistic',
        'of_micro_batches', 'accuracy', 'averaging'])
def test_state_in_a_wrong_place_is_found(report, code, comparison, words):
    status, text = report(code, *['--optimizer_name=sophiah'] * (code is PREVIOUS), '--only', comparison)
    assert status and text.startswith(comparison) and all(word in text for word in words.split('…')), text
    assert code is not SHARE or '; file means.txt has 6 lines instead of 3' in text
    # A run alone says so of what is an attribute or a field, at its first save.
    assert ('has changed, but no checkpoint holds it' in text) == (code in (WINDOW, PLACES))
    assert ('TrainState' in text) == (comparison == 'resumed')


def test_without_dropout_the_files_of_two_ranks_agree_and_products_are_not_recomputed(report):
    status, text = report('', '--optimizer_name=sophiah', '--only', 'recomputed', 'two ranks')
    assert not status and text.startswith('recomputed      skipped: ') and '\ntwo ranks       equal' in text, text


def test_tensors_of_a_hessian_vector_product_may_be_kept(report):
    status, text = report('forward = model.Block.forward\nmodel.Block.forward = lambda self, x, *args: forward(self, '
                          "vars(self).update(kept=x) or x, *args)", '--optimizer_name=sophiah', '--only', 'resumed')
    assert status and text.startswith('resumed         equal; a resume does not bring back raw_model.transformer.h.0.')


def test_what_a_run_says_of_its_steps_and_is_not_so_is_noted(report):
    edits = AFTERWARDS + FROM_FIRST + PENALTY + BY_VALUE + ALL_DECAY + HALF_RATE + TWICE + NO_END
    _, text = report(edits, '--grad_clip=100', '--hessian_interval=3', '--only', 'again')
    for words in ('the loss of the first step is ', 'grad_clipped: counts 0 of 1 gradients, and 1 were clipped',
                  'weight decay: a param group that parameter_groups gives none, as of norms and biases, has ',
                  'the learning rate of step 0 is ',
                  'a step takes 2 times the FLOPs of flops_per_token', 'learning_rate_at: at lr_decay_iters it is ',
                  'update_unclipped: is ', 'h: a first estimate of 1 makes it 1 instead of 1 − beta2 = 0.01, '):
        assert f'warning: {words}' in text


def test_updates_and_estimates_that_are_not_counted_are_noted(report):
    edits = TWO_UPDATES + MORE_ROWS + OFTEN + BETA2
    _, text = report(edits, '--grad_clip=0.1', '--optimizer_name=sophiah', '--only', 'again')
    warnings = re.findall('^warning: (.*)$', text, re.MULTILINE)
    assert warnings == [
        'h: β2 is 0.9933 at step 0 instead of beta2 = 0.99, which scripts/curvature.py (level, averaged, mean_age, '
        'noise_of_h) and the warning of a runaway assume',
        'train_step is called more than once in an iteration: tokens, FLOPs and grad_clipped count one',
        "step 1 makes an estimate, though hessian_interval = 2; figures spread the FLOPs of the hook's `estimates` "
        'evenly over the run',
        'a step with an estimate takes 4 times the FLOPs of flops_per_token in runtime/gpt.py, and figures count '
        '3 times']


def test_a_file_that_training_reads_is_named_and_a_depthwise_convolution_is_no_fault(report, corpus, tmp_path):
    (tmp_path / 'order.bin').write_text('of the data')
    for name in 'second', 'only_val':
        shutil.copytree(corpus, tmp_path / name)
    _, text = report(f'''{DEPTHWISE}
starts = loader.TrainLoader.starts
def reading(self, iteration):
    loader.open_dataset({str(tmp_path / "second")!r}, 16)
    return starts(self, iteration) if open({str(tmp_path / "order.bin")!r}).read() else None
loader.TrainLoader.starts = reading
''', f'--dataset={corpus}:1,{tmp_path / "only_val"}:0', '--only', 'again')
    named = re.findall('^note: training reads (.*); a resume does not notice when it is replaced$', text, re.MULTILINE)
    assert named == [str(tmp_path / name) for name in (
        'order.bin', 'second/meta.json', 'second/train.bin', 'second/val.bin')]
    assert 'warning: a step takes' not in text  # as PyTorch's count of the FLOPs of a convolution with groups is wrong


def test_the_loop_may_draw_random_numbers_and_keep_a_file_and_layers_may_have_parametrizations(report):
    status, text = report(LENGTH + LINES + WEIGHT_NORM, '--only', 'resumed')
    assert not status and text.splitlines()[0].split() == ['resumed', 'equal'], text


@pytest.mark.parametrize('steps', [7, 10, 11, 12, 23, 24, 100])
def test_a_run_is_resumed_after_an_evaluation_and_before_one_with_an_estimate(corpus, steps):
    c = rehearse.train.resolve(rehearse.shrunk(['--optimizer_name=sophiah', f'--dataset={corpus}'], steps))
    after, before = rehearse.stops(steps)
    assert 0 < after < before < steps and c.always_save_checkpoint
    assert after % c.eval_interval == before % c.eval_interval == before % c.hessian_interval == 0
    assert after % c.hessian_interval and (after - 1) % c.log_interval and (before - 1) % c.log_interval
    assert before % c.log_interval == 0


def test_ranks_that_wait_for_each_other_are_ended(monkeypatch):
    monkeypatch.setattr(rehearse, 'PATIENCE', 0)
    with pytest.raises(SystemExit, match='still running after 1 s, while one rank took 0 s: ranks that do not agree'):
        rehearse.launch(['-c', 'import time; time.sleep(60)'], ranks=2, first=0.1)


def test_a_rank_that_prints_much_does_not_wait_for_the_others(tmp_path, monkeypatch):
    """As it would once a pipe is full that nobody reads."""
    monkeypatch.setattr(rehearse, 'PATIENCE', 20)
    code = ('import os, pathlib, time; print(os.environ["RANK"] * 200_000, flush=True); '
            f'done = pathlib.Path({str(tmp_path)!r}, "1")\n'
            'if os.environ["RANK"] == "1": done.touch()\n'
            'while not done.exists(): time.sleep(0.01)')
    assert rehearse.launch(['-c', code], ranks=2, first=0) == '0' * 200_000 + '\n' + '1' * 200_000 + '\n'
