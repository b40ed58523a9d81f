"""Exit codes, signals and the time limit, the clean-up of a process, output streams whose failures do not end a run."""

import contextlib
import os
import signal
import sys
import time

# Exit codes, in addition to 0 = finished and 1 = bad input or a crash (sysexits.h: EX_TEMPFAIL, EX_DATAERR)
STOPPED, NOT_FINITE = 75, 65
LISTENED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
UNDO = contextlib.ExitStack()  # ends this process's lock and process group


class SafeStream:
    """A text stream whose failures do not end a run: a full disk, a closed pipe, a character that it cannot encode."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, 'reconfigure'):  # A notebook's stream lacks it.
            stream.reconfigure(errors='backslashreplace')

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def protect_streams():
    """Make stdout and stderr a `SafeStream` each."""
    sys.stdout, sys.stderr = SafeStream(sys.stdout), SafeStream(sys.stderr)


@contextlib.contextmanager
def undo_at_end():
    """Restore signal handlers and empty UNDO at the end of a context or function: the process may train again."""
    before = {number: signal.getsignal(number) for number in LISTENED}
    try:
        with UNDO:
            yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # A handler in C cannot be restored.
                signal.signal(number, handler)


class StopSignals:
    """Requests to stop (SIGTERM, SIGINT, SIGHUP, `max_hours` after the start, 0 = no limit) or to save (SIGUSR1), which
    the ranks exchange once an iteration, so that all act in the same one. A second signal to stop ends the process.

    Attributes: reason (this rank's first signal, 'max_hours', or the reason given to `end`), stopping (the ranks have
    agreed to stop), finished (`end` was called), save (this rank was asked to save)."""

    def __init__(self, world, max_hours=0.0):
        self.world, self.deadline = world, world.started + 3600 * (max_hours or float('inf'))
        self.reason, self.received_at = '', 0.0
        self.stopping = self.finished = self.save = False
        for number in LISTENED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._record)

    def _record(self, number, frame):
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.received_at:
            name, self.received_at = signal.Signals(number).name, now
            self.reason = self.reason or name
            if self.world.is_master:  # A print could be the code that the signal has interrupted.
                with contextlib.suppress(OSError):
                    os.write(2, f'{name}: stopping after this iteration; Ctrl-C again ends it now\n'.encode())
        # torchrun repeats a signal that its ranks have already got; `timeout` signals the process and its group.
        elif now > self.received_at + (2 if 'TORCHELASTIC_RUN_ID' in os.environ else 0.2):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self, reason):
        """End the run as finished, as in early stopping. Every rank must call it in the same iteration."""
        self.reason, self.finished, self.stopping = reason, True, True

    def exchange(self):
        """Exchange the ranks' requests, so that all are `stopping` from the same call on. Return whether to save."""
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = 'max_hours'
        self.stopping, save = self.world.any(self.reason != '', self.save)
        return save
