"""How the workers of a new world come to one state: who is newest, where the shards live, what is missing.

`agreement` and `shm.placement` decide, from facts that every rank has gathered; `join` carries it out, in the order of
`elastic`: what a new job resumes from (`resume_job`), the shards of each host (`shard_transfer`), and those that
no host holds any more (`restore_shards`). What may fail on one rank only runs in `comm.collectives.all_or_none`.
"""

from __future__ import annotations

from gba_hvd.membership.join import JoinResult, join

__all__ = ["JoinResult", "join"]
