"""The connections of `dynamo.runtime.testing`, which must behave like those of TCP."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from talker import Talker

from dynamo.runtime.testing import until
from dynamo.runtime.testing._network import Host, MemoryNetwork

LARGE = bytes(range(256)) * 8192  # 2 MiB


async def connected(
    client: Talker | None = None, server: Any = None
) -> tuple[Talker, Any, Host, Host]:
    near, far = client or Talker(), server or Talker()
    network = MemoryNetwork()
    here, there = network.host(), network.host()
    loop = asyncio.get_running_loop()
    _, port = await there.listen(loop, lambda: far, there.address, 0, 1)
    await here.connect(loop, lambda: near, there.address, port)
    await until(lambda: far.transport is not None)
    return near, far, here, there


def reset_on_close(talker: Talker) -> None:
    talker.transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )


async def test_bytes_arrive_in_order_in_both_directions() -> None:
    near, far, _, _ = await connected()
    for piece in (b"a", b"bc", b"", b"d"):
        near.transport.write(piece)
        far.transport.write(piece.upper())
    await until(lambda: (near.data, far.data) == (b"ABCD", b"abcd"))


async def test_each_end_knows_both_addresses() -> None:
    near, far, here, there = await connected()
    assert near.transport.get_extra_info("peername")[0] == there.address
    assert far.transport.get_extra_info("peername")[0] == here.address
    for name, other in (("peername", "sockname"), ("sockname", "peername")):
        assert near.transport.get_extra_info(name) == far.transport.get_extra_info(
            other
        )


async def test_a_writer_is_paused_while_the_reader_takes_nothing() -> None:
    near, far, _, _ = await connected()
    far.transport.pause_reading()
    near.transport.write(LARGE)
    assert not near.writable
    assert near.transport.get_write_buffer_size() > 0
    far.transport.resume_reading()
    await until(lambda: far.data == LARGE)
    assert near.writable
    assert near.transport.get_write_buffer_size() == 0


async def test_write_buffer_limits_are_those_that_were_set() -> None:
    near, _, _, _ = await connected()
    near.transport.set_write_buffer_limits(high=100)
    assert near.transport.get_write_buffer_limits() == (25, 100)
    near.transport.set_write_buffer_limits(low=10)
    assert near.transport.get_write_buffer_limits() == (10, 40)


async def test_what_was_written_arrives_before_the_end() -> None:
    near, far, _, _ = await connected()
    near.transport.write(LARGE)
    near.transport.close()
    assert near.transport.is_closing()
    near.transport.write(b"ignored")
    await until(lambda: near.events and far.events == ["eof", type(None)])
    assert far.data == LARGE
    assert near.events == [type(None)]


async def test_a_half_closed_connection_goes_on_the_other_way() -> None:
    near, far, _, _ = await connected(server=Talker(keeps_half=True))
    assert near.transport.can_write_eof()
    near.transport.write_eof()
    await until(lambda: far.events == ["eof"])
    with pytest.raises(RuntimeError, match="after write_eof"):
        near.transport.write(b"more")
    far.transport.write(b"answer")
    await until(lambda: near.data == b"answer")
    far.transport.close()
    await until(lambda: far.events == ["eof", type(None)])
    await until(lambda: near.events == ["eof", type(None)])


async def test_an_abort_loses_what_the_reader_had_no_room_for() -> None:
    near, far, _, _ = await connected()
    far.transport.pause_reading()
    near.transport.write(LARGE[:1000])
    near.transport.write(LARGE)
    near.transport.abort()
    far.transport.resume_reading()
    await until(lambda: far.events == ["eof", type(None)])
    assert 0 < len(far.data) < len(LARGE)
    assert (LARGE[:1000] + LARGE).startswith(far.data)
    assert near.events == [type(None)]


@pytest.mark.parametrize("way", ["close", "abort"])
async def test_what_the_other_side_will_never_read_holds_up_no_end(way: str) -> None:
    near, far, _, _ = await connected()
    far.transport.pause_reading()
    near.transport.write(LARGE)
    far.transport.abort()
    await until(lambda: far.events)
    assert near.transport.get_write_buffer_size() == 0
    getattr(near.transport, way)()
    await until(lambda: near.events)


@pytest.mark.parametrize("how", ["option", "fall", "unread"])
async def test_the_other_side_sees_a_reset(how: str) -> None:
    near, far, _, there = await connected()
    if how == "option":
        reset_on_close(far)
        far.transport.close()
    elif how == "fall":
        there.fall()
    else:
        far.transport.pause_reading()
        near.transport.write(b"never read")
        far.transport.close()
    await until(lambda: near.events == [ConnectionResetError])
    assert far.events == [type(None)]


async def test_whoever_writes_to_a_closed_end_learns_of_it() -> None:
    near, far, _, _ = await connected(Talker(keeps_half=True))
    far.transport.close()
    await until(lambda: near.events == ["eof"])
    near.transport.pause_reading()
    near.transport.write(b"anybody there?")
    await until(lambda: near.events == ["eof", BrokenPipeError])


async def test_nobody_listens() -> None:
    network = MemoryNetwork()
    host = network.host()
    loop = asyncio.get_running_loop()
    with pytest.raises(ConnectionRefusedError, match=r"198\.18\.9\.9:5"):
        await host.connect(loop, Talker, "198.18.9.9", 5)
    listening, port = await host.listen(loop, Talker, host.address, 77, 1)
    assert port == 77
    with pytest.raises(OSError, match="port 77 is in use"):
        await host.listen(loop, Talker, host.address, 77, 1)
    listening.close()
    listening.close()
    with pytest.raises(ConnectionRefusedError):
        await host.connect(loop, Talker, host.address, 77)


async def test_a_host_that_fell_neither_answers_nor_calls() -> None:
    near, far, here, there = await connected()
    there.fall()
    _, port = near.transport.get_extra_info("peername")
    loop = asyncio.get_running_loop()
    with pytest.raises(ConnectionRefusedError):
        await here.connect(loop, Talker, there.address, port)
    with pytest.raises(ConnectionRefusedError):
        await there.connect(loop, Talker, here.address, 1)
    await until(lambda: near.events and far.events)


async def test_a_frozen_host_holds_all_and_loses_nothing() -> None:
    near, far, here, there = await connected()
    there.freeze()
    near.transport.write(b"question")
    far.transport.write(b"answer")
    late = Talker()
    _, port = near.transport.get_extra_info("peername")
    await here.connect(asyncio.get_running_loop(), lambda: late, there.address, port)
    late.transport.write(b" another")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (near.data, far.data) == (b"", b"")
    there.thaw()
    await until(lambda: far.data == b"question another")
    await until(lambda: near.data == b"answer")


async def test_the_protocol_of_a_connection_can_be_replaced() -> None:
    near, far, _, _ = await connected()
    successor = Talker()
    assert far.transport.get_protocol() is far
    far.transport.set_protocol(successor)
    near.transport.write(b"for the successor")
    await until(lambda: successor.data == b"for the successor")
    near.transport.close()
    await until(lambda: successor.events == ["eof", type(None)])
    assert far.events == []


class Buffered(asyncio.BufferedProtocol):
    """Receives into seven bytes of its own."""

    def __init__(self) -> None:
        self.room = bytearray(7)
        self.data = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.room

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.room[:nbytes]


async def test_a_protocol_may_bring_its_own_buffer() -> None:
    near, far, _, _ = await connected(server=Buffered())
    near.transport.write(b"more than seven bytes")
    await until(lambda: far.data == b"more than seven bytes")


async def test_a_call_back_may_close_pause_and_write() -> None:
    class Once(Talker):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.transport.pause_reading()
            self.transport.write(b"thanks")
            self.transport.close()

    near, far, _, _ = await connected(server=Once())
    near.transport.write(b"x")
    near.transport.write(b"y")
    await until(lambda: far.events == [type(None)])
    assert far.data == b"xy"
    assert near.data == b"thanks"
    assert not near.transport.is_reading()
