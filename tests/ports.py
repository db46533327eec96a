"""Ports of this machine for what cannot say itself which one it has taken."""

import random
import socket

RANGE = (
    20_000,
    32_000,
)  # below those that Linux gives away by itself, to servers on port 0 and to every client
_random = random.SystemRandom()


def free_ports(num: int) -> list[int]:
    """Different ports that were free just now, and that no process gets by chance before they are bound."""
    sockets: list[socket.socket] = []
    while len(sockets) < num:
        try:
            sockets.append(socket.create_server(("127.0.0.1", _random.randrange(*RANGE))))
        except OSError:
            continue  # taken
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
