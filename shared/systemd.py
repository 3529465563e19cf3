"""Notify systemd of a service's state, for units with Type=notify."""

import os
import socket
from contextlib import suppress

#: Environment variable with the notification socket's path; see sd_notify(3).
NOTIFY_SOCKET = "NOTIFY_SOCKET"


def notify(state: str) -> None:
    """Send a state, READY=1 or STOPPING=1. Does nothing outside of systemd."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection, suppress(OSError):
        connection.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)
