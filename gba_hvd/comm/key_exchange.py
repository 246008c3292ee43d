"""How the workers of a job come to hold one key without sending it: an exchange, authenticated by a secret they share.

Horovod's connections are not encrypted, so an eavesdropper must learn nothing. Every rank runs every line:

    1. each     draws an X25519 pair for this exchange alone, and gathers its public half with a tag: a MAC of it under
                the shared secret (GBA_HVD_KEY_FILE or GBA_HVD_KEY), or none where there is none
    2. each     checks all tags: ranks with another secret than the root's are named, on all ranks
    3. root     encrypts the job's key for each other rank (ChaCha20-Poly1305, RFC 8439) under a key derived from both
                public halves, what X25519 makes of them, and the shared secret (HKDF, RFC 5869), and broadcasts that
    4. each     decrypts its own

What that promises. Who only listens learns nothing, nor later from a worker's memory: the private halves are gone.
Who can alter Horovod's traffic learns nothing and can give no worker a key while the shared secret is secret; without
one, such an attacker can stand between root and worker and read the key. (And can alter gradients, with or without:
Horovod's own traffic is not authenticated.)
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gba_hvd.comm.collectives import World, worker_lost
from gba_hvd.errors import BadInput, StateMismatch

LEAST_SECRET_BYTES = 32
_KEY_BYTES, _TAG_BYTES, _SEAL_BYTES = 32, 32, 16
_NONCE = bytes(12)  # each key encrypts one message
_MAKE = "(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > FILE)"


def shared_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """What GBA_HVD_KEY_FILE or GBA_HVD_KEY says, 32 bytes made of it; empty when neither is set.

    Raises BadInput when it is too short, or a file that others can read.
    """
    path, text = environ.get("GBA_HVD_KEY_FILE"), environ.get("GBA_HVD_KEY")
    if path and text:
        raise BadInput("both GBA_HVD_KEY_FILE and GBA_HVD_KEY are set: unset one of them")
    if not path and not text:
        return b""
    found, what = (text or "").strip().encode(), "GBA_HVD_KEY"
    if path:
        what = f"GBA_HVD_KEY_FILE={path}"
        try:
            mode, found = stat.S_IMODE(os.stat(path).st_mode), Path(path).read_bytes().strip()
        except OSError as error:
            raise BadInput(
                f"{what} cannot be read: {error.strerror}; make it once, {_MAKE}, and copy it to every host"
            ) from error
        if mode & 0o077:
            raise BadInput(f"{what} has mode {mode:04o}, so others can read it: chmod 600 {path}")
    if len(found) < LEAST_SECRET_BYTES:
        raise BadInput(f"{what} has {len(found)} bytes, {LEAST_SECRET_BYTES} or more are needed: {_MAKE}")
    return hashlib.blake2b(found, digest_size=32, person=b"gba-hvd secret").digest()


def share_key(world: World, key: bytes | None, root: int, secret: bytes, is_restart: bool = False) -> bytes:
    """The root's key, on every rank. A collective.

    key: 32 bytes, on the root. secret: of `shared_secret`. is_restart: ranks that agree with the root continue without
    those that do not. Raises StateMismatch on all ranks when their secrets differ, or when a third party altered what
    was sent.
    """
    if world.size == 1:
        assert key is not None
        return key
    private = X25519PrivateKey.generate()
    mine = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    published = [row.tobytes() for row in world.gather_bytes("key.public", mine + _tag(secret, world.rank, mine))]
    publics = [each[:_KEY_BYTES] for each in published]
    agrees = [_tag(secret, rank, each[:_KEY_BYTES]) == each[_KEY_BYTES:] for rank, each in enumerate(published)]
    _refuse_other_secrets(world, root, [len(each) > _KEY_BYTES for each in published], agrees, is_restart)
    sealed = b""
    if world.rank == root:
        assert key is not None and len(key) == _KEY_BYTES
        pairs = enumerate(publics)
        sealed = b"".join(
            _cipher(private, public, secret, publics, rank).encrypt(_NONCE, key, None) for rank, public in pairs
        )
    sealed = world.broadcast("key.sealed", sealed if world.rank == root else None, root)
    if world.rank == root:
        assert key is not None
        return key
    n = _KEY_BYTES + _SEAL_BYTES
    try:
        cipher = _cipher(private, publics[root], secret, publics, world.rank)
        return cipher.decrypt(_NONCE, sealed[n * world.rank : n * (world.rank + 1)], None)
    except (InvalidTag, ValueError) as error:
        raise StateMismatch(
            f"the job's key, which rank {root} sent to rank {world.rank}, was altered on the way: another party alters "
            "Horovod's traffic; use a network that others cannot write to, and GBA_HVD_KEY_FILE"
        ) from error


def _tag(secret: bytes, rank: int, public: bytes) -> bytes:
    if not secret:
        return b""
    return hashlib.blake2b(public + rank.to_bytes(8, "little"), key=secret, digest_size=_TAG_BYTES).digest()


def _cipher(
    private: X25519PrivateKey, public: bytes, secret: bytes, publics: list[bytes], rank: int
) -> ChaCha20Poly1305:
    """For the message to this rank. The key depends on all that was gathered: who saw something else cannot read it."""
    about = b"gba-hvd key" + rank.to_bytes(8, "little") + hashlib.blake2b(b"".join(publics)).digest()
    derive = HKDF(hashes.SHA256(), 32, salt=secret or None, info=about)
    return ChaCha20Poly1305(derive.derive(private.exchange(X25519PublicKey.from_public_bytes(public))))


def _refuse_other_secrets(world: World, root: int, has: list[bool], agrees: list[bool], is_restart: bool) -> None:
    """All ranks find the same ranks to differ from the root."""
    differ = np.flatnonzero([one != has[root] for one in has]).tolist()
    if not differ and all(agrees):  # on one rank: then on all
        return
    if not differ:  # all have one: this rank knows only who has the same as itself
        differ = np.flatnonzero(world.gather("key.agrees", np.array(agrees, dtype=np.int64))[root] == 0).tolist()
    lacking = [rank for rank in differ if not has[rank]]
    if not has[root]:
        text = f"ranks {differ} have a GBA_HVD_KEY_FILE (or GBA_HVD_KEY), rank {root} has none"
    elif lacking:
        text = f"ranks {lacking} have no GBA_HVD_KEY_FILE (or GBA_HVD_KEY), rank {root} has one"
    else:
        text = f"the secret of ranks {differ} (GBA_HVD_KEY_FILE or GBA_HVD_KEY) is not that of rank {root}"
    if is_restart and world.rank not in differ:
        raise worker_lost(f"{text}; continuing without them")
    raise StateMismatch(f"{text}: use the same file on every host")
