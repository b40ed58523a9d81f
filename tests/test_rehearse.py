"""scripts/rehearse.py: the unedited repository passes, and edits that keep state in a wrong place are found."""

from types import SimpleNamespace

import pytest
import torch

import train
from configurator import Config, setting
from scripts import rehearse

TINY = ['--model_size=tiny', '--optimizer_name=sophiag', '--n_layer=1', '--n_embd=16', '--block_size=16', '--steps=7']


@pytest.fixture
def report(fork, corpus, monkeypatch, capsys):
    """report(code, *argv): the exit status and the output of a rehearsal of the repository with the edits of `code`."""
    def run(code, *argv):
        def launch(argv, ranks=1):
            done = fork(*argv, faults=code, ranks=ranks)
            text = done.out + done.err
            if done.code:
                raise SystemExit(f'STOPS with exit code {done.code}: {rehearse.last_words(text)}')
            return text

        monkeypatch.setattr(rehearse, 'launch', launch)
        monkeypatch.setattr(rehearse.os, 'cpu_count', lambda: 1)  # `fork` is for one thread
        with pytest.raises(SystemExit) as ended:
            rehearse.main([*TINY, f'--dataset={corpus}', *argv])
        return ended.value.code, capsys.readouterr().out
    return run


def test_the_repository_passes(report):
    status, text = report('', '--dropout=0.1', '--only', 'resumed', 'evaluated', 'micro-batches', 'two ranks',
                          'sharded', 'recomputed')
    assert not status, text
    resumed, *rounded = text.splitlines()
    assert resumed.split() == ['resumed', 'equal'] and all('equal' in line for line in rounded)


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
MODEL = '''
forward = model.GPT.forward
def counting(self, idx, targets=None):
    self.calls = vars(self).get('calls', 0) + 1
    logits, loss = forward(self, idx, targets)
    return logits, loss if loss is None else loss * (1 + 0.01 * self.calls)
model.GPT.forward = counting
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
PREVIOUS = '''
import hessian
def labels(self, X, Y, rows):
    self.previous, sequences = (X, Y), getattr(self, 'previous', (X, Y))
    if n := self.count(rows):
        self.sequences.append(tuple(tokens[:n] for tokens in sequences))
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
train.train_step = noted
train.metrics_of = lambda *args: dict(measure(*args), mean_id=means[-1])
'''
SPARSE = '''
import sophia
sophia.Sophia.rule = lambda self, params, grads, *rest: sophia.sophia_update(
    params, [g * (g.abs() > g.abs().mean()) for g in grads], *rest)
'''
TRUST_RATIO = edited('sophia', 'sophia_update', 'clamp_max_(update, rho)', '''clamp_max_(update, rho)
    for p, u in zip(params, update):
        u.mul_(p.norm() / (u.norm() + 1e-12))''') + '''
sophia.Sophia.rule = staticmethod(sophia.sophia_update)
'''
CAPPED = '''
import train
make = train.make_model
def capped(*args):
    found = make(*args)
    found[0].lm_head.register_forward_hook(lambda module, args, logits: 0.2 * torch.tanh(logits / 0.2))
    return found
train.make_model = capped
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
PENALTY = edited('train', 'train_step', 'return Step(mean_loss,', 'return Step(mean_loss + 0.1,')
OF_MICRO_BATCHES = edited('train', 'train_step', 'loss * (count / positions)', 'loss / len(micro_batches)')
AVERAGING = '''
forward = model.GPT.forward
def averaging(self, *args):
    with torch.no_grad():
        self.transformer.wpe.weight.mul_(0.999)
    return forward(self, *args)
model.GPT.forward = averaging
'''


@pytest.mark.parametrize('code, comparison, words', [
    (WINDOW, 'resumed', 'DIFFERS from step 6: '),
    (MODEL, 'resumed', 'DIFFERS from step 6: '),
    (STREAM, 'resumed', 'DIFFERS from step 6: '),
    (MEAN, 'resumed', 'DIFFERS from step 6: loss_mean is '),
    (PREVIOUS, 'resumed', 'DIFFERS from step 6: '),
    (LINE, 'resumed', 'DIFFERS from step 6: accuracy is nothing instead of 0.5'),
    (RANDOM, 'resumed', 'DIFFERS from step '),
    (SHARE, 'two ranks', 'DIFFERS from step 0: mean_id is '),
    (SPARSE, 'sharded', 'DIFFERS from step 0: momentum_norm is '),
    (TRUST_RATIO, 'sharded', 'DIFFERS from step '),
    (CAPPED, 'evaluated', 'DIFFERS: scripts/eval.py measures '),
    (STATISTIC, 'recomputed', 'DIFFERS from step '),
    (OF_MICRO_BATCHES, 'micro-batches', 'DIFFERS from step 0: grad_norm is '),
    (ACCURACY, 'micro-batches', ': val/training_loss is '),
    (AVERAGING, 'micro-batches', 'DIFFERS from step '),
], ids=['window', 'model', 'stream', 'mean', 'previous', 'line', 'random', 'share', 'sparse', 'trust_ratio', 'capped',
        'statistic', 'of_micro_batches', 'accuracy', 'averaging'])
def test_state_in_a_wrong_place_is_found(report, code, comparison, words):
    status, text = report(code, *['--optimizer_name=sophiah'] * (code is PREVIOUS), '--only', comparison)
    assert status and text.startswith(comparison) and words in text, text
    assert ('TrainState' in text) == (comparison == 'resumed')
    assert code is not WINDOW or '; from step 7: optimizer.state.' in text and '.hessian is a tensor of norm ' in text


FORWARD = """
forward = model.GPT.forward
def edited(self, idx, targets=None):
    {}
    return logits, loss
model.GPT.forward = edited
"""
RETURNED = FORWARD.replace('{}', 'logits, loss = forward(self, idx, targets)\n    {}')
INIT = """
init = model.GPT.__init__
def initialized(self, config):
    init(self, config)
    {}
model.GPT.__init__ = initialized
"""


def attending(mask):
    """The code of another attention mask."""
    return f"""
sdpa = torch.nn.functional.scaled_dot_product_attention
torch.nn.functional.scaled_dot_product_attention = lambda *qkv, is_causal, **options: sdpa(
    *qkv, attn_mask={mask}, **options)
"""


def loss_is(expression):
    """The code of another `token_loss`."""
    return f'import loss\nplain = loss.token_loss\nloss.token_loss = lambda logits, targets: {expression}\n'


ZERO = INIT.format('torch.nn.init.zeros_(self.transformer.h[0].attn.c_proj.weight)')
HIDDEN = INIT.format('self.transformer.h[0].scales = dict(residual=torch.nn.Parameter(torch.ones(1)))\n'
                     '    self.transformer.h[0].all = [self.transformer.wte, torch.nn.Linear(1, 1)]')
WEIGHT_NORM = INIT.format('torch.nn.utils.parametrizations.weight_norm(self.transformer.h[0].mlp.c_fc)')


@pytest.mark.parametrize('code, words', [
    ('', 'fulfills the contract'),
    (attending('None') + ZERO, 'later tokens or chance'),
    (attending('torch.ones(16, 16, dtype=bool).tril() | torch.eye(4).kron(torch.ones(4, 4)).bool()'),
     'later tokens or chance'),
    ('dropout = torch.nn.functional.dropout\ntorch.nn.functional.dropout = lambda x, p, training: dropout(x, 0.1)',
     'later tokens or chance'),
    (RETURNED.format('logits = logits if targets is None else logits.tanh()'), 'other logits without targets'),
    (RETURNED.format('logits = logits * targets.shape[0]'),
     "STOPS with exit code 1: AttributeError: 'NoneType' object has no attribute 'shape'"),
    (FORWARD.format('self.transformer.seen.add_(1)\n    logits, loss = forward(self, idx, targets)')
     + INIT.format("self.transformer.register_buffer('seen', torch.zeros(()))"),
     'changes the buffer transformer.seen in evaluation mode'),
    (FORWARD.format('kept = targets if targets is None else targets.clone()\n    if kept is not None:\n'
                    '        kept[:, 8:] = -1\n    logits, loss = forward(self, idx, kept)'), 'differs by '),
    (FORWARD.format('if targets is not None:\n        targets[:, 8:] = -1\n'
                    '    logits, loss = forward(self, idx, targets)'), 'fulfills the contract'),
    (loss_is('0.5 * plain(logits, targets)'), 'differs by 50%'),
    (loss_is('plain(logits - 0.5 * torch.arange(1.0, 257).log(), targets)'), 'differs by '),
    (loss_is('0.8 * plain(logits, targets) - 0.15 * logits.log_softmax(-1).mean(-1)'), 'fulfills the contract'),
    (RETURNED.format('loss = loss and loss + self.transformer.wpe.weight.square().sum()'), 'differs by '),
    ('import functools\ntorch.nn.functional.cross_entropy = functools.partial(\n'
     '    torch.nn.functional.cross_entropy, label_smoothing=0.1)', 'cross_entropy is not the plain one'),
    (PENALTY, 'the first step trains on a loss of '),
    (LENGTH + INIT.format('self.transformer.wte.weight.data.mul_(50)'), 'fulfills the contract'),  # without dropout
    (HIDDEN, 'transformer.h.0.scales holds parameters that are neither trained nor saved; use nn.ModuleList there\n'
             'warning: transformer.h.0.all holds parameters'),
    (RETURNED.format('loss = loss and len(idx) * loss'), 'another loss for the same sequences twice'),
    (RETURNED.format('loss = loss and loss[None]'), 'does not return (logits of all positions, 0-d mean loss)'),
    (RETURNED.format('logits = logits[:, -1:]'), 'does not return (logits of all positions, 0-d mean loss)'),
])
def test_a_model_that_is_not_as_training_takes_it(report, code, words):
    status, text = report(code, '--dropout=0.2', '--only', 'model')
    assert words in text and status == ('STOPS' in words), text
    assert ('warning: ' in text) == (words != 'fulfills the contract' and 'STOPS' not in words), text


def test_products_are_not_recomputed(report):
    status, text = report('', '--optimizer_name=sophiah', '--only', 'recomputed', 'two ranks')
    assert not status and text.startswith('recomputed      skipped: ') and '\ntwo ranks       equal' in text, text


def test_the_loop_may_draw_random_numbers_and_keep_a_file_and_layers_may_have_parametrizations(report):
    status, text = report(LENGTH + LINES + WEIGHT_NORM, '--only', 'resumed')
    assert not status and text.splitlines()[0].split() == ['resumed', 'equal'], text


def test_ranks_that_fail_or_wait_for_each_other_are_ended(monkeypatch):
    assert rehearse.launch(['-c', 'print(1)']) == '1\n'
    with pytest.raises(SystemExit, match='^STOPS with exit code 3: last$'):
        rehearse.launch(['-c', 'import os, sys; print("last"); sys.exit(3 * int(os.environ["RANK"]))'], ranks=2)
    monkeypatch.setattr(rehearse, 'PATIENCE', 1)
    with pytest.raises(SystemExit, match='still running after 1 s'):
        rehearse.launch(['-c', 'import time; time.sleep(60)'], ranks=2)


def test_what_is_compared(finished, monkeypatch):
    monkeypatch.setattr(rehearse, 'launch', lambda *_: None)
    last = rehearse.trained(finished(name='sophiag'), [])[10].keys()
    assert {'val/loss', 'TrainState.tokens'} <= last and not {'time', 'step_ms', 'TrainState.seconds'} & last


def test_a_nudge_changes_the_last_bits_of_the_first_weights(monkeypatch):
    run = SimpleNamespace(params=[torch.ones(99)], stops=SimpleNamespace(save=False))
    monkeypatch.setattr(train, 'train', lambda c: [train.train_step(run, None, i) for i in (0, 2)])
    for nudge, moved in (0, 0), (1, 2 ** -22):
        monkeypatch.setattr(train, 'train_step', lambda *_: None)
        rehearse.session(nudge, [])
        assert (run.params[0] - 1).max() == moved and run.stops.save


def test_each_kind_of_dropout_is_turned_off_and_a_text_is_left_alone():
    config = Config(dict(dropout=0.1, drop_path=True, drop_blocks=2, droppable=setting(3, at_least=1), drop_kind='rows',
                         drop_nothing=False, drop_where=''))
    config.set('drop_where', 'attention', 'flag')
    assert rehearse.without_dropout(config) == ['--dropout=0.0', '--drop_path=False', '--drop_blocks=0']


def test_the_first_number_and_the_first_tensor_that_differ_are_named():
    one = {1: dict(loss=1.0, a=torch.ones(2), b=torch.ones(2)), 2: dict(loss=1.0, a=torch.ones(2), b=torch.ones(2))}
    two = {1: dict(one[1], loss=2.0), 2: dict(one[2], b=torch.zeros(2))}
    agrees, text = rehearse.difference(one, two)
    assert not agrees and text.startswith('DIFFERS from step 1: loss is 2.0 instead of 1.0; from step 2: b is a tensor '
                                          'of norm 0 instead of a tensor of norm 1.41421356; state may live in ')
    assert rehearse.difference(one, {**one, 1: two[1]})[1].count('from step') == 1
    assert rehearse.difference(one, one) == (True, 'equal')
    for loss, agrees in (1.019, True), (1.021, False):  # the nudged run is 0.002 apart
        assert rehearse.difference(one, {**one, 1: dict(one[1], loss=loss)}, {1: dict(one[1], loss=1.002)})[0] == agrees
