"""A network of the benchmark's own, where the kernel's congestion control does not count.

BBR, the default of many kernels, paces a sender, which halves the speed of loopback. In a
network namespace the control can be another one without touching the machine's. Where no
namespace can be had, the figures are taken on the machine's own network, and say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

__all__ = ["enter", "state"]

_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
#: Neither paces; the first that the kernel lets us choose.
_WANTED = ("cubic", "reno")


def enter() -> str:
    """Move this process, and all it starts, into a network of its own; returns `state`.

    To be called before any thread and any socket is made. Without the right to do so
    nothing changes.
    """
    if not _unshare():
        return state()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        fcntl.ioctl(anything, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    for control in _WANTED:
        with contextlib.suppress(OSError):
            _CONTROL.write_text(control, "ascii")
            break
    return state(own=True)


def state(*, own: bool = False) -> str:
    """The network in words."""
    whose = "a network namespace of its own" if own else "the machine's loopback"
    try:
        control = _CONTROL.read_text("ascii").strip()
    except OSError:
        control = "unknown"
    return f"{whose}, congestion control {control}"


def _unshare() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    # The same numbers inside: files keep their owner, and programs see no false root.
    Path("/proc/self/setgroups").write_text("deny", "ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")
    return True
