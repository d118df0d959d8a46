"""What light engines say to each other over TCP: frames of a length and one msgpack map."""

import socket
import struct

import msgspec

FRAME_BYTES_MAX = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class Address(msgspec.Struct, frozen=True):
    """Where an engine takes blocks; stands in its card's agent_metadata."""

    host: str
    port: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame: who writes, and to which incarnation it believes to speak."""

    source: str
    consumer_incarnation: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer; with an error, nothing will be taken."""

    error: str = ""


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """Store `content`, one block after the other, then let `note` be read."""

    handle: int
    block_ids: list[int]
    content: bytes
    note: bytes


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The blocks of this handle are in place; with an error, they were not touched."""

    handle: int
    error: str = ""


Frame = Hello | Welcome | Blocks | Stored

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def send(sock: socket.socket, frame: Frame) -> None:
    """Send one frame. Raises OSError."""
    body = _encoder.encode(frame)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> Frame | None:
    """The next frame; None at the end of the stream. Raises OSError, and ValueError on what is no frame."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    size = _LENGTH.unpack(head)[0]
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes: at most {FRAME_BYTES_MAX} are taken")
    body = _exactly(sock, size)
    return None if body is None else _decoder.decode(body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = sock.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
