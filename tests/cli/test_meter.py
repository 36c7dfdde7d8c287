"""The metering proxy: transparent to signed requests, exact to the byte."""

import contextlib
import hashlib
import http.client
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from shardcache.cli.demoserver import S3Server
from shardcache.cli.meter import Meter, ObjectTraffic, RequestRecord, _asked_range, traffic
from shardcache.errors import ConfigError

MIB = 1 << 20
SHARD = os.urandom(3 * MIB + 17)
BIG = os.urandom(MIB) * 48  # more than the buffers of all sockets on the way
SHARD_PATH, BIG_PATH = "lab/a/shard.tar", "lab/big.tar"


@pytest.fixture(scope="module")
def server():
    with S3Server() as running:
        running.create_bucket("lab")
        running.put("lab", "a/shard.tar", SHARD)
        running.put("lab", "big.tar", BIG)
        yield running


@pytest.fixture
def meter(server):
    with Meter(server.endpoint_url) as running:
        yield running
    assert meter_threads() == []


@pytest.fixture
def s3(server, meter):
    client = server.client(meter.endpoint_url)
    yield client
    client.close()


def eventually(claim, seconds=30.0):
    """Wait for something that another thread does; its result, true or not."""
    deadline = time.monotonic() + seconds
    while not (result := claim()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


def meter_threads(name="meter-"):
    return [t for t in threading.enumerate() if t.name.startswith(name)]


def read(s3, key="a/shard.tar", **arguments):
    return s3.get_object(Bucket="lab", Key=key, **arguments)["Body"].read()


def ask(s3, key="big.tar"):
    """Send a signed GET over a connection of its own; its body is not read yet."""
    url = urlsplit(s3.generate_presigned_url("get_object", Params={"Bucket": "lab", "Key": key}))
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.request("GET", f"{url.path}?{url.query}")
    return connection, connection.getresponse()


def test_signed_requests_of_every_kind_pass(server, s3, meter):
    s3.create_bucket(Bucket="through")
    big = os.urandom(6 * MIB)
    s3.put_object(Bucket="through", Key="dir/ü +&%.tar", Body=big)
    upload = s3.create_multipart_upload(Bucket="through", Key="parts.tar")["UploadId"]
    part = s3.upload_part(
        Bucket="through", Key="parts.tar", UploadId=upload, PartNumber=1, Body=big
    )
    s3.complete_multipart_upload(
        Bucket="through",
        Key="parts.tar",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    )
    listed = s3.list_objects_v2(Bucket="through")["Contents"]
    assert [item["Key"] for item in listed] == ["dir/ü +&%.tar", "parts.tar"]
    direct = server.client()
    for key in ("dir/ü +&%.tar", "parts.tar"):
        assert direct.get_object(Bucket="through", Key=key)["Body"].read() == big
        assert s3.get_object(Bucket="through", Key=key)["Body"].read() == big
        s3.delete_object(Bucket="through", Key=key)
    assert "Contents" not in s3.list_objects_v2(Bucket="through")
    methods = " ".join(record.method for record in meter.requests())
    assert methods == "PUT PUT POST PUT POST GET GET DELETE GET DELETE GET"
    assert {record.outcome for record in meter.requests()} == {"complete"}
    assert list(meter.summary()) == ["through/dir/ü +&%.tar", "through/parts.tar"]


def test_ranges_and_body_bytes_are_exact(s3, meter):
    size = len(SHARD)
    before = time.monotonic()
    assert read(s3) == SHARD
    assert read(s3, Range="bytes=0-99") == SHARD[:100]
    assert read(s3, Range=f"bytes=100-{size + 5000}") == SHARD[100:]
    assert read(s3, Range="bytes=2000000-") == SHARD[2_000_000:]
    assert read(s3, Range="bytes=-7") == SHARD[-7:]
    records = meter.requests()
    assert [(r.range, r.status, r.body_bytes) for r in records] == [
        (None, 200, size),
        ((0, 100), 206, 100),
        ((100, size + 5001), 206, size - 100),
        ((2_000_000, None), 206, size - 2_000_000),
        ((-7, None), 206, 7),
    ]
    times = [before, *(r.started for r in records), time.monotonic()]
    assert times == sorted(times)
    assert meter.summary() == {
        SHARD_PATH: ObjectTraffic(
            gets=5,
            object_fetches=2,
            body_bytes=sum(r.body_bytes for r in records),
        )
    }


def test_counts_are_never_behind_what_the_client_has_read(s3, meter):
    for number in range(1, 101):
        assert len(read(s3, Range="bytes=5-1004")) == 1000
        records = meter.requests()
        assert len(records) == number
        assert (records[-1].body_bytes, records[-1].outcome) == (1000, "complete")


def test_head_counts_as_head_and_has_no_body_bytes(s3, meter):
    assert s3.head_object(Bucket="lab", Key="a/shard.tar")["ContentLength"] == len(SHARD)
    (record,) = meter.requests()
    assert (record.body_bytes, record.outcome) == (0, "complete")
    assert meter.summary() == {SHARD_PATH: ObjectTraffic(heads=1)}


def test_refusals_pass_and_are_no_fetches(server, s3, meter):
    stranger = S3Server()
    for arguments, client, status in [
        ({"Key": "a/shard.tar", "IfMatch": '"other"'}, s3, 412),
        ({"Key": "absent.tar"}, s3, 404),
        ({"Key": "a/shard.tar"}, stranger.client(meter.endpoint_url), 403),
    ]:
        with pytest.raises(ClientError) as refusal:
            client.get_object(Bucket="lab", **arguments)
        assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert [record.status for record in meter.requests()] == [412, 404, 403]
    assert meter.summary() == {
        SHARD_PATH: ObjectTraffic(gets=2, failed=2),
        "lab/absent.tar": ObjectTraffic(gets=1, failed=1),
    }
    etag = s3.head_object(Bucket="lab", Key="a/shard.tar")["ETag"]
    assert read(s3, IfMatch=etag) == SHARD


def test_upload_refused_before_its_body_reaches_the_client_as_a_refusal(meter):
    stranger = S3Server().client(meter.endpoint_url)
    with pytest.raises(ClientError) as refusal:
        stranger.put_object(Bucket="lab", Key="no.tar", Body=bytes(8 * MIB))
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_listings_and_subresources_are_no_object_fetches(s3, meter):
    s3.list_objects_v2(Bucket="lab")
    s3.get_object_tagging(Bucket="lab", Key="a/shard.tar")
    assert [(r.path, r.reads_object) for r in meter.requests()] == [
        ("lab", False),
        (SHARD_PATH, False),
    ]
    assert meter.summary() == {}


def test_presigned_get_is_an_object_fetch_and_reset_forgets_it(s3, meter):
    connection, answer = ask(s3, "a/shard.tar")
    assert answer.read() == SHARD
    connection.close()
    assert meter.summary()[SHARD_PATH].object_fetches == 1
    meter.reset()
    assert meter.requests() == []


def test_one_client_connection_carries_many_requests(s3, meter):
    for _ in range(5):
        read(s3, Range="bytes=0-9")
    assert len(meter.requests()) == 5
    assert len(meter_threads("meter-connection")) == 1


def test_client_that_hangs_up_is_counted_with_what_was_sent(s3, meter):
    connection, answer = ask(s3)
    assert answer.read(100_000) == BIG[:100_000]
    answer.close()
    connection.close()
    assert eventually(lambda: meter.requests()[0].outcome == "aborted")
    (record,) = meter.requests()
    assert record.status == 200 and 100_000 <= record.body_bytes < len(BIG)
    assert eventually(lambda: not meter_threads("meter-connection"))
    assert meter.summary() == {
        BIG_PATH: ObjectTraffic(gets=1, object_fetches=1, body_bytes=record.body_bytes, failed=1)
    }


def test_pause_freezes_bodies_at_the_byte_and_resume_completes_them(s3, meter):
    meter.pause(after=1_234_567)
    with ThreadPoolExecutor(2) as pool:
        bodies = [pool.submit(read, s3, key) for key in ("a/shard.tar", "big.tar")]
        try:
            assert eventually(lambda: [r.body_bytes for r in meter.requests()] == [1_234_567] * 2)
            time.sleep(0.2)
            assert [(r.body_bytes, r.outcome) for r in meter.requests()] == [
                (1_234_567, "open")
            ] * 2
            assert s3.head_object(Bucket="lab", Key="big.tar")["ContentLength"] == len(BIG)
        finally:
            meter.resume()
        digests = [hashlib.sha256(body.result()).digest() for body in bodies]
    assert digests == [hashlib.sha256(body).digest() for body in (SHARD, BIG)]


def test_pause_stops_a_body_that_is_flowing(s3, meter):
    meter.throttle = 4e6
    with ThreadPoolExecutor(1) as pool:
        body = pool.submit(read, s3)
        assert eventually(lambda: meter.requests() and meter.requests()[0].body_bytes)
        meter.pause()
        meter.throttle = None
        stopped = meter.requests()[0].body_bytes
        time.sleep(0.2)
        assert meter.requests()[0].body_bytes == stopped < len(SHARD)
        meter.resume()
        assert body.result() == SHARD


def test_pause_waits_for_the_send_that_is_under_way(s3, meter):
    meter.pause(after=10)
    connection, answer = ask(s3)
    assert answer.read(10) == BIG[:10]
    pausing = threading.Thread(target=meter.pause)
    (exchange,) = [c.exchange for c in meter._threads]
    with exchange.lock:  # as if the connection's thread were sending
        pausing.start()
        pausing.join(0.2)
        assert pausing.is_alive()
    pausing.join()
    connection.close()


def test_client_that_dies_while_frozen_ends_at_the_byte(s3, meter):
    meter.pause(after=50_000)
    connection, answer = ask(s3)
    assert answer.read(50_000) == BIG[:50_000]
    answer.close()
    connection.close()
    assert eventually(lambda: meter.requests()[0].outcome == "aborted")
    assert meter.requests()[0].body_bytes == 50_000
    assert eventually(lambda: not meter_threads("meter-connection"))


def test_pause_freezes_uploads_too(server, s3, meter):
    meter.pause(after=1000)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(s3.put_object, Bucket="lab", Key="late.tar", Body=SHARD)
        try:
            assert eventually(meter.requests)
            time.sleep(0.2)
            assert not put.done()
        finally:
            meter.resume()
        put.result()
    assert server.client().get_object(Bucket="lab", Key="late.tar")["Body"].read() == SHARD


def test_throttle_takes_at_least_the_time_it_states(s3, meter):
    meter.throttle = 1e6
    started = time.monotonic()
    assert read(s3, Range="bytes=0-299999") == SHARD[:300_000]
    # The first slice of 20 ms goes at once.
    assert time.monotonic() - started >= 0.28


def test_many_clients_at_once_are_counted_exactly(server, meter):
    def load(number):
        client = server.client(meter.endpoint_url)
        for at in range(0, len(SHARD), MIB):
            stop = min(at + MIB, len(SHARD))
            assert read(client, Range=f"bytes={at}-{stop - 1}") == SHARD[at:stop]
        client.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(load, range(12)))
    assert meter.summary() == {
        SHARD_PATH: ObjectTraffic(gets=12 * 4, object_fetches=12, body_bytes=12 * len(SHARD))
    }


def test_close_cuts_frozen_and_idle_connections_and_leaves_no_thread_or_socket(server):
    def sockets():
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sorted(link for link in links if link.startswith("socket:"))

    before = sockets()
    meter = Meter(server.endpoint_url)
    with meter:
        s3 = server.client(meter.endpoint_url)
        read(s3)
        meter.pause(after=10)
        connection, answer = ask(s3)
        idle = socket.create_connection(("127.0.0.1", urlsplit(meter.endpoint_url).port))
        assert eventually(lambda: len(meter_threads("meter-connection")) == 3)
        assert eventually(lambda: meter.requests()[-1].body_bytes == 10)
    assert meter_threads() == []
    assert idle.recv(1) == b""
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    for item in (idle, connection, s3):
        item.close()
    assert sockets() == before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", urlsplit(meter.endpoint_url).port)) != 0
    assert meter.requests()[-1].outcome == "aborted"
    meter.close()


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        ("bytes=0-0", (0, 1)),
        ("Bytes = 5 - 9", (5, 10)),
        ("bytes=5-", (5, None)),
        ("bytes=-5", (-5, None)),
        ("bytes=0-1,4-5", (0, 2)),
        ("", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("items=0-1", None),
    ],
)
def test_range_header_is_read_as_servers_read_it(header, asked):
    assert _asked_range(header) == asked


def test_range_that_the_server_ignored_counts_as_a_fetch_of_the_object():
    whole = RequestRecord("GET", "lab/x", (500, None), 200, 10, 0.0, "complete", True)
    tail = RequestRecord("GET", "lab/x", (500, None), 206, 10, 0.0, "complete", True)
    put = RequestRecord("PUT", "lab/x", None, 200, 10, 0.0, "complete", True)
    assert traffic([whole, tail, put]) == {
        "lab/x": ObjectTraffic(gets=2, object_fetches=1, body_bytes=20)
    }


def test_what_cannot_be_metered_is_refused_at_once():
    for url in ("https://s3.amazonaws.com", "127.0.0.1:9000", "s3://lab"):
        with pytest.raises(ConfigError, match="http://127"):
            Meter(url)
    with pytest.raises(ConfigError, match="above 0"):
        Meter("http://127.0.0.1:9000", throttle=0)
