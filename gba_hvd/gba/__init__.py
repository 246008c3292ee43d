"""A worker's part in the asynchronous modes: lease, pull, push. It waits for no other worker.

    lease -> (rows of other hosts are pulled) -> newest dense values -> the user's forward and backward -> push
    ahead     far_rows                           dense_values                                    outgoing, under_way

The rows of this host are read straight from shared memory, which the server writes. A push goes to every server and,
once all have it, is reported to the coordinator; a few of them at most are on the way. Which pushes make a step, with
what weight, and who applies it, is decided by the coordinator (`ps.coordinator`) and done by the servers.

`mode` holds these together; `session` is what all workers agree on, `contact` what goes to and fro with heartbeats,
`dense_state` what is taken back from the servers.
"""

from __future__ import annotations

from gba_hvd.gba.ahead import Ahead
from gba_hvd.gba.mode import GbaMode
from gba_hvd.gba.session import DenseState, Session

__all__ = ["Ahead", "DenseState", "GbaMode", "Session"]
