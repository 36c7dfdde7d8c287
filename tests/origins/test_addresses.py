"""Hosts with several addresses, some of them dead, on real sockets."""

import contextlib
import errno
import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from shardcache import ConfigError, TransferError, TransferTimeoutError
from shardcache.origins.http import WebOrigin
from shardcache.urls import parse_url
from tests.support.storetools import PATIENCE
from tests.support.webservers import Scripted, answer

HOST = "shards.test"
LIVE, REFUSING, SILENT, SILENT_6 = "127.0.0.1", "127.0.0.2", "127.0.0.3", "::1"
FORBIDDEN = "192.0.2.1"  # by a firewall of this machine
ANSWER = answer("206 Partial Content", b"hello", Content_Range="bytes 0-4/5")


class Network:
    """Resolves `HOST` to ``addresses`` and records each attempt to connect to one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        self.port, self.url = port, f"http://{HOST}:{port}"
        self.addresses: list[str] = []
        self.tried: list[str] = []
        self.sockets: list[socket.socket] = []
        look_up, connect = socket.getaddrinfo, socket.socket.connect_ex

        def getaddrinfo(host, *args, **options):
            names = self.addresses if host == HOST else [host]
            return [found for name in names for found in look_up(name, *args, **options)]

        def record(sock, address):
            self.tried.append(address[0])
            self.sockets.append(sock)
            if address[0] == FORBIDDEN:
                return errno.EACCES
            return connect(sock, address)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(socket.socket, "connect_ex", record)


@contextlib.contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """Ignore connections to an address: the queue of its listener is full."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            listener = socket.create_server((address, port), family=family, backlog=0)
        except OSError as exn:
            pytest.skip(f"this machine has no {address}: {exn}")
        stack.enter_context(listener)
        for _ in range(4):
            sock = stack.enter_context(socket.socket(family))
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((address, port))
        yield


@pytest.fixture
def network(serve: Callable[..., Scripted], monkeypatch) -> Iterator[Network]:
    port = serve(ANSWER).server_address[1]
    with silent(SILENT, port):
        yield Network(monkeypatch, port)


def read(origin: WebOrigin, url: str) -> None:
    origin.open(parse_url(f"{url}/a.bin"), 0, 5).close()


@pytest.fixture
def fetch(make_cache) -> Callable[..., object]:
    return lambda url, **options: make_cache(attempts=1, **options).fetch(f"{url}/a.bin")


@pytest.mark.parametrize("dead", [REFUSING, SILENT])
def test_a_dead_address_is_tried_once_a_minute(network, clock, dead):
    network.addresses = [LIVE, dead]
    origin = WebOrigin("https", {}, 60)
    for minute in (1, 2):
        for _ in range(40):  # each starts at a random address
            read(origin, network.url)
            assert network.tried.count(dead) <= minute
            assert network.tried[-1] == LIVE
        assert network.tried.count(dead) == minute
        clock.sleep(61)


def test_after_a_silent_ipv6_address_an_ipv4_address_is_tried(network):
    network.addresses = [SILENT_6, REFUSING, LIVE]
    with silent(SILENT_6, network.port):
        origin = WebOrigin("https", {}, 60)
        read(origin, network.url)
        assert network.tried[0] == SILENT_6 and network.tried[-1] == LIVE
        assert all(sock.fileno() < 0 for sock in network.sockets[:-1])
        for _ in range(3):
            read(origin, network.url)
        assert network.tried.count(SILENT_6) == 1


def test_the_error_names_all_addresses_in_the_order_of_the_attempts(network, fetch):
    network.addresses = [REFUSING, "127.0.0.4", "::1"]
    with pytest.raises(TransferError) as caught:
        fetch(network.url)
    refused = r"(127\S+) \(Connection refused\)"
    tried = rf"tried 3 of 3 addresses: {refused}, ::1 \([^)]+\), {refused} "
    found = re.search(f"no connection to {HOST}; {tried}", str(caught.value))
    assert found and {*found.groups()} == {REFUSING, "127.0.0.4"}


def test_one_timeout_covers_all_addresses(network, fetch):
    network.addresses = [f"127.0.0.{last}" for last in range(10, 18)]
    with contextlib.ExitStack() as stack:
        for address in network.addresses:
            stack.enter_context(silent(address, network.port))
        with pytest.raises(TransferTimeoutError, match=r"\(Connection timed out\)"):
            fetch(network.url, timeout=0.4)
    assert len(network.tried) <= 2


def test_a_forbidden_address_is_no_final_error_if_another_one_fails_otherwise(network, fetch):
    network.addresses = [REFUSING, FORBIDDEN]
    for _ in range(20):
        with pytest.raises(TransferError, match="Connection refused"):
            fetch(network.url)


@pytest.mark.parametrize("host", ["data..test", f"{'x' * 64}.test"])
def test_a_name_that_dns_cannot_have_is_refused(fetch, host):
    with pytest.raises(ConfigError, match="Check the endpoint, URL and proxy"):
        fetch(f"http://{host}")


def test_silent_dns_ends_an_attempt(fetch, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: ended.wait(PATIENCE))
    with pytest.raises(TransferTimeoutError, match=r"no address of host from DNS after 0\.2 s"):
        fetch("http://host", timeout=0.2)
    ended.set()
