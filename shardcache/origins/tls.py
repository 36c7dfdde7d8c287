"""TLS over a plain blocking socket.

Python's TLS socket makes two system calls for each record of 16 KiB, and with a timeout it also
polls before each. Here, one call receives up to `_CIPHERTEXT` bytes, whose records are then
decrypted from memory. The socket below is the one that plain HTTP uses, so timeouts, `abort` and
forks need no code of their own for TLS.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError
from shardcache.faults import system_error
from shardcache.origins.base import failure, receive
from shardcache.threads import no_fork

#: Bytes of ciphertext to receive at once. They fit into a processor's second-level cache.
_CIPHERTEXT = 256 * 1024
#: Maximum bytes of a record: content, overhead and header (RFC 8446, 5.2; RFC 5246, 6.2.3).
_RECORD = 16 * 1024 + 2048 + 5

#: Lets one thread load certificates while the others wait for them.
_guard = threading.Lock()


class TLSStream:
    """Encrypts and decrypts the bytes of a socket that blocks for at most SO_RCVTIMEO.

    The methods are those of a socket. ``trusted`` is as for `connection.Transport`. Sessions are
    not resumed, because that would save little of a handshake's processor time.
    """

    def __init__(self, sock: socket.socket, host: str, trusted: str | bool | None) -> None:
        self._socket = sock
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._buffer = memoryview(bytearray(_CIPHERTEXT))
        with no_fork():  # a fork must not copy OpenSSL's locks
            wrap = context(trusted).wrap_bio
            self._object = wrap(self._received, self._to_send, server_hostname=host)

    def handshake(self, timeout: float) -> None:
        """Negotiate keys and verify the certificate of the server within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                with no_fork():
                    self._object.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                self._flush()  # also after a failure, so that the server learns the reason
            self._receive(0, 0)
            if time.monotonic() > end:
                raise failure(TimeoutError, "the TLS handshake took too long")

    def pending(self) -> bool:
        """Return whether received bytes have not been read."""
        return bool(self._received.pending or self._object.pending())

    def sendall(self, data: bytes) -> None:
        self._object.write(data)
        self._flush()

    def recv_into(self, view: memoryview, flags: int) -> int:
        """Fill ``view`` with decrypted bytes as `socket.recv_into` does; return their number.

        May return fewer bytes, but at least one, without MSG_WAITALL, after SO_RCVTIMEO, or if the
        server closes the connection; 0 if it was closed, and -1 if no complete record has come yet.
        """
        got, length, more = 0, len(view), True
        # The first bytes of a connection, never read with MSG_WAITALL, bring the session tickets,
        # for which OpenSSL takes locks. Hot path: this is called for each record of 16 KiB.
        read: Any = self._object.read if flags else self._read_without_fork
        while got < length:
            try:
                count: int = read(length - got, view[got:])
            except ssl.SSLWantReadError:
                if not more:
                    break
                more = self._receive(length - got, flags)
            except ssl.SSLEOFError:
                return got
            else:
                got += count
                if not count or not flags:
                    return got
        return got if got or not length else -1

    def _read_without_fork(self, size: int, view: memoryview) -> int | bytes:
        with no_fork():
            return self._object.read(size, view)

    def _receive(self, wanted: int, flags: int) -> bool:
        """Receive ciphertext. Return whether all requested bytes came, so more may be on the way.

        ``wanted`` is how many decrypted bytes the caller waits for.
        """
        self._flush()  # what OpenSSL answers by itself, such as a new key
        # With MSG_WAITALL, wait for fewer bytes than must come: `wanted`, without those of a record
        # that OpenSSL has received in part. For the last records, take what has come.
        size = min(_CIPHERTEXT, wanted - _RECORD)
        if size < _RECORD or not flags:
            size, flags = _CIPHERTEXT, 0
        count = receive(self._socket, self._buffer, size, flags)
        if count < 0:
            return False
        if count:
            self._received.write(self._buffer[:count])
        else:
            self._received.write_eof()
        return count == size

    def _flush(self) -> None:
        if self._to_send.pending:
            self._socket.sendall(self._to_send.read())


def context(trusted: str | bool | None) -> ssl.SSLContext:
    """Return the settings for connections, including the certificates to trust.

    All origins of a process and its forked children share them, because loading the certificates of
    a system takes long. Raises ConfigError if a file of certificates cannot be read.
    """
    # A fork must copy neither OpenSSL's locks nor this one.
    with no_fork(), _guard:
        bundles = (f"{program}_CA_BUNDLE" for program in ("AWS", "REQUESTS", "CURL"))
        return _context(trusted, *map(os.environ.get, (*bundles, "SSL_CERT_FILE", "SSL_CERT_DIR")))


@functools.cache
def _context(trusted: str | bool | None, *variables: str | None) -> ssl.SSLContext:
    settings = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if trusted is False:
        settings.check_hostname = False
        settings.verify_mode = ssl.CERT_NONE
        return settings
    if trusted is True and not any(variables):  # as botocore does
        try:
            from certifi import where

            trusted = where()
        except ImportError:
            import botocore

            trusted = str(Path(botocore.__file__).with_name("cacert.pem"))
    if trusted in (True, None):
        settings.load_default_certs()
    bundles = {*variables[:3]} if trusted is True or trusted is None else {trusted}
    for bundle in filter(None, bundles):
        try:
            settings.load_verify_locations(
                **{"capath" if Path(bundle).is_dir() else "cafile": bundle}
            )
        except system_error() as exn:
            raise ConfigError(
                "the certificates that AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or verify "
                f"names cannot be read ({exn.strerror or type(exn).__name__}). Correct the path."
            ) from None
    return settings
