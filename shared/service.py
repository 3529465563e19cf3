"""What a process tells whoever started it as a service: systemd, where a unit says Type=notify."""

import os
import socket
from contextlib import suppress

#: Where it listens; see sd_notify(3).
NOTIFY_SOCKET = "NOTIFY_SOCKET"


def tell(state: str) -> None:
    """READY=1 or STOPPING=1. Nothing where nobody asked."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, suppress(OSError):
        told.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)
