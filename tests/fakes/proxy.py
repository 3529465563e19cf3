"""A TCP proxy on loopback that can cut, delay or silence connections."""

import asyncio
import socket
import struct
from contextlib import suppress
from threading import Thread

#: Maximum number of bytes forwarded at once.
PIECE = 65_536
#: Socket option that makes closing reset the connection and drop data in transit in both
#: directions.
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """A proxy that listens on `port` and forwards each connection to the server.

    It runs on a thread until `stop`.
    """

    def __init__(self, server_port: int) -> None:
        #: Port to which new connections are forwarded.
        self.server_port = server_port
        #: Seconds by which each piece is delayed.
        self.delay = 0.0
        #: True if new connections are accepted and silent, too.
        self.is_silent = False
        self._clients: set[asyncio.StreamWriter] = set()
        #: Connections that stay open and lose everything sent through them.
        self._silent: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE, backlog=128)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()

    def cut(self) -> None:
        """Reset all connections, dropping data in transit; new connections are served."""
        self._loop.call_soon_threadsafe(self._cut)

    def silence(self) -> None:
        """Drop all further data of all connections without closing them, as a firewall does that
        has forgotten them.

        New connections are served.
        """
        self._loop.call_soon_threadsafe(self._silence)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        await asyncio.gather(
            *asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True
        )

    def _cut(self) -> None:
        for client in tuple(self._clients):
            with suppress(OSError):  # the client has just closed the connection
                client.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET
                )
            client.transport.abort()

    def _silence(self) -> None:
        self._silent |= self._clients

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._clients.add(writer)
        if self.is_silent:
            self._silent.add(writer)
        try:
            from_server, to_server = await asyncio.open_connection(
                "127.0.0.1", self.server_port, limit=PIECE
            )
        except OSError:  # the server is down: close the client's connection
            self._clients.discard(writer)
            writer.transport.abort()
            return
        ways = [
            asyncio.create_task(self._pass_on(reader, to_server, writer)),
            asyncio.create_task(self._pass_on(from_server, writer, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._clients.discard(writer)
            self._silent.discard(writer)
            writer.transport.abort()
            to_server.transport.abort()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                if client in self._silent:
                    continue
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(piece)
                await writer.drain()
