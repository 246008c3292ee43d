"""What a summary says of changes of mode and of staleness."""

from __future__ import annotations

import json

from ctr.switch_log import SwitchLog, staleness_summary
from gba_hvd.callbacks import Event


def switch(step: int, to: str) -> Event:
    return Event("switch", step, "words", {"from": "allreduce", "to": to, "reason": "why", "seconds": 0.5, "more": 1})


def test_a_replacement_knows_the_switches_before_it():
    before, after = SwitchLog(), SwitchLog()
    before.on_event(switch(10, "gba"))
    before.on_event(Event("switch_failed", 11, "words", {"to": "gba"}))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.on_event(switch(20, "bsp"))
    assert [(s["step"], s["to"]) for s in after.switches] == [(10, "gba"), (20, "bsp")]
    assert after.switches[0] == {"step": 10, "from": "allreduce", "to": "gba", "reason": "why", "seconds": 0.5}
    assert len(before.switches) == 1


def test_staleness_is_weighted_by_micro_batches():
    found = staleness_summary({3: 1, 0: 3, 7: 0})
    assert found == {"mean": 0.75, "max": 3, "histogram": {"0": 3, "3": 1}}


def test_a_job_in_allreduce_has_no_staleness():
    assert staleness_summary({}) == {"mean": None, "max": None, "histogram": {}}
