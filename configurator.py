"""Settings from train.py's defaults, config files and --key=value flags: typed, checked, the source of each recorded.

train.py declares its settings as plain module-level names. Config files are Python files of `key = value` lines; files
apply in the order given, flags after all files. A setting declared as `derived(type)` has no fixed default: `derive`
fills it in from tables (model sizes, optimizers) unless a file or flag has set it.
"""

import ast
import builtins
import difflib
import math
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


class derived:  # noqa: N801 - reads as a declaration: learning_rate = derived(float)
    """Declares a setting of the given type whose value the tables supply unless a config file or a flag does."""

    def __init__(self, type_):
        self.type = type_

    def __repr__(self):
        return f'derived ({self.type.__name__})'


# Names that other programs have for settings: the official repository's configs, Hugging Face's trainer.
RENAMED = dict(rho='gamma', interval='hessian_interval', total_bs='total_batch_size', lr='learning_rate')

# Setting → its possible values.
CHOICES = dict(dtype=('float32', 'bfloat16', 'float16'), backend=('nccl', 'gloo'), hessian_sequences=('own', 'fresh'),
               parallel=('ddp', 'fsdp', 'hsdp'))

# Rule → (its test, the settings it is for), as far as one setting alone can tell.
RANGES = {
    'at least 2, in case the newest one gets damaged': (lambda v: v >= 2, 'keep_checkpoints'),
    'at least 1': (lambda v: v >= 1, 'eval_interval log_interval max_iters block_size batch_size total_batch_size '
                                     'n_layer n_head n_embd'),
    'at least 0': (lambda v: 0 <= v < math.inf, 'learning_rate min_lr weight_decay eps gamma grad_clip warmup_iters '
                                                'eval_iters max_hours skip_nonfinite gradient_accumulation_steps '
                                                'cooldown_iters branch_cooldown'),
    'at least 0 and below 1': (lambda v: 0 <= v < 1, 'dropout beta1 beta2'),
    'within 64 bits': (lambda v: -2 ** 63 <= v < 2 ** 64, 'seed'),
}

# Setting → the package that it needs.
PACKAGES = dict(wandb_log='wandb', trackio_log='trackio')


class Config:
    """Settings as attributes, and for each the source of its value.

    `values` is a dict in declaration order; `sources` maps key → 'default', a file's name, 'flag', a table's name;
    `given` holds the keys that a config file or a flag has set.
    """

    def __init__(self, defaults):
        plain = (bool, int, float, str, derived)
        self.values = {key: value for key, value in defaults.items()
                       if isinstance(value, plain) and key.islower() and not key.startswith('_')}
        self.types = {key: value.type if isinstance(value, derived) else type(value)
                      for key, value in self.values.items()}
        self.sources = dict.fromkeys(self.values, 'default')
        self.given = set()

    def __getattr__(self, key):
        try:
            return self.__dict__['values'][key]
        except KeyError:
            raise AttributeError(f'no setting {key!r}') from None

    def set(self, key, value, source):
        """Sets `key`; SystemExit with one line when the key is unknown or the value is of the wrong type."""
        name = f'--{key}' if source == 'flag' else f'{source}: {key}'
        if key not in self.types:
            near = [RENAMED[key]] if key in RENAMED else difflib.get_close_matches(key, self.types, n=1)
            dashes = '--' if source == 'flag' else ''
            hint = f'did you mean {dashes}{near[0]}?' if near else 'see python train.py --help'
            raise SystemExit(f'{name}: unknown setting; {hint}')
        self.values[key] = _convert(name, value, self.types[key])
        self.sources[key] = source

    def fill(self, settings, source):
        """Gives each setting in the dict `settings` its value from a table, unless a file or a flag has set it."""
        for key, value in settings.items():
            if key not in self.given:
                self.set(key, value, source)

    def require(self, key, ok, rule):
        """SystemExit with one line, unless `ok`: the value of `key` must be `rule`."""
        if not ok:
            raise SystemExit(f'{self.shown(key)}: must be {rule}')

    def shown(self, key):
        """A setting as a message names it: as the flag that set it, or with the source of its value."""
        value = self.values[key]
        return f'--{key}={value}' if self.sources[key] == 'flag' else f'{self.sources[key]}: {key} = {value!r}'

    def lines(self, everything=False):
        """One aligned line per setting, `key = value   source`; those at their default, and those that the optimizer
        does not have, only if `everything` is asked for."""
        rows = [(f'{key} = {value!r}', self.sources[key]) for key, value in self.values.items()
                if everything or not self.sources[key].startswith(('default', 'not a setting'))]
        width = max((len(left) for left, _ in rows), default=0)
        return [f'{left:<{width}}   {source}' for left, source in rows]


def configure(defaults, argv, script=None):
    """The `Config` of `defaults` (train.py's module-level names) with the config files and flags of `argv` applied.

    With the path `script` of the file that declares the settings, --help prints them and exits. SystemExit with one
    line that names the file or flag when something does not fit.
    """
    if script and {'--help', '-h'} & {*argv}:
        source = Path(script).read_text(encoding='utf-8')
        print(help_text(ast.get_docstring(ast.parse(source)), defaults, source))
        raise SystemExit
    config = Config(defaults)
    flags, files = [], []
    for i, arg in enumerate(argv):
        if not arg.startswith('--'):
            files.append(arg)
        elif '=' not in arg:
            value = argv[i + 1] if len(argv) > i + 1 and not argv[i + 1].startswith('--') else 'VALUE'
            raise SystemExit(f'{arg}: write {arg}={value}')
        else:
            flags.append(arg)
    for name in files:
        _apply_file(config, name)
    for flag in flags:
        key, _, text = flag[2:].partition('=')
        config.set(key, text, 'flag')
        config.given.add(key)
    return config


def derive(config, tables):
    """Fills in what neither a config file nor a flag has set, and checks each setting.

    Args:
        tables: functions of the config that return (settings as a dict, their source), applied in this order; each sees
            what those before it have filled in.

    SystemExit with one line when a setting has no value, or one that it cannot have.
    """
    for table in tables:
        config.fill(*table(config))
    known = {key: value for key, value in config.values.items() if not isinstance(value, derived)}
    for key, values in CHOICES.items():
        if key in known:
            config.require(key, known[key] in values, f'{", ".join(values[:-1])} or {values[-1]}')
    for rule, (inside, keys) in RANGES.items():
        for key in keys.split():
            if key in known:
                config.require(key, inside(known[key]), rule)
    for key, package in PACKAGES.items():
        if config.values.get(key) and not find_spec(package):
            raise SystemExit(f'{config.shown(key)} needs: pip install {package}')
    missing = [key for key in config.values if key not in known]
    if missing:
        raise SystemExit(f'no value for {", ".join(missing)}: set it with --{missing[0]}=…')


def help_text(intro, defaults, source):
    """The settings with their defaults, in sections, each with the comment beside it in `source`, train.py's text."""
    config, rows = Config(defaults), []
    for line in source.splitlines():
        if match := re.match(r'(\w+) = [^#]*# (.*)$', line):
            if match[1] in config.types:
                rows.append(f'{f"  --{match[1]}={config.values[match[1]]!r}":<45} {match[2]}')
        elif re.match('# [a-z]', line):
            rows.append(f'\n{line[2:]}')
    return '\n'.join([intro.strip(), '', 'Settings (a config file sets them as key = value):', *rows])


def _apply_file(config, name):
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, [str(p) for p in Path('config').rglob('*.py')], n=1)
        raise SystemExit(f'{name}: no such config file' + (f'; did you mean {near[0]}?' if near else ''))
    if path.suffix != '.py':
        raise SystemExit(f'{name}: config files end in .py' + (
            '; a spec of several runs is for scripts/sweep.py --spec' if path.suffix == '.json' else ''))
    # The values so far stand among the built-ins: a file may read them, and what it sets is told apart.
    scope = {'__builtins__': {**vars(builtins), **config.values}}
    try:
        exec(compile(path.read_bytes(), name, 'exec'), scope)
    except SyntaxError as error:
        raise SystemExit(f'{name}:{error.lineno}: {error.msg}: {(error.text or "").strip()}') from None
    except Exception as error:
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__.tb_next else '?'
        raise SystemExit(f'{name}:{line}: {type(error).__name__}: {error}') from None
    for key, value in scope.items():
        if not key.startswith('_') and not isinstance(value, ModuleType) and not callable(value):
            config.set(key, value, name)
            config.given.add(key)


def _convert(name, value, type_):
    """`value` (a flag's text, or a Python value of a config file) as `type_`; int → float and 1e5 for an int pass."""
    try:
        if type_ is bool:
            return value if isinstance(value, bool) else {'true': True, 'false': False}[value.lower()]
        if type_ is str and isinstance(value, str):
            return value
        if type_ in (int, float) and not isinstance(value, bool):
            return float(value) if type_ is float else _integer(value)
    except (KeyError, ValueError, AttributeError, TypeError, OverflowError):
        pass
    kind = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a string'}[type_]
    raise SystemExit(f'{name}: {value!r} is not {kind}')


def _integer(value):
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)
    if value != int(value):
        raise ValueError(value)
    return int(value)
