"""The modes by name: which of them use servers, and which keep a replica of the dense part on each worker."""

from __future__ import annotations

from collections.abc import Sequence

from gba_hvd.errors import refuse_unknown

REPLICA_MODES = ("shadow", "easgd", "ma", "bmuf")  # "shadow" in the background, the others every k local steps
SERVER_MODES = ("gba", "bsp", "async", "hop_bs", "hop_bw", *REPLICA_MODES)
MODES = ("allreduce", *SERVER_MODES)  # their order is stored: metrics and commits have a mode's number
SETTINGS = (*MODES, "auto")  # "auto" is a setting: the job is in allreduce or in gba, as `switching.policy` decides
MODE_NUMBERS = {mode: number for number, mode in enumerate(MODES)}
_SYNONYMS = {  # what papers and other libraries call them
    "sync": "allreduce",
    "synchronous": "allreduce",
    "all_reduce": "allreduce",
    "ddp": "allreduce",
    "asp": "async",
    "asynchronous": "async",
    "ssp": "hop_bs",
    "bounded_staleness": "hop_bs",
    "backup_workers": "hop_bw",
    "shadowsync": "shadow",
    "local_sgd": "ma",
    "model_averaging": "ma",
}


def known_mode(name: str, among: Sequence[str] = SETTINGS) -> str:
    """`name` if it is one of `among`; otherwise BadInput that suggests the right one."""
    refuse_unknown("mode", name, among, _SYNONYMS)
    return name
