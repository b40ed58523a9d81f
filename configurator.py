"""Settings from train.py's defaults, config files and --key=value flags, with types, checks and recorded sources.
To add a setting, write a line at the top of train.py; this file stays the same.

train.py declares its settings as module-level names: plain values, or `setting(…)` for one with a range or choices.
`setting(float)`, a type instead of a value, has no fixed default: train.py's `derive` fills it in unless a config file
or a flag has set it. Config files are Python files of `key = value` lines; they apply in the order given, flags after
all files.
"""

import ast
import builtins
import difflib
import math
import re
from pathlib import Path
from types import ModuleType

from runtime.files import expanded

# Names in the official repository's configs or Hugging Face's Trainer → ours
RENAMED = dict(rho='gamma', interval='hessian_interval', total_bs='total_batch_size', lr='learning_rate')
ELSEWHERE = dict(vocab_size="the data set's meta.json has it", config='write the name of a config file without a flag')

ROLES = 'tuned', 'model', 'protocol', 'horizon', 'chance', 'eval', 'data', 'run'  # explained in train.py
HARMLESS = 'run', 'data'  # roles whose change on resume is not recorded


class Setting:
    """The declaration of a setting.

    Args:
        default: its value, or its type if `derive` fills it in; then the attribute is None.
        at_least, below: the range of a number.
        choices: the possible values of a string.
        role: a key of ROLES.
    """

    def __init__(self, default, at_least=-math.inf, below=math.inf, choices=(), role='tuned'):
        self.type, self.default = (default, None) if isinstance(default, type) else (type(default), default)
        self.at_least, self.below, self.choices, self.role = at_least, below, tuple(choices), role

    def problem(self, value):
        """Return the rule that `value` breaks, as the end of 'must be …', or '' if it is valid."""
        if self.choices and value not in self.choices:
            return 'one of ' + ', '.join(self.choices)
        if self.type is str and not value and self.default != '':
            return 'non-empty (is a shell variable unset?)'
        if self.type is float and not math.isfinite(value):
            return 'finite'
        if self.type in (int, float) and not self.at_least <= value < self.below:
            return f'at least {self.at_least}' + (f' and below {self.below}' if self.below < math.inf else '')
        return ''


setting = Setting  # train.py uses this name


class Config:
    """Settings as attributes, and for each the source of its value.

    `declared` is a dict of `Setting`s; `sources` maps key → 'default', a file's name, 'flag', or the table that the
    value is from; `given` holds the keys that a config file or a flag has set.
    """

    def __init__(self, defaults):
        self.declared = {key: value if isinstance(value, Setting) else Setting(value)
                         for key, value in defaults.items()}
        self.sources = dict.fromkeys(self.declared, 'default')
        self.given = set()
        for key, one in self.declared.items():
            setattr(self, key, one.default)

    @property
    def values(self):
        """The settings as a dict, in the order of their declaration."""
        return {key: getattr(self, key) for key in self.declared}

    @property
    def defaults(self):
        """The settings that have a default, key → default."""
        return {key: one.default for key, one in self.declared.items() if one.default is not None}

    @property
    def roles(self):
        """The roles of settings other than 'tuned', key → role."""
        return {key: one.role for key, one in self.declared.items() if one.role != 'tuned'}

    def having(self, *roles):
        """Return the keys of the settings with one of these roles as a set."""
        return {key for key, one in self.declared.items() if one.role in roles}

    def set(self, key, value, source):
        """Set `key`. Exit if the key is unknown, or the value has the wrong type or is out of range."""
        if key not in self.declared:
            raise SystemExit(self.unknown(key, source))
        one = self.declared[key]
        name = f'--{key}' if source == 'flag' else f'{source}: {key}'
        value = from_text(name, value, one.type) if source == 'flag' else from_python(name, value, one.type)
        if one.type is str:
            value = expanded(value, f'{name}=' if source == 'flag' else f'{name} = ')
        setattr(self, key, value)
        self.sources[key] = source
        problem = one.problem(value)
        self.require(key, not problem, problem)

    def unknown(self, key, source):
        """Return the "unknown setting" message for a key, with a suggestion."""
        prefix, dashes = ('', '--') if source == 'flag' else (f'{source}: ', '')
        near = [RENAMED[key]] if key in RENAMED else difflib.get_close_matches(key, self.declared, n=1)
        hint = f'did you mean {dashes}{near[0]}?' if near else 'see python train.py --help'
        if source != 'flag' and not near:
            hint += ' (the name of a helper variable must begin with _)'
        return f'{prefix}{dashes}{key}: unknown setting; {ELSEWHERE.get(key, hint)}'

    def give(self, key, value, source):
        """Set a value from a config file or a flag."""
        self.set(key, value, source)
        self.given.add(key)

    def fill(self, settings, source):
        """Give each setting in the dict `settings` its value, unless a config file or a flag has set it."""
        for key, value in settings.items():
            if key not in self.given:
                self.set(key, value, source)

    def require(self, key, ok, rule):
        """Exit unless `ok`, with the message that the value of `key` must be `rule`."""
        if not ok:
            raise SystemExit(f'{self.shown(key)}: must be {rule}')

    def shown(self, key):
        """Format a setting for a message, as the flag that set it or with its source."""
        value, source = getattr(self, key), self.sources[key]
        return f'--{key}={value}' if source == 'flag' else f'{source}: {key} = {value!r}'

    def lines(self, everything=False):
        """Format one aligned line per setting, `key = value   source`. Settings at their default and settings that the
        optimizer lacks need `everything`."""
        rows = [(f'{key} = {value!r}', self.sources[key]) for key, value in self.values.items()
                if everything or not self.sources[key].startswith(('default', 'not a setting'))]
        width = max((len(left) for left, _ in rows), default=0)
        return [f'{left:<{width}}   {source}' for left, source in rows]


def configure(defaults, argv, script=None):
    """Return the `Config` of `defaults` (train.py's module-level names) with the config files and flags of `argv`
    applied. Exit with one line at the first mistake. `script`: path of the file that declares the settings, for --help.
    """
    if script and {'--help', '-h'} & {*argv}:
        print(help_text(script, defaults))
        raise SystemExit
    config, flags = Config(defaults), []
    for arg in argv:
        key, equals, value = arg.removeprefix('--').partition('=')
        if arg.startswith('--') and equals:
            flags.append((key, value))
        elif arg.startswith('-'):
            raise SystemExit(f'{arg}: write --KEY=VALUE')
        else:
            for key, value in read_file(arg, config.values).items():
                config.give(key, value, arg)
    for key, value in flags:
        config.give(key, value, 'flag')
    return config


def help_text(path, defaults):
    """Format a file's docstring and the settings that it declares, one line each, with their defaults."""
    declared, source = Config(defaults).declared, Path(path).read_text(encoding='utf-8')
    rows = [ast.get_docstring(ast.parse(source)), '', 'Settings (a config file sets them as key = value):']
    for line in source.splitlines():
        code, _, comment = line.partition('  # ')
        key = code.partition(' = ')[0]
        if section := re.match('# ([a-z][a-z ,]*)$', line):
            rows.append(f'\n{section[1]}')
        elif key in declared:
            one = declared[key]
            value = f'({one.type.__name__})' if one.default is None else repr(one.default)
            choices = f' [{", ".join(one.choices)}]' if one.choices else ''
            rows.append(f'{f"  --{key}={value}":<45} {comment}{choices}'.rstrip())
    return '\n'.join(rows)


def read_file(name, values):
    """Execute the config file `name`, which may read the settings' current `values`. Return its settings as a dict."""
    path = Path(name) if Path(name).exists() else Path(__file__).parent / name  # as data sets are found
    if not path.is_file() or path.suffix != '.py':
        near = difflib.get_close_matches(name, [str(p) for p in Path('config').rglob('*.py')], n=1)
        hint = f'did you mean {near[0]}?' if near else 'flags are --KEY=VALUE'
        problem = 'a config file must end in .py' if path.is_file() else 'no such config file'
        raise SystemExit(f'{name}: {problem}; {hint}')
    # They are built-ins of the file, so that `scope` gets only its own assignments.
    known = {key: value for key, value in values.items() if value is not None}
    scope = {'__builtins__': {**vars(builtins), **known}}
    try:
        exec(compile(path.read_bytes(), name, 'exec'), scope)
    except Exception as error:
        trace = error.__traceback__.tb_next  # None for a SyntaxError; its message names the line
        where = f'{name}:{trace.tb_lineno}' if trace else name
        raise SystemExit(f'{where}: {type(error).__name__}: {error}') from None
    return {key: value for key, value in scope.items()
            if not key.startswith('_') and not isinstance(value, ModuleType) and not callable(value)}


KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a string'}


def from_text(name, text, type_):
    """Parse a flag's text as a value of `type_`. 1e5 also counts as a whole number."""
    try:
        if type_ is bool:
            return {'true': True, 'false': False}[text.lower()]
        if type_ is int and not re.fullmatch(r'[+-]?\d+', text):
            return from_python(name, float(text), int)
        return type_(text)
    except (KeyError, ValueError):
        raise SystemExit(f'{name}: {text!r} is not {KINDS[type_]}') from None


def from_python(name, value, type_):
    """Convert a Python value of a config file or a table to `type_`: an int for a float, 1e5 for an int."""
    if type_ is float and type(value) is int:
        return float(value)
    if type_ is int and type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not type_:
        raise SystemExit(f'{name}: {value!r} is not {KINDS[type_]}')
    return value
