"""From messages to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec

from gba_hvd.ps.messages import MAX_HEADER_BYTES, VERSION, Answer, ProtocolError, Request


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    job: str
    number: int  # the answer carries its request's
    body: msgspec.Raw


_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # text that is no UTF-8; nesting without end


def encode(job: str, number: int, body: Request | Answer) -> bytes:
    return _encoder.encode(Envelope(VERSION, job, number, msgspec.Raw(_encoder.encode(body))))


def open_envelope(data: Any, job: str) -> Envelope:
    """Raises ProtocolError for anything that is not a message of this version and job."""
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(data):,} bytes, the limit is {MAX_HEADER_BYTES:,}")
    try:
        envelope = _envelope.decode(data)
    except _UNDECODABLE as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error
    refusal = ""
    if envelope.version != VERSION:
        refusal = f"protocol version {envelope.version}, this is {VERSION}: all hosts need the same version of gba-hvd"
    elif envelope.job != job:
        refusal = f"a message for job {envelope.job[:80]!r} came to job {job!r}"
    if refusal:
        refused = ProtocolError(refusal)
        refused.number = envelope.number
        raise refused
    return envelope


def decode_request(envelope: Envelope) -> Request:
    try:
        return _request.decode(envelope.body)
    except _UNDECODABLE as error:
        raise ProtocolError(f"request {envelope.number}: {error}") from error


def decode_answer(envelope: Envelope) -> Answer:
    try:
        return _answer.decode(envelope.body)
    except _UNDECODABLE as error:
        raise ProtocolError(f"answer {envelope.number}: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
