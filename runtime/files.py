"""Atomic writes, locks, checksums, code versions, one-line errors. torch is imported late, so plotting starts fast."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

FAILED = 'failed.txt'  # in a run's out_dir: the last message of a run that diverged


def expanded(path, flag=''):
    """Expand ~ in the text `path`, which a shell leaves in --KEY=~/x. SystemExit, which names the `flag`, for a URL."""
    if re.match(r'[a-zA-Z][\w+.-]*://', path):
        raise SystemExit(f'{flag}{path}: a URL, not a local path; download or mount it (rclone mount, gcsfuse, s3fs), '
                         'and give the path there')
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for an unknown user


def local_path(text):
    """Return `text` as a Path, see `expanded`; a type for argparse."""
    return Path(expanded(text))


@contextlib.contextmanager
def atomic_write(path, mode='wb', sync=False):
    """Yield an open file ('wb', or 'w' for UTF-8 text) that replaces `path` at the end of the block, unless an error is
    raised. With `sync` its content, not yet its name, is then on the disk."""
    path = Path(path)  # Several tasks of a sweep may write it, so `partial` names the process.
    partial = path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.partial')
    try:
        with partial.open(mode, encoding=None if 'b' in mode else 'utf-8') as f:
            yield f
            if sync:
                f.flush()
                os.fsync(f.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def lock(path):
    """Lock the file `path`. Return it open, because closing it ends the lock. Exit if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('a+', encoding='utf-8')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise SystemExit(f'{path.parent}: process {file.read().strip()} is writing there; choose another --out_dir'
                         ) from None
    except OSError as error:
        warn(f'{path.parent}: the file system has no locks ({error.strerror}); make sure that nothing else uses it')
    file.truncate(0)
    file.write(f'{os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    return file


def write_text(path, text):
    """Replace the file `path` by `atomic_write`."""
    with atomic_write(path, 'w') as f:
        f.write(text)


def write_json(path, value):
    """Replace the file `path` by indented JSON. NaN and infinity become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    write_text(path, json.dumps(finite, indent=1) + '\n')


def save_pt(path, state):
    """Write the dict `state` to the file `path`, complete and synced, or raise OSError."""
    import torch
    try:
        with atomic_write(path, sync=True) as f:
            torch.save(state, f)
    except RuntimeError as error:  # torch.save hides the file system's error behind this one
        raise OSError(*getattr(error.__context__, 'args', error.args)) from None
    sync_directory(Path(path).parent)


def load_pt(path):
    """Load a .pt file, memory-mapped. Its checksums must fit, and it may hold only tensors and plain containers."""
    import torch
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError('its content does not fit its checksums')
    return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def sync_directory(path):
    """Make renames in the directory `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # Some file systems cannot sync a directory.
        os.fsync(fd)
    os.close(fd)


def put_in_place(out_dir):
    """Rename complete directories CHECKPOINT.partial, which have a state.pt, to CHECKPOINT, also at a run's start."""
    for state in [*Path(out_dir).glob(f'ckpt_{"[0-9]" * 8}*.partial/state.pt')]:
        path = state.parent.with_suffix('')
        if path.is_dir():  # It was saved before this iteration's evaluation.
            shutil.rmtree(path)
        state.parent.replace(path)
        sync_directory(out_dir)


def checksum(path):
    """Return the CRC-32 of a file."""
    value = 0
    with Path(path).open('rb') as f:
        while block := f.read(2 ** 24):
            value = zlib.crc32(block, value)
    return value


def git_commit():
    """Return the commit of the repository that tracks this file, with a + if Python files have changed; else None."""
    def git(words):
        return subprocess.run(['git', *words.split()], cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    try:
        tracked, commit = git('ls-files files.py'), git('rev-parse --verify HEAD').strip()
        return commit + '+' * bool(git('status --porcelain -uno -- ../*.py')) if tracked else None
    except OSError:
        return None


def code_hashes():
    """Return {name: hash} of this repository's loaded Python files, and of all in the root and runtime/."""
    root = Path(__file__).resolve().parents[1]
    paths = {Path(module.__file__).resolve() for module in list(sys.modules.values())
             if getattr(module, '__file__', None) and 'site-packages' not in module.__file__}
    paths |= {path for folder in (root, root / 'runtime') for path in folder.glob('*.py')}
    names = {path.relative_to(root) for path in paths if path.is_relative_to(root) and path.is_file()}
    return {name.as_posix(): hashlib.sha256((root / name).read_bytes()).hexdigest()[:12] for name in sorted(names)
            if 'tests' not in name.parts}


def differing_files(*codes):
    """Return the names of files that differ between programs, by their `code_hashes`. A file counts if at least two
    programs have loaded it. Programs without hashes by file are skipped."""
    versions = {}
    for code in codes:
        for name, digest in code.items() if isinstance(code, dict) else ():
            versions.setdefault(name, set()).add(digest)
    return [name for name, found in versions.items() if len(found) > 1]


def warn(text):
    """Print a warning, one line, on stderr."""
    print(f'warning: {text}', file=sys.stderr, flush=True)


def one_line(error):
    """Return up to 200 characters of an exception's message, as one line; without a message its type."""
    return ' '.join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def one_line_errors():
    """Turn an OSError inside into a SystemExit with its file and reason; a decorator for the `main` of a script. Also
    print ? for characters that the terminal lacks, and end quietly if a reader, such as head, closes the pipe."""
    if getattr(sys.stdout, 'errors', '') == 'strict':
        sys.stdout.reconfigure(errors='replace')
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's last flush would fail again.
        raise SystemExit(1) from None
    except OSError as error:
        raise SystemExit(f'{error.filename}: {error.strerror}' if error.filename else one_line(error)) from None
