"""A slow, lossy link: delay and drop every packet that this network namespace forwards (`slow_link.py DELAY_MS LOSS`).

two_hosts.py runs it in a router container, as root with NET_ADMIN and /dev/net/tun. Like `tc netem`, which many
kernels lack, it works on packets: TCP sees losses and retransmits. Forwarded packets are routed to a TUN device, read
here, held for the delay and written back. Standard library only.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

DEVICE, TABLE = "slow0", "100"
#: From linux/if_tun.h: the request that names a device; flags for IP packets without a header.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
#: Packets held at most. Further ones are dropped, as by a full queue.
MAX_HELD = 10_000
MAX_PACKET_BYTES = 65_536


class SlowLink:
    """Packets in flight. delay: seconds; loss: probability that a packet is lost."""

    def __init__(self, delay: float, loss: float, seed: int = 1) -> None:
        self._delay, self._loss, self._random = delay, loss, random.Random(seed)
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now: float) -> None:
        if len(self._held) < MAX_HELD and self._random.random() >= self._loss:
            self._held.append((now + self._delay, packet))

    def due(self, now: float) -> Iterator[bytes]:
        """Yield the packets that have arrived at the other end."""
        while self._held and self._held[0][0] <= now:
            yield self._held.popleft()[1]

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next packet arrives, or None if none is in flight."""
        return max(0.0, self._held[0][0] - now) if self._held else None


def open_device() -> int:
    """Create the TUN device and route all forwarded packets through it. Return its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", DEVICE, "up")
    _ip("route", "add", "default", "dev", DEVICE, "table", TABLE)
    for interface in Path("/sys/class/net").iterdir():
        if interface.name not in ("lo", DEVICE):
            _ip("rule", "add", "iif", interface.name, "lookup", TABLE)
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["/sbin/ip", *arguments], check=True)


def main() -> None:
    link = SlowLink(float(sys.argv[1]) / 1000, float(sys.argv[2]))
    device = open_device()
    while True:
        if select.select([device], [], [], link.wait(time.monotonic()))[0]:
            link.take(os.read(device, MAX_PACKET_BYTES), time.monotonic())
        for packet in link.due(time.monotonic()):
            os.write(device, packet)


if __name__ == "__main__":
    main()
