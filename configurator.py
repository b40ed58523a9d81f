"""Config files and --key=value flags onto train.py's globals: typed, checked, the source of each value recorded.

train.py declares its settings as plain globals and calls `configure(globals(), sys.argv[1:])`. Config files are Python
files of `key = value` lines; files apply in the order given, flags after all files. A setting declared as
`derived(type)` has no fixed default: train.py fills it in from the tables (model sizes, Table 3) unless a file or flag
set it.
"""

import difflib
import math
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType

TRAIN = Path(__file__).with_name('train.py')


class derived:  # noqa: N801 - reads as a declaration: learning_rate = derived(float)
    """Declares a setting of the given type whose value the tables supply unless a config file or a flag does."""

    def __init__(self, type_):
        self.type = type_

    def __repr__(self):
        return f'derived ({self.type.__name__})'


# Names that the official repository's configs have for settings.
RENAMED = dict(rho='gamma', interval='hessian_interval', total_bs='total_batch_size')


class Resolved(SystemExit):
    """Raised by `Config.finish` under --show_config: ends train.py with exit code 0, and carries the configuration."""

    def __init__(self, config):
        super().__init__(0)
        self.config = config


# Rule → (its test, the settings it is for), as far as one setting alone can tell.
RANGES = {
    'float32, bfloat16 or float16': (('float32', 'bfloat16', 'float16').__contains__, 'dtype'),
    'nccl or gloo': (('nccl', 'gloo').__contains__, 'backend'),
    'ddp, fsdp or hsdp': (('ddp', 'fsdp', 'hsdp').__contains__, 'parallel'),
    'at least 2, in case the newest one gets damaged': (lambda v: v >= 2, 'keep_checkpoints'),
    'at least 1': (lambda v: v >= 1, 'eval_interval log_interval max_iters block_size n_layer n_embd'),
    'at least 0': (lambda v: 0 <= v < math.inf, 'learning_rate min_lr weight_decay eps gamma grad_clip warmup_iters '
                                                'eval_iters max_hours skip_nonfinite'),
    'at least 0 and below 1': (lambda v: 0 <= v < 1, 'dropout beta1 beta2'),
    'False without wandb; pip install wandb': (lambda v: not v or find_spec('wandb'), 'wandb_log'),
}


class Config:
    """The settings in `scope` (train.py's globals), and for each the source of its value.

    `config.values` is a dict in declaration order, `config.sources` maps key → 'default', a file's name, 'flag', ….
    """

    def __init__(self, scope):
        self.scope = scope
        plain = (bool, int, float, str, derived)
        self.types = {key: value.type if isinstance(value, derived) else type(value)
                      for key, value in scope.items()
                      if isinstance(value, plain) and key.islower() and not key.startswith('_')}
        self.sources = dict.fromkeys(self.types, 'default')
        self.given = set()  # the keys that a config file or a flag has set

    @property
    def values(self):
        return {key: self.scope[key] for key in self.types}

    def set(self, key, value, source):
        """Sets `key`; SystemExit with one line when the key is unknown or the value is of the wrong type."""
        if key not in self.types:
            near = [RENAMED[key]] if key in RENAMED else difflib.get_close_matches(key, self.types, n=1)
            hint = f'did you mean {near[0]}?' if near else 'see python train.py --help'
            raise SystemExit(f'{source}: unknown setting {key!r}; {hint}')
        self.scope[key] = _convert(key, value, self.types[key], source)
        self.sources[key] = source

    def fill(self, settings, source):
        """Gives each setting in the dict `settings` its value from a table, unless a file or a flag has set it."""
        for key, value in settings.items():
            if key not in self.given:
                self.set(key, value, source)

    def require(self, key, ok, rule):
        """SystemExit with one line, unless `ok`: the value of `key` must be `rule`."""
        if not ok:
            raise SystemExit(f'{self.sources[key]}: {key} = {self.scope[key]!r} must be {rule}')

    def check_ranges(self):
        """SystemExit with one line if a setting is outside of its range in RANGES."""
        for rule, (inside, keys) in RANGES.items():
            for key in keys.split():
                self.require(key, inside(self.scope[key]), rule)

    def lines(self):
        """One line per setting that is not a plain default: `key = value   source`."""
        rows = [(f'{key} = {value!r}', self.sources[key]) for key, value in self.values.items()
                if self.sources[key] != 'default']
        width = max((len(left) for left, _ in rows), default=0)
        return [f'{left:<{width}}   {source}' for left, source in rows]

    def finish(self):
        """Checks that every setting has a value; under --show_config prints all of them and stops."""
        missing = [key for key, value in self.values.items() if isinstance(value, derived)]
        if missing:
            raise SystemExit(f'no value for {", ".join(missing)}: set it with --{missing[0]}=…')
        if self.scope.get('show_config'):
            if self.scope.get('__name__') == '__main__':
                for key, value in self.values.items():
                    print(f'{key} = {value!r}   {self.sources[key]}')
            raise Resolved(self)


def configure(scope, argv):
    """Applies config files and flags from `argv` to the settings among `scope`, train.py's globals.

    Returns the `Config`. Raises SystemExit with one line that names the file or key when something does not fit.
    """
    config = Config(scope)
    if '--help' in argv or '-h' in argv:
        print(help_text(scope.get('__doc__') or '', config))
        raise SystemExit(0)
    files = [a for a in argv if not a.startswith('--')]
    flags = [a for a in argv if a.startswith('--')]
    for name in files:
        _apply_file(config, name)
    for flag in flags:
        key, equals, text = flag[2:].partition('=')
        if not equals:
            raise SystemExit(f'{flag}: flags are written --key=value')
        config.set(key, text, 'flag')
        config.given.add(key)
    return config


def resolve(argv):
    """The `Config` that `python train.py ARGV…` would train with, without training: for scripts and tests."""
    before = sys.argv
    sys.argv = [str(TRAIN), *argv, '--show_config=True']
    try:
        runpy.run_path(str(TRAIN), run_name='config')
    except Resolved as resolved:
        return resolved.config
    finally:
        sys.argv = before
    raise AssertionError('train.py did not call Config.finish')


def help_text(intro, config):
    """The settings with their defaults, each with the comment that stands beside it in train.py."""
    comments = dict(re.findall(r'^(\w+) = [^#\n]*# (.*)$', TRAIN.read_text(encoding='utf-8'), flags=re.M))
    rows = [f'{f"  --{key}={config.scope[key]!r}":<45} {comments.get(key, "")}' for key in config.types]
    return '\n'.join([intro.strip(), '', 'settings (config/FILE.py sets them as key = value):', *rows])


def _apply_file(config, name):
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, [str(p) for p in Path('config').rglob('*.py')], n=1)
        raise SystemExit(f'{name}: no such config file' + (f'; did you mean {near[0]}?' if near else ''))
    if path.suffix != '.py':
        raise SystemExit(f'{name}: config files end in .py' + (
            '; a spec of several runs is for scripts/sweep.py --spec' if path.suffix == '.json' else ''))
    assigned = {}
    try:
        # Globals hold the current values, so a file may compute from them; assignments land in their own dict.
        exec(compile(path.read_text(encoding='utf-8'), name, 'exec'), dict(config.values), assigned)
    except SyntaxError as error:
        raise SystemExit(f'{name}:{error.lineno}: {error.msg}: {(error.text or "").strip()}') from None
    except Exception as error:
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__.tb_next else '?'
        raise SystemExit(f'{name}:{line}: {type(error).__name__}: {error}') from None
    for key, value in assigned.items():
        if not key.startswith('_') and not isinstance(value, (ModuleType, FunctionType, type)):
            config.set(key, value, name)
            config.given.add(key)


def _convert(key, value, type_, source):
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
    raise SystemExit(f'{source}: {key} = {value!r} is not {kind}')


def _integer(value):
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)
    if value != int(value):
        raise ValueError(value)
    return int(value)
