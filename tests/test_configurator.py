"""Config files and flags: types, rejections, precedence, provenance."""

import re
import runpy
from pathlib import Path

import pytest
from conftest import ROOT, rejection

import configurator
import train
from analysis import runs
from analysis.figures import png_path
from configurator import configure, setting
from lifecycle.run import notes
from runtime import device
from runtime.files import local_path

DEFAULTS = {'steps': 10, 'rate': setting(0.5, at_least=0, below=9), 'name': 'a', 'fast': False, 'size': setting(int),
            'kind': setting('x', choices=('x', 'y'))}


def apply(*argv):
    config = configure(DEFAULTS, list(argv))
    return config, config.values


@pytest.mark.parametrize('flag, key, value', [
    ('--steps=7', 'steps', 7), ('--steps=1e3', 'steps', 1000), ('--steps=9007199254740993', 'steps', 9007199254740993),
    ('--rate=1', 'rate', 1.0), ('--fast=True', 'fast', True), ('--fast=false', 'fast', False),
    ('--name=x=y', 'name', 'x=y'), ('--name=1', 'name', '1'), ('--size=3', 'size', 3),
])
def test_flags_are_typed(flag, key, value):
    config, values = apply(flag)
    assert values[key] == value and type(values[key]) is type(value)
    assert config.sources[key] == 'flag'


@pytest.mark.parametrize('flag, words', [
    ('--setps=7', '--setps: unknown setting; did you mean --steps?'), ('--zzz=1', 'python train.py --help'),
    ('--steps=1.5', '--steps: 1.5 is not a whole number'), ('--steps=ten', 'not a whole number'),
    ('--steps=inf', 'not a whole number'), ('--rate=fast', "--rate: 'fast' is not a number"),
    ('--fast=2', 'not True or False'), ('--steps', '--steps: write --KEY=VALUE'), ('--__name__=x', 'unknown setting'),
    ('-steps=5', '-steps=5: write --KEY=VALUE'), ('steps=5', 'steps=5: no such config file; flags are --KEY=VALUE'),
    ('—steps=5', '; flags are --KEY=VALUE'),
    ('--vocab_size=9', "--vocab_size: unknown setting; the data set's meta.json has it"),
    ('--name=', '--name=: must be non-empty (is a shell variable unset?)'),
    ('--rate=9', '--rate=9.0: must be at least 0 and below 9'), ('--rate=nan', '--rate=nan: must be finite'),
    ('--kind=z', '--kind=z: must be one of x, y'), (f'--steps={"9" * 5000}', 'whole number'),
    ('--config=a.py', 'write the name of a config file without a flag'),
    (str(ROOT / 'config/ablation/clipping.json'), 'a config file must end in .py'),
])
def test_bad_flags_are_rejected_in_one_line(flag, words):
    message = rejection(apply, flag)
    assert words in message and 'helper variable' not in message


def test_a_tilde_is_the_home_directory_and_an_address_is_refused(monkeypatch):
    """A shell leaves ~ as it is after =; Path('s3://a') would be a directory s3: here."""
    monkeypatch.setenv('HOME', '/home/me')
    assert apply('--name=~/a')[1]['name'] == '/home/me/a' and local_path('~/a') == Path('/home/me/a')
    assert rejection(apply, '--name=s3://bucket/a').startswith('--name=s3://bucket/a: a URL, not a local path; ')
    for path_of in local_path, png_path:
        assert rejection(path_of, 'gs://bucket').startswith('gs://bucket: a URL')


def test_a_file_computes_with_its_own_values_in_functions_and_comprehensions(tmp_path):
    path = tmp_path / 'run.py'
    path.write_text("""
from math import ceil
steps = 1000
def share(f):
    return ceil(steps * f)
size = max(int(steps * f) for f in (0.1, 0.2))
rate = share(0.0015)
""")
    config, values = apply(str(path))
    assert (values['size'], values['rate'], values['steps']) == (200, 2.0, 1000)
    assert config.given == {'steps', 'size', 'rate'}


def test_files_then_flags_in_order(tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text('import time\nsteps = 3\nrate = 2  # an int for a float\n_helper = 5\n')
    b.write_text('steps = 2 * steps\nname = "b"\n')
    config, values = apply('--name=flag', str(a), str(b))
    assert values['steps'] == 6 and values['rate'] == 2.0 and values['name'] == 'flag'
    assert config.sources == dict(steps=str(b), rate=str(a), name='flag', fast='default', size='default',
                                  kind='default')


@pytest.mark.parametrize('text, words', [
    ('setps = 3', 'bad.py: setps: unknown setting; did you mean steps?'),
    ('steps = "3"', "bad.py: steps: '3' is not a whole number"),
    ('rate = -1', 'bad.py: rate = -1.0: must be at least 0'),
    ('fast = 1', 'not True or False'), ('x = (', 'bad.py, line 1)'), ('steps = 1 / 0', 'bad.py:1: ZeroDivisionError'),
    ('\nsteps = stpes', 'bad.py:2: NameError'),
    ('from math import pi', 'bad.py: pi: unknown setting; see python train.py --help '
     '(the name of a helper variable must begin with _)'),
    ('name = f"out/{size}"', "bad.py:1: NameError: name 'size' is not defined"),
])
def test_bad_files_are_rejected_in_one_line(tmp_path, text, words):
    path = tmp_path / 'bad.py'
    path.write_text(text)
    assert words in rejection(apply, str(path))


def test_a_config_file_is_also_found_beside_train(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.resolve(['config/quickstart.py']).max_iters == 600


def test_missing_file_names_the_nearest(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert 'did you mean config/train_gpt2_small_adamw.py?' in rejection(apply, 'config/train_gpt2_small_adam.py')


def test_switching_the_optimizer_switches_its_settings():
    config = train.resolve(['--model_size=355M', '--optimizer_name=sophiag'])
    assert config.values['learning_rate'] == 4e-4 and config.sources['learning_rate'] == 'Table 2: sophiag, 355M'
    adamw = train.resolve([str(ROOT / 'config/train_gpt2_small_sophiag.py'), '--optimizer_name=adamw']).values
    assert (adamw['learning_rate'], adamw['weight_decay'], adamw['hessian_interval']) == (6e-4, 0.1, 0)
    assert not train.resolve(['--model_size=355M', '--n_layer=23']).scale_attn_by_inverse_layer_idx


def test_the_validation_set_does_not_depend_on_the_micro_batch():
    """A flag in nanoGPT's name overrides a config file."""
    file, flags = str(ROOT / 'config/quickstart.py'), ['--total_batch_size=8', '--eval_iters=3']
    for argv, expected in ((flags, 24), ([file], 320), ([file, *flags], 24), ([file, '--eval_iters=0'], 0)):
        assert {train.resolve([*argv, f'--batch_size={n}'], 1).eval_sequences for n in (2, 4)} == {expected}


def test_official_command_lines_resolve(monkeypatch):
    """The official repository's README: 10 GPUs of 8 × 6 sequences."""
    monkeypatch.setenv('WORLD_SIZE', '10')
    values = train.resolve([str(ROOT / 'config/train_gpt2_small_sophiag.py'), '--batch_size=8',
                                   '--gradient_accumulation_steps=6']).values
    assert values['gradient_accumulation_steps'] == 6 and values['hessian_batch_size'] == 240
    derived = train.resolve(['--batch_size=8', '--gradient_accumulation_steps=0'])  # 0 stands for not given
    assert derived.gradient_accumulation_steps == 6
    for theirs, ours in dict(rho='gamma', interval='hessian_interval', lr='learning_rate').items():
        assert f'did you mean --{ours}?' in rejection(train.resolve, ['--optimizer_name=sophiag', f'--{theirs}=10'], 1)


def test_hessian_batch_is_made_to_fit_and_says_so(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '12')
    config = train.resolve(['--optimizer_name=sophiag', '--batch_size=8', '--hessian_batch_size=32',
                            '--hessian_parts=16'])
    assert [(config.values[key], config.sources[key]) for key in ('hessian_batch_size', 'hessian_parts')] == [
        (36, '32 made to fit 480 sequences on 12 device(s)'),
        (36, '16 made to fit 36 sequences on 12 device(s), at most 8 sequences a part')]


@pytest.mark.parametrize('argv, message', [
    (['--optimizer_name=adamw', '--gamma=0.1'], '--gamma has no effect with adamw'),
    (['--optimizer_name=sophiag', '--eps=0'], '--eps=0.0: must be above 0 for sophiag'),
    (['--optimizer_name=sophiag', '--hessian_interval=0'], '--hessian_interval=0: must be above 0 for sophiag'),
    (['--optimizer_name=sophiah', '--parallel=fsdp'], '--parallel=fsdp: must be ddp for sophiah'),
    (['--model_size=540M', '--optimizer_name=lion'], 'Table 2 has no learning rate for lion at 540M'),
    (['--init_from=gpt2'], '--init_from=gpt2: set --learning_rate; the table is for training from scratch'),
    (['--init_from=gtp2'], '--init_from=gtp2: must be scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl'),
    (['--n_head=5'], '--n_head=5: must be a divisor of n_embd = 768'),
    (['--eval_sequences=-1'], '--eval_sequences=-1: must be at least 0'),
    (['--dtype=int8'], '--dtype=int8: must be one of float32, bfloat16, float16'),
    (['--optimizer_name=sophiah', '--activation_checkpointing=True'],
     '--activation_checkpointing=True: must be False for sophiah (Hessian-vector products), or use sophiag'),
    (['--parallel=fsdp', '--dtype=float16'], '--dtype=float16: must be bfloat16 or float32 for --parallel=fsdp'),
])
def test_mistakes_are_named_with_what_helps(argv, message):
    assert message in rejection(train.resolve, argv)


def test_settings_that_are_valid_but_may_surprise_are_noted(monkeypatch):
    """In an image without a C compiler, or without Python.h, a run on a GPU is eager."""
    for compiler in (True, False):
        monkeypatch.setattr(device, 'can_compile', lambda _, found=compiler: found)
        note, = notes(train.resolve(['--device=cuda']))
        assert note.startswith('note: the first iterations compile the model' if compiler else
                               'warning: compile = False because this machine has no C compiler')
        assert not [*notes(train.resolve(['--device=cuda', '--compile=False']))]
    (note,) = notes(train.resolve(['--max_iters=2000', '--device=cpu']))
    assert note == 'note: the run of 2000 iterations ends in its warm-up of 2000; see --warmup_iters'


def test_roles_of_settings():
    declared = configurator.Config(train.DEFAULTS).declared
    roles = configurator.Config(train.DEFAULTS).roles
    assert {*roles.values()} == {*configurator.ROLES} - {'tuned'}
    assert {key for key in declared if key not in roles} > {'learning_rate', 'warmup_iters'}
    harmless = {key for key, role in roles.items() if role in configurator.HARMLESS}
    assert {'out_dir', 'compile', 'dataset'} < harmless
    assert not {'learning_rate', 'max_iters', 'seed', 'eval_iters'} & harmless
    assert {key: roles.get(key, 'tuned') for key in runs.ROLES} == runs.ROLES  # of a CSV file's columns


def test_a_setting_with_a_capital_letter_is_a_setting(monkeypatch):
    """A constant, in capitals, is none."""
    scope = runpy.run_path(str(ROOT / 'train.py'), init_globals=dict(use_QK=True, n_KV=configurator.setting(2), SIZE=3))
    assert {'use_QK', 'n_KV'} <= scope['DEFAULTS'].keys() and 'SIZE' not in scope['DEFAULTS']


def test_help_lists_every_setting_with_its_comment(capsys):
    with pytest.raises(SystemExit):
        train.resolve(['--max_iters=7', '--help'])
    text = capsys.readouterr().out
    assert re.findall('^([a-z].*)$', text.partition('= value):')[2], flags=re.M) == [
        'output', 'wandb logging, optional', 'data', 'model', 'optimizer', 'schedule', 'system']
    for key in train.resolve([]).values:
        assert re.search(rf'^  --{key}=.*\S  +\S', text, flags=re.M), f'{key} has no comment in train.py'
    assert '\n  --learning_rate=(float) ' in text and ' [cosine, linear, constant, wsd]\n' in text


def test_every_setting_is_shown_with_its_source(capsys):
    train.main(['--show_config=True', '--device=cpu'])
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == [*train.DEFAULTS]
    assert re.search('^learning_rate = 0.0006 +Table 2: adamw, 125M$', text, flags=re.M)


def test_ranges_of_settings():
    """Counts begin at 1; elsewhere 0 is off, all or derived. Two checkpoints are kept, because one may be damaged."""
    declared = configurator.Config(train.DEFAULTS).declared
    numbers = {key: one for key, one in declared.items() if one.type in (int, float)}
    least = {key: next(n for n in (-1, 0, 1, 2, 3) if not one.problem(n)) for key, one in numbers.items()}
    counts = ('eval_interval', 'log_interval', 'total_batch_size', 'batch_size', 'block_size', 'n_layer', 'n_head',
              'n_embd', 'max_iters')
    assert least == dict.fromkeys(numbers, 0) | dict.fromkeys(counts, 1) | dict(keep_checkpoints=2, seed=-1)
    assert {key for key, one in numbers.items() if one.problem(1)} == {'keep_checkpoints', 'dropout', 'beta1', 'beta2'}
    for key, first, end in ('seed', -2 ** 63, 2 ** 64), ('max_iters', 1, 10 ** 10):
        assert [not declared[key].problem(n) for n in (first - 1, first, end - 1, end)] == [False, True, True, False]
    assert declared['batch_size'].problem(0) == 'at least 1'


@pytest.mark.parametrize('ranks, settings, message', [
    (2, dict(batch_size=7, gradient_accumulation_steps=3), '--batch_size=7: must be a divisor of 240, the sequences of '
     'each device; for 3 × 7 sequences on each set total_batch_size = 42'),
    (1, dict(total_batch_size=1, batch_size=2), '--batch_size=2: must be a divisor of 1'),
    (7, dict(batch_size=8), 'default: total_batch_size = 480: must be a multiple of 7'),
    (8, dict(batch_size=12, gradient_accumulation_steps=40),
     '--gradient_accumulation_steps=40: must be 0 or 5: total_batch_size = 480 / (12 × 8 devices); '
     'for 40 × 12 sequences on each set total_batch_size = 3840')])
def test_batch_sizes_that_do_not_fit(ranks, settings, message):
    flags = [f'--{key}={value}' for key, value in settings.items()]
    assert message in rejection(train.resolve, flags, ranks)
