"""How a run ends early (exit codes, signals, the time limit), and output streams whose failures do not end it."""

import contextlib
import os
import signal
import sys
import time

# Exit codes, besides 0 = finished and 1 = bad input or a crash (sysexits.h: EX_TEMPFAIL, EX_DATAERR).
STOPPED, NOT_FINITE = 75, 65
STARTED = time.monotonic()


class SafeStream:
    """The text stream `stream`, whose failures do not end a run: a log on a full disk, a terminal or pipe that is gone.

    A stream that was closed before Python started (None) becomes /dev/null. Characters that the stream's encoding lacks
    are written as escapes.
    """

    def __init__(self, stream):
        if stream is None:
            # All free descriptors up to stderr's: a checkpoint opened there would receive what libraries print.
            while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
                pass
            stream = os.fdopen(descriptor, 'w')
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                self.stream.write(text.encode('ascii', 'backslashreplace').decode())
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def protect_streams():
    """Wraps stdout and stderr in a `SafeStream` each."""
    sys.stdout, sys.stderr = SafeStream(sys.stdout), SafeStream(sys.stderr)


class StopSignals:
    """Whether this rank was asked to stop (SIGTERM, SIGINT, SIGHUP, the time limit) or to save (SIGUSR1).

    Signal handlers only record the request. The ranks exchange their requests once an iteration, together with the
    loss, so that all of them act after the same iteration.

    The first of them says at once on stderr what it does, where `speaks`.

    Attributes: reason, why to stop: the name of the first signal, or 'max_hours'; '' while there is no reason.
    """

    def __init__(self, max_hours=0.0, speaks=False, saves=True):
        """Starts to listen; `speaks`: whether this rank is the one that answers, `saves`: whether a stop saves."""
        self.deadline = STARTED + 3600 * max_hours if max_hours else float('inf')
        self.reason, self.received_at, self.save = '', 0.0, False
        self.speaks, self.saves = speaks, saves
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._record)

    def _record(self, number, frame):
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.reason:
            self.reason, self.received_at = signal.Signals(number).name, now
            self._say(f'{"Ctrl-C" if number == signal.SIGINT else self.reason}: stopping after this iteration'
                      + ', with a checkpoint' * self.saves
                      + ('; Ctrl-C again ends it at once' + ', without' * self.saves) * (number == signal.SIGINT))
        elif number == signal.SIGINT and now > self.received_at + 1:
            # A second Ctrl-C ends the process at once. Within a second of the first signal it may be a launcher that
            # forwards what the terminal has sent to every process.
            self._say('ended at once')
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _say(self, text):
        """Writes a line to stderr by the system call: the signal may have come in the midst of a print, whose stream
        must not be entered again."""
        if self.speaks:
            with contextlib.suppress(OSError):
                clear = '\r\033[K' if os.isatty(2) else ''  # the progress bar, and the terminal's ^C
                os.write(2, f'{clear}{text}\n'.encode())

    @property
    def stop(self):
        """Whether the run should stop."""
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = 'max_hours'
        return bool(self.reason)

    def poll(self):
        """(stop, save) as 0.0 or 1.0; resets the request to save."""
        save, self.save = self.save, False
        return float(self.stop), float(save)
