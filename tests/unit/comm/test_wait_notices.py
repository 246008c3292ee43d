"""When it is reported that something waits for servers."""

from __future__ import annotations

from gba_hvd.comm.wait_notices import Patience, missing


def reported_at(patience: Patience, waits: bool = True, until_s: int = 700, from_s: int = 0) -> list[int]:
    return [s for s in range(from_s, until_s) if patience.word(waits, float(s)) is not None]


def test_what_waits_is_reported_after_some_seconds_and_then_ever_less_often() -> None:
    assert reported_at(Patience()) == [5, 60, 120, 240, 480]


def test_a_wait_that_is_over_is_forgotten() -> None:
    patience = Patience()
    assert reported_at(patience, until_s=4) == []
    assert patience.word(False, 4.0) is None
    assert reported_at(patience, from_s=5, until_s=12) == [10]


def test_a_process_that_was_suspended_says_once_how_long_it_has_waited() -> None:
    patience = Patience(again_s=20.0)
    assert reported_at(patience, until_s=6) == [5]
    assert [s for s in (106.0, 106.5, 107.1, 159.0, 160.0) if patience.word(True, s) is not None] == [106.0, 160.0]


def test_the_word_says_what_waits_for_which_hosts_and_why() -> None:
    event = missing(7, ["mode gba", "the checkpoint that is due"], 61.2, "server 0 of this host: no room")
    assert (event.kind, event.level, event.step) == ("server_missing", "warning", 7)
    assert event.message == (
        "mode gba and the checkpoint that is due: waiting for 61 s for the companion servers of this host, training "
        "continues in allreduce; server 0 of this host: no room"
    )
    assert "of another host" in missing(7, ["mode gba"], 5.0, "").message
