"""Early ends of a run (exit codes, signals, the time limit), and output streams whose failures do not end it."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

# Exit codes, in addition to 0 = finished and 1 = bad input or a crash (sysexits.h: EX_TEMPFAIL, EX_DATAERR)
STOPPED, NOT_FINITE = 75, 65
STARTED = time.monotonic()
LISTENED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class SafeStream:
    """A text stream whose failures do not end a run: a full disk, a closed pipe, a character that it cannot encode."""

    def __init__(self, stream):
        self.stream = stream
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
    """Wrap stdout and stderr in a `SafeStream` each; one that was closed before the start (`>&-`) is /dev/null.

    So are all closed standard descriptors: a checkpoint that got one would receive what libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = (SafeStream(stream or Path(os.devnull).open('w'))  # noqa: SIM115
                              for stream in (sys.stdout, sys.stderr))


@contextlib.contextmanager
def restored_signals():
    """Restore the signal handlers at the end of a context or a decorated function.

    A caller of `train.main`, or a process that it forks, must not keep the handlers of a finished run.
    """
    before = {number: signal.getsignal(number) for number in LISTENED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)


class StopSignals:
    """Requests to stop (SIGTERM, SIGINT, SIGHUP, the time limit) or to save (SIGUSR1).

    Signal handlers only record the request. The ranks exchange requests once an iteration, so that all act in the same
    one.

    Attributes: reason, this rank's first signal, 'max_hours' or the reason of `end`; stopping, whether the ranks have
    agreed to stop; finished, whether the run is then complete and cannot be resumed; save, whether this rank was asked
    to save and has not yet.
    """

    def __init__(self, max_hours=0.0, speaks=False):
        """Start to listen. `speaks`: whether this rank answers the first request, on stderr."""
        self.deadline = STARTED + 3600 * max_hours if max_hours else float('inf')
        self.reason, self.received_at = '', 0.0
        self.stopping = self.finished = self.save = False
        self.speaks = speaks
        for number in LISTENED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._record)

    def _record(self, number, frame):
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.reason:
            self.reason, self.received_at = signal.Signals(number).name, now
            if self.speaks:  # by the system call, because the signal may have interrupted a print
                with contextlib.suppress(OSError):
                    os.write(2, f'{self.reason}: stopping after this iteration; Ctrl-C again ends it now\n'.encode())
        elif number == signal.SIGINT and now > self.received_at + 1:
            # A second Ctrl-C ends the process at once. Within a second of the first signal it may be a launcher that
            # forwards what the terminal has sent to every process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self, reason):
        """End the run as finished, by early stopping for example. Every rank must call it in the same iteration."""
        self.reason, self.finished, self.stopping = reason, True, True

    def exchange(self, world):
        """Exchange the ranks' requests, so that all are `stopping` from the same call on. Return whether to save."""
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = 'max_hours'
        self.stopping, save = world.any(self.reason != '', self.save)
        return save
