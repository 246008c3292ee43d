from __future__ import annotations

import threading

from gba_hvd.comm.launcher_slot import LauncherStore
from gba_hvd.switching import operator_reason
from tests.unit.comm.test_launcher_slot import Launcher

UNKNOWN = "an operator asked for it, through another host"


def test_the_newest_reason_for_a_mode_comes_over() -> None:
    with Launcher() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        store = LauncherStore("127.0.0.1", server.server_port)
        assert operator_reason.found("gba", store) == UNKNOWN
        operator_reason.leave("gba", "straggler on h3", store)
        operator_reason.leave("gba", "asked for by Jürgen at 10:00:00", store)
        assert operator_reason.found("gba", store) == "asked for by Jürgen at 10:00:00"
        assert operator_reason.found("allreduce", store) == UNKNOWN
        server.shutdown()
        thread.join()


def test_without_a_launcher_less_is_known() -> None:
    gone = LauncherStore("127.0.0.1", 1)
    for store in (None, gone):
        operator_reason.leave("gba", "straggler on h3", store)
        assert operator_reason.found("gba", store) == UNKNOWN
