"""A saving process as the one that trains sees it: how it is started, received from and ended.

What it says means nothing here, except that it is there. A caller that waits for it waits for a message, or for its
end: one that sends no heartbeat is killed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from recovery.child.process import Begin, EndChild, Ended, Ready
from recovery.errors import RecoveryError

_START_S = 300.0  # until the first message: Python and torch are loaded from a disk that may be slow
_END_S = 10.0  # from the end of the pipe, or a kill, until the process is gone


class ChildDied(RecoveryError):
    """The process that saves is gone; what it was doing was not done."""


Start = Callable[[Begin], tuple[Connection, BaseProcess]]


class Child:
    """One process, the pipe to it, and the thread that reads it. ended: what it raised in the end.

    ready: when it has claimed the location; or why it never will.
    """

    def __init__(
        self,
        start: Start,
        begin: Begin,
        on_message: Callable[[Any], None],
        over: Callable[[Child, BaseException], None],
    ) -> None:
        """on_message: called with each message after it was ready; over: with what it died of, last. In a thread."""
        self.ready: Future[Ready] = Future()
        self.ended: BaseException | None = None
        self._silence_s, self._on_message, self._over = begin.silence_s, on_message, over
        self._lock = threading.Lock()
        self._connection, self._process = start(begin)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read_messages, name="recovery-pipe-reader", daemon=True)
        self._reader.start()

    def send(self, message: Any, state: bytes | None = None) -> None:
        """Raises OSError when it has ended."""
        with self._lock:
            self._connection.send(message)
            if state is not None:
                self._connection.send_bytes(state)

    def end(self, within_s: float = _END_S) -> bool:
        """Ask it to leave, and wait; False: it did not, and was killed."""
        with contextlib.suppress(OSError):  # it has ended
            self.send(EndChild())
        self._reader.join(within_s)
        if not self._reader.is_alive():
            return True
        with contextlib.suppress(ValueError):  # it has ended now
            self._process.kill()
        self._reader.join(2 * _END_S)
        return False

    def _read_messages(self) -> None:
        died: BaseException | None = None
        try:
            patience_s = max(_START_S, self._silence_s)
            while self._connection.poll(patience_s):
                message, patience_s = self._connection.recv(), self._silence_s
                if isinstance(message, Ready):
                    self.ready.set_result(message)
                elif isinstance(message, Ended):
                    died = self.ended = message.error
                elif message is not None:
                    self._on_message(message)
            self._process.kill()
            died = ChildDied(f"the process that saves was killed: no heartbeat for {patience_s:g} s")
        except (EOFError, OSError):
            pass
        self._process.join(_END_S)
        died = died or ChildDied(f"the process that saves {_how(self._process.exitcode)}")
        with self._lock:  # else what is being sent could go to a file that has the number of the pipe
            self._connection.close()
        with contextlib.suppress(ValueError):  # a kill has to wait, too, while a disk does not answer
            self._process.close()
        if self.ready.done():
            self._over(self, died)
        else:
            self.ready.set_exception(died)


def _how(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended (exit status {exitcode})"
    return f"was killed ({signal.Signals(-exitcode).name}); if no person did that, memory may have run out"
