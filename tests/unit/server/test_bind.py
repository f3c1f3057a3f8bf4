"""The listening socket."""

import asyncio
import socket

from slipstream.server.run import bind


def test_streams_do_not_wait_for_more_to_send() -> None:
    async def accepted_without_delay() -> bool:
        with bind("127.0.0.1", 0) as address:
            seen: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                sock = writer.get_extra_info("socket")
                seen.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
                writer.close()

            async with await asyncio.start_server(connected, sock=address):
                _, writer = await asyncio.open_connection(*address.getsockname())
                result = await seen
                writer.close()
                return result

    assert asyncio.run(accepted_without_delay())
