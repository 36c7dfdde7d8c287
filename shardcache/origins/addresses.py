"""Connect to a host that has several addresses.

DNS returns up to eight addresses for S3, and both IPv6 and IPv4 addresses for many hosts. Some of
them may be unreachable. So, as in RFC 8305 ("happy eyeballs"), the next address is tried when one
fails or is slow, and the first connection that succeeds is used.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import time
from itertools import zip_longest
from queue import Empty
from typing import Any

from shardcache import clock, threads
from shardcache.faults import os_error

#: Seconds after which the next address is tried in parallel. RFC 8305 recommends this value.
_STAGGER = 0.25
#: Seconds after a failure during which an address is tried last.
_AVOIDED = 60.0

#: A generator of its own: the user's program may have seeded the shared one of `random`.
_random = random.SystemRandom()

_Address = tuple[int, Any]  # the address family, and the argument of `socket.connect`


def failure(kind: type[OSError], text: str) -> OSError:
    """Return an error of a connection, with an ``errno``, without which a handler raised it."""
    error = kind(text)
    error.errno = errno.EPROTO
    return error


class Dialer:
    """Connects to hosts and remembers which addresses failed.

    Threads may share a `Dialer`, because each access to its dict is atomic.
    """

    def __init__(self) -> None:
        self._failed: dict[_Address, float] = {}  # time of the last failure

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Return a non-blocking socket that is connected to one of a host's addresses.

        Args:
            host: a name or an address.
            port: the port to connect to.
            timeout: seconds for the DNS lookup, and again for all addresses together.

        Raises:
            OSError: no address can be reached. The type is that of the last failure.
        """
        try:
            untried = threads.call(lambda: self._addresses(host, port), timeout, "shardcache-dns")
        except Empty:
            raise failure(
                TimeoutError, f"no address of {host} from DNS after {timeout:g} s"
            ) from None
        count, end = len(untried), time.monotonic() + timeout
        pending: dict[_Address, socket.socket] = {}  # the oldest attempt first
        failed: dict[_Address, str] = {}
        kind = OSError
        try:
            while (untried or pending) and (left := end - time.monotonic()) > 0:
                pause = min(left, _STAGGER) if untried[1:] else left
                slower = []
                for address in [*pending, *untried[:1]]:
                    family, place = address
                    try:
                        if address not in pending:
                            pending[address] = socket.socket(family, socket.SOCK_STREAM)
                            pending[address].setblocking(False)
                        pending[address].connect(place)  # a repeated call reports the outcome
                    except BlockingIOError:
                        slower.append(address)
                    except os_error() as exn:
                        if exn.errno in (errno.EMFILE, errno.ENFILE):  # not the address's fault
                            raise
                        # A firewall may forbid one address of many. That error is final, so it is
                        # raised only if it concerns all of them.
                        if not (failed and isinstance(exn, PermissionError)):
                            kind = type(exn)
                        failed[address] = exn.strerror or str(exn)
                        if sock := pending.pop(address, None):
                            sock.close()
                        pause = 0.0
                    else:
                        failed |= dict.fromkeys(slower, "slow")
                        return pending.pop(address)
                del untried[:1]
                poller = select.poll()
                for sock in pending.values():
                    poller.register(sock, select.POLLOUT)
                poller.poll(1000 * pause)
            if pending:
                kind = TimeoutError
                failed |= dict.fromkeys(pending, "no answer")
        finally:
            self._failed.update(dict.fromkeys(failed, clock.monotonic()))
            for sock in pending.values():
                sock.close()
        reasons = ", ".join(f"{place[0]} ({reason})" for (_, place), reason in failed.items())
        text = f"no connection to {host}; tried {len(failed)} of {count} addresses: {reasons}"
        raise failure(kind, text)

    def _addresses(self, host: str, port: int) -> list[_Address]:
        """Look up a host's addresses and return them in the order in which to try them.

        They are shuffled to spread the connections over them. IPv6 and IPv4 addresses alternate,
        and addresses that failed recently come last.
        """
        families: dict[int, list[_Address]] = {}  # the family that the system prefers is first
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            families.setdefault(family, []).append((family, place))
        for addresses in families.values():
            _random.shuffle(addresses)
        in_turn = [each for row in zip_longest(*families.values()) for each in row if each]
        oldest = clock.monotonic() - _AVOIDED
        return sorted(in_turn, key=lambda address: self._failed.get(address, oldest) > oldest)
