"""The garbage collector is on again after the last pause, in every order of threads, and in a child."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from gba_hvd.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.mark.parametrize("first_to_leave", ["first", "second"])
def test_it_is_off_until_the_last_thread_leaves(first_to_leave: str) -> None:
    inside, leave = {name: threading.Event() for name in ("first", "second")}, {}
    leave.update({name: threading.Event() for name in inside})

    def pause(name: str) -> None:
        with gc_paused():
            inside[name].set()
            assert leave[name].wait(60)

    threads = {name: threading.Thread(target=pause, args=(name,)) for name in inside}
    for name, thread in threads.items():
        thread.start()
        assert inside[name].wait(60)
    for name in sorted(threads, key=lambda one: one != first_to_leave):
        assert not gc.isenabled()
        leave[name].set()
        threads[name].join(60)
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with gc_paused(), gc_paused():
        pass
    assert not gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ZeroDivisionError), gc_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_child_that_is_forked_in_a_pause_has_it_on() -> None:
    with gc_paused():
        if (pid := os.fork()) == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(pid, 0)[1] == 0 and gc.isenabled()
