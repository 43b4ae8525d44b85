"""Runs a command where loopback is the only network, and counts what its processes wanted to send elsewhere.

    unshare -rn python tests/loopback_only.py COMMAND ...

Inside a network namespace every packet without a route is counted, by whichever process, for TCP and for questions to a
name server. The exit code is the command's; 99 if something wanted to leave.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x1 | 0x40


def without_route() -> int:
    """Packets of this namespace that had no way out."""
    names, values = [line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line[:3] == "Ip:"]
    six = [line.split() for line in Path("/proc/net/snmp6").read_text().splitlines()]
    return int(dict(zip(names, values, strict=True))["OutNoRoutes"]) + sum(
        int(value) for name, value in six if name == "Ip6OutNoRoutes"
    )


if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
    before = without_route()
    code = subprocess.run(sys.argv[1:]).returncode
    left = without_route() - before
    print(f"packets that had no way out: {left}", flush=True)
    sys.exit(code or (99 if left else 0))
