"""One proxied connection, against servers that answer in every way HTTP/1.1 allows."""

import contextlib
import http.client
import http.server
import os
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from shardcache.cli.meter import Meter, ObjectTraffic

BODY = os.urandom((3 << 20) + 17)


def eventually(claim, seconds=30.0):
    """Wait for something that another thread does; its result, true or not."""
    deadline = time.monotonic() + seconds
    while not (result := claim()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


def connections():
    return [t for t in threading.enumerate() if t.name == "meter-connection"]


@contextlib.contextmanager
def client_of(meter):
    port = urlsplit(meter.endpoint_url).port
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def metered(reply, body_bytes=0):
    """A meter before a server that reads one request, answers with these bytes and hangs up.

    Yields the meter, a client of it, and what the server received so far.
    """
    received = bytearray()

    def serve():
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                while len(received.partition(b"\r\n\r\n")[2]) < body_bytes or (
                    b"\r\n\r\n" not in received
                ):
                    if not (data := peer.recv(65536)):
                        return
                    received.extend(data)
                peer.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with Meter(url) as meter, client_of(meter) as client:
                yield meter, client, received
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers a chunked PUT with its own body, in other chunks and with a trailer."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline() != b"\r\n":
            pass
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(body), 70_001):
            part = body[at : at + 70_001]
            self.wfile.write(b"%x;note=1\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\nX-Sum: 1\r\n\r\n")

    def log_message(self, *arguments):
        """Keep the test output clean."""


def test_chunked_bodies_pass_both_ways_without_their_framing_being_counted():
    body = [os.urandom(90_000), b"x", os.urandom(300_000)]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever, args=(0.02,))
        thread.start()
        try:
            with (
                Meter(f"http://127.0.0.1:{echo.server_port}") as meter,
                client_of(meter) as client,
            ):
                for count in (1, 2):
                    client.request("PUT", "/lab/x", body=iter(body), encode_chunked=True)
                    assert client.getresponse().read() == b"".join(body)
                    assert [r.body_bytes for r in meter.requests()] == [390_001] * count
                    assert meter.requests()[-1].outcome == "complete"
                assert len(connections()) == 1
        finally:
            echo.shutdown()
            thread.join()


def test_request_arrives_byte_for_byte_however_it_was_cut_up():
    sent = (
        b"PUT /lab/x%20y?acl HTTP/1.1\r\nHost: signed.example:81\r\nx-ODD :  kept \r\n"
        b"Authorization: AWS4-HMAC-SHA256 Credential=a/b\r\nContent-Length: 5\r\n\r\nabcde"
    )
    reply = b"HTTP/1.1 200 Fine\r\nOdd:kept\r\nContent-Length: 2\r\n\r\nok"
    with metered(reply, body_bytes=5) as (meter, client, received):
        client.connect()
        for at in range(0, len(sent), 7):
            client.sock.sendall(sent[at : at + 7])
        answer = b""
        while data := client.sock.recv(65536):
            answer += data
        assert bytes(received) == sent
        assert answer == reply
        (record,) = meter.requests()
        assert (record.path, record.reads_object, record.status) == ("lab/x y", False, 200)


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_client_that_does_not_wait_for_continue_is_served(interim):
    reply = interim + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with metered(reply, body_bytes=len(BODY)) as (meter, client, received):
        client.request("PUT", "/lab/x", body=BODY, headers={"Expect": "100-continue"})
        assert client.getresponse().status == 200
        assert received.endswith(BODY)
        assert meter.requests()[0].outcome == "complete"


def test_client_that_waits_for_continue_gets_it_from_the_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        thread = threading.Thread(target=echo.serve_forever, args=(0.02,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{echo.server_port}"
            with Meter(url) as meter, client_of(meter) as client:
                client.connect()
                client.sock.sendall(
                    b"PUT /lab/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                )
                assert client.sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
                client.sock.sendall(b"3\r\nabc\r\n0\r\n\r\n")
                answer = http.client.HTTPResponse(client.sock, method="PUT")
                answer.begin()
                assert answer.read() == b"abc"
        finally:
            echo.shutdown()
            thread.join()


def test_client_that_waits_for_continue_is_told_of_a_refusal_and_cut_off():
    reply = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"
    with metered(reply) as (meter, client, received):
        client.putrequest("PUT", "/lab/x")
        client.putheader("Expect", "100-continue")
        client.putheader("Content-Length", "5")
        client.endheaders()
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (403, b"no")
        # Whatever came next could be body or request: the connection is not reused.
        assert eventually(lambda: not connections())
        assert received.endswith(b"\r\n\r\n")
        assert meter.requests()[0].outcome == "complete"


def test_client_in_the_midst_of_a_refused_upload_still_reads_the_refusal():
    reply = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"
    with metered(reply) as (meter, client, _):
        client.request("PUT", "/lab/x", body=BODY * 8)
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (403, b"no")
        assert meter.requests()[0].status == 403


def test_client_that_leaves_a_silent_server_ends_the_connection():
    with metered(b"", body_bytes=1) as (meter, client, received):
        client.request("GET", "/lab/x")
        assert eventually(lambda: received)
        client.close()
        assert eventually(lambda: meter.requests()[0].outcome == "aborted")
        assert eventually(lambda: not connections())


def test_interim_answers_pass_and_do_not_count():
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with metered(hint + final) as (meter, client, _):
        client.request("GET", "/lab/x")
        answer = b""
        while data := client.sock.recv(65536):
            answer += data
        assert answer == hint + final
        (record,) = meter.requests()
        assert (record.status, record.body_bytes, record.outcome) == (200, 2, "complete")


def test_server_that_hangs_up_early_is_seen_by_the_client_and_recorded():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with metered(head + b"0123456789") as (meter, client, _):
        client.request("GET", "/lab/x")
        with pytest.raises(http.client.IncompleteRead):
            client.getresponse().read()
        (record,) = meter.requests()
        assert (record.status, record.body_bytes, record.outcome) == (200, 10, "aborted")


def test_server_that_hangs_up_between_chunks_leaves_no_complete_record():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with metered(head + b"4\r\nabcd\r\n") as (meter, client, _):
        client.request("GET", "/lab/x")
        with pytest.raises(http.client.IncompleteRead):
            client.getresponse().read()
        (record,) = meter.requests()
        assert (record.status, record.body_bytes, record.outcome) == (200, 4, "aborted")


def test_body_that_ends_with_its_connection_is_complete():
    with metered(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY) as (meter, client, _):
        client.request("GET", "/lab/x")
        assert client.getresponse().read() == BODY
        (record,) = meter.requests()
        assert (record.body_bytes, record.outcome) == (len(BODY), "complete")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"x" * 100_000,
    ],
)
def test_answer_that_is_not_http_ends_the_connection(reply):
    with metered(reply) as (meter, client, _):
        client.request("GET", "/lab/x")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            client.getresponse()
        assert eventually(lambda: meter.requests()[0].outcome == "aborted")
        assert meter.summary() == {"lab/x": ObjectTraffic(gets=1, failed=1)}


def test_request_to_a_dead_server_is_recorded_as_failed():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: refuses, and nobody else gets it
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with Meter(url) as meter, client_of(meter) as client:
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                client.request("GET", "/lab/x")
                client.getresponse()
            assert eventually(lambda: meter.requests()[0].outcome == "aborted")
            assert meter.summary() == {"lab/x": ObjectTraffic(gets=1, failed=1)}
