"""How the workers of a new world come to one state: who is newest, where the shards live, what is missing.

`agreement` and `routing.place_shards` decide, from facts that every rank has gathered; `joining.join` carries it out,
in the order that `elastic` tells: what a new job resumes from (`takeover`), the shards of each host (`shards`), and
those that nobody holds any more (`refill`). What may fail on one rank only is done by `together`.
"""

from __future__ import annotations

from gba_hvd.membership.join import JoinResult, join

__all__ = ["JoinResult", "join"]
