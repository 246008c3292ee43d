"""TLS 1.3 between processes of one job: both sides show the certificate that follows from its key, and take no other.

All processes of a job derive the same Ed25519 key pair from the job's key, and sign a certificate with it. Who does not
hold the job's key cannot show it, nor stand between two who do. OpenSSL encrypts with AES-GCM, which processors do in
hardware.

A message begins a record of its own, and no message reaches into the next one's (`TlsLink.send`). So when a message has
been read, OpenSSL holds back nothing of its record, which a poller of the socket would not see.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from gba_hvd.ps.key_proof import NotProven

_RECORD_BYTES = 1 << 14  # the most that one has
_MOST_FLIGHTS = 4  # of a handshake: who sends it byte by byte gets no time for each
_MOST_RECORDS = 1 << 24  # that one key of AES-GCM encrypts (RFC 8446, 5.5); then the connection is made again
_VALID = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)  # however clocks are set: a job has one key


def context(key: bytes, is_server: bool) -> ssl.SSLContext:
    """For all connections of a process. key: the job's"""
    certificate, private = _certificate(key)
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    found.check_hostname = False  # hosts have no names here: the certificate itself is what is checked
    found.verify_mode = ssl.CERT_REQUIRED
    found.load_verify_locations(cadata=certificate.decode())
    memory = os.memfd_create("gba-hvd certificate", os.MFD_CLOEXEC)  # OpenSSL takes a file only
    try:
        os.write(memory, certificate + private)
        found.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    if is_server:
        found.num_tickets = 0  # nothing comes that is no message
    return found


def _certificate(key: bytes) -> tuple[bytes, bytes]:
    """(certificate, private key) in PEM; the same for the same key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = Ed25519PrivateKey.from_private_bytes(hashlib.blake2b(key, digest_size=32, person=b"tls").digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gba-hvd job")])
    since, until = _VALID
    unsigned = x509.CertificateBuilder(name, name, private.public_key(), 1, since, until)
    signed = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(private, None)
    return signed.public_bytes(Encoding.PEM), private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class TlsLink:
    """One connection. `socket` replaces `tcp`, with the same file descriptor. Never waits."""

    def __init__(self, tcp: socket.socket, context: ssl.SSLContext, is_server: bool) -> None:
        self.socket = context.wrap_socket(tcp, server_side=is_server, do_handshake_on_connect=False)
        self._n_flights = self._n_records = 0

    def handshake(self) -> bool:
        """Do the next part of it; whether it is over.

        Raises NotProven, and BlockingIOError while the next part has not come.
        """
        has_more = False
        try:
            has_more = self._n_flights < _MOST_FLIGHTS and self._something_came()
            self.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            if not has_more:
                raise BlockingIOError from error
            self._n_flights += 1
            return False
        except (ssl.SSLEOFError, ConnectionError) as error:
            raise NotProven(
                "the peer ended the connection within the TLS handshake: it is gone, or was started with another wire "
                "than wire='tls' (give all the same)"
            ) from error
        except ssl.SSLError as error:
            raise _not_proven(error) from error
        return True

    def _something_came(self) -> bool:
        try:
            return bool(socket.socket.recv(self.socket, 1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def recv_into(self, buffer: memoryview) -> int:
        """As that of a socket. Raises BlockingIOError when nothing is there."""
        try:
            return self.socket.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLError as error:
            if "ALERT" in str(error.reason):  # a server that did not take the certificate sends one only now
                raise _not_proven(error) from error
            raise ConnectionError(f"what TLS does not take ({_reason(error)}), so it was altered on its way") from error

    def send(self, views: Sequence[memoryview]) -> int:
        """Bytes that were taken of what one message still has to send; called again with the same when it was none.

        Raises BlockingIOError when nothing is taken, ConnectionResetError when no more may be sent with this key.
        """
        if self._n_records >= _MOST_RECORDS:
            raise ConnectionResetError("as many records were sent as one key may encrypt")
        data = _record(views)
        is_several = len(data) > _RECORD_BYTES
        if is_several:  # OpenSSL gives the kernel one after the other: they are to travel together
            self._cork(True)
        try:
            n = self.socket.send(data)
            self._n_records += -(-n // _RECORD_BYTES)
            return n
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        finally:
            if is_several:
                self._cork(False)

    def _cork(self, on: bool) -> None:
        """Whether the kernel waits until a packet is full."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)


def _record(views: Sequence[memoryview]) -> Any:
    """What goes out first: short frames together."""
    if len(views) == 1 or len(views[0]) >= _RECORD_BYTES:
        return views[0]
    found = bytearray()
    for view in views:
        found += view[: _RECORD_BYTES - len(found)]
        if len(found) == _RECORD_BYTES:
            break
    return found


def _not_proven(error: ssl.SSLError) -> NotProven:
    return NotProven(
        f"no TLS connection ({_reason(error)}): the peer does not hold the job's key, or it was started with another "
        "wire than wire='tls': give all the same"
    )


def _reason(error: ssl.SSLError) -> str:
    return str(error.reason or error).replace("_", " ").lower()
