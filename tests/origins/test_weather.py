"""Stores and credential services that throttle, refuse a header or disagree about the time."""

import errno
import hashlib
import json
import random
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count

import pytest

from shardcache import AccessDeniedError, Cache, ShardNotFoundError, TransferError
from shardcache.origins import retry, s3
from shardcache.origins.base import TransientError
from shardcache.origins.retry import BASE, CAP, RETRY_AFTER_CAP, Pace, RetryLimits
from tests.support.caches import warnings
from tests.support.fakes import FakeClock
from tests.support.storetools import PATIENCE, forked
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, part_of, store_of

SHARD = make_tar(1, members=40, size=100_000)
KEYS = {"key": "AK", "secret": "SK"}
CREDENTIALS = {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "T", "Code": "Success"}
CREDENTIALS["Expiration"] = "2099-01-01T00:00:00Z"
EXPIRED = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "S"}
EXPIRED["Expiration"] = "2001-01-01T00:00:00Z"
STS_CREDENTIALS = b"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult>
<Credentials>
<AccessKeyId>AK</AccessKeyId><SecretAccessKey>SK</SecretAccessKey><SessionToken>T</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


def refusal(status: str, code: str, **headers: object) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code></Error>".encode(), **headers)


def sts_error(status: str, code: str) -> bytes:
    text = f"<ErrorResponse><Error><Code>{code}</Code></Error></ErrorResponse>"
    return answer(status, text.encode())


@pytest.fixture
def store(serve: Callable[..., Scripted]) -> Scripted:
    """An S3 server that has the same shard under every key."""
    return serve(store_of(SHARD), most=1000)


#: The variables that name a source of credentials: a service, or a program.
SOURCES = {
    "metadata": {
        "AWS_EC2_METADATA_DISABLED": "false",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "{url}",
    },
    "container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{url}/credentials"},
    "sts": {
        "AWS_ENDPOINT_URL_STS": "{url}",
        "AWS_MAX_ATTEMPTS": "1",  # botocore's own retries sleep in real time
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/lab",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "{home}/token",
    },
    "program": {"AWS_CONFIG_FILE": "{home}/config"},
}


@pytest.fixture
def source(serve, monkeypatch, tmp_path) -> Callable[..., Scripted]:
    """Return a function that starts a source of credentials, and makes it that of the process."""

    def respond(head: str) -> bytes:
        if head.startswith("PUT"):
            return answer("200 OK", b"token")
        if head.split()[1].endswith("/security-credentials/"):
            return answer("200 OK", b"role")
        is_sts = head.startswith("POST")
        return answer("200 OK", STS_CREDENTIALS if is_sts else json.dumps(CREDENTIALS).encode())

    def start(name: str, program: str = "") -> Scripted:
        service = serve(respond, most=1000)
        monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
        (tmp_path / "token").write_text("token")
        (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
        for variable, value in SOURCES[name].items():
            monkeypatch.setenv(variable, value.format(url=service.url, home=tmp_path))
        return service

    return start


@pytest.fixture
def open_cache(store: Scripted, open_cache, tmp_path, clock: FakeClock) -> Callable[..., Cache]:
    """Return a function that opens a new cache of the store's shards."""
    given = {"endpoint_url": store.url, "storage_options": KEYS, "attempts": 2}
    names = map(str, count())
    return lambda **more: open_cache(dir=tmp_path / next(names), **{**given, **more})


def until(clock: FakeClock, seconds: float, refused: bytes) -> Callable[[str], bytes | None]:
    """Return a function for `Scripted.refuse` that refuses requests for this time."""
    end = clock.monotonic() + seconds
    return lambda head: refused if clock.monotonic() < end else None


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("store", refusal("503 Slow Down", "SlowDown")),
        ("store", refusal("503 Service Unavailable", "")),
        ("store", refusal("400 Bad Request", "ThrottlingException")),
        ("store", answer("503 Busy", Retry_After="Wed, 21 Oct 2065 07:28:00 GMT")),
        ("store", answer("503 Busy", b'<?xml version="1.0" encoding="gbk"?><a/>')),
        ("store", answer("503 Busy", b'<?xml version="1.0" encoding="no-such-coding"?><a/>')),
        ("metadata", answer("429 Too Many Requests")),
        ("metadata", answer("500 Oh")),
        ("container", answer("429 Slow")),
        ("sts", sts_error("503 Service Unavailable", "ServiceUnavailable")),
        ("sts", sts_error("400 Bad Request", "Throttling")),
        ("sts", sts_error("400 Bad Request", "IDPCommunicationError")),
        ("sts", b"no HTTP\r\n\r\n"),
    ],
)
def test_a_read_waits_for_busy_servers(store, source, open_cache, clock, caplog, name, refused):
    service = store if name == "store" else source(name)
    service.refuse = until(clock, 150, refused)
    cache = open_cache(storage_options=KEYS if name == "store" else {})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    assert 145 < clock.elapsed < 160
    found = [text for text in warnings(caplog) if "s3://lab is not ready" in text]
    assert len(found) == 3  # one a minute
    assert "requests wait for up to 5m" in found[0] and "2m" in found[-1]
    requests = len(service.heads)
    assert requests < 120
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert name == "store" or len(service.heads) == requests


def test_the_wait_for_a_store_ends_after_patience(store, open_cache, clock):
    store.refuse = lambda head: refusal("503 Slow Down", "SlowDown")
    with pytest.raises(TransferError, match="SlowDown.*for 1m, the limit set by patience"):
        open_cache(patience=60).open("s3://lab/a.tar")
    assert 60 <= clock.elapsed < 70
    requests = len(store.heads)
    with pytest.raises(TransferError, match="2 attempts failed"):
        open_cache(patience=0).open("s3://lab/a.tar")
    assert len(store.heads) == requests + 2


def test_throttling_adds_few_requests(store, open_cache, clock):
    """While a store throttles many downloads, one request probes, and the others wait for it."""
    options = {"part_size": "1MiB", "connections": 32}
    urls = [f"s3://lab/{number}.tar" for number in range(12)]
    assert open_cache(**options).prewarm(urls).fetched == 12
    calm = len(store.heads)
    end = clock.monotonic() + 60
    refused = []

    def refuse(head: str) -> bytes | None:
        if clock.monotonic() >= end:
            return None
        refused.append(head)
        return refusal("503 Slow Down", "SlowDown")

    store.refuse = refuse
    assert open_cache(**options).prewarm(urls).fetched == 12
    assert len(refused) < calm
    assert len(store.heads) <= 2 * calm + len(refused) + 5


@pytest.mark.parametrize(
    "refused",
    [
        refusal("501 Not Implemented", "NotImplemented"),
        refusal("400 Bad Request", "InvalidArgument"),
        answer("400 Bad Request"),
    ],
)
def test_checksums_are_requested_once_from_a_store_without_them(store, open_cache, refused):
    store.refuse = lambda head: refused if "x-amz-checksum-mode" in head.lower() else None
    cache = open_cache()
    for number in range(4):
        assert cache.open(f"s3://lab/{number}.tar").read() == SHARD
    heads = [head.lower() for head in store.heads]
    assert sum("x-amz-checksum-mode" in head for head in heads) == 1


def test_checksums_are_requested_after_a_refusal_for_another_reason(store, open_cache):
    cache = open_cache()
    assert cache.open("s3://lab/a.tar").read() == SHARD
    store.refuse = lambda head: answer("400 Bad Request")
    assert len(cache.prewarm("s3://lab/a.tar", refresh=True).failures) == 1
    store.refuse = lambda head: None
    assert cache.prewarm("s3://lab/a.tar", refresh=True).cached == 1
    assert "x-amz-checksum-mode" in store.heads[-1].lower()


def test_requests_are_signed_with_the_time_of_the_store(store, open_cache, caplog):
    now = datetime.now(UTC) + timedelta(minutes=40)

    def refuse(head: str) -> bytes | None:
        signed = datetime.strptime(re.search("x-amz-date: (\\w+)Z", head)[1], "%Y%m%dT%H%M%S")
        if abs((now - signed.replace(tzinfo=UTC)).total_seconds()) < 900:
            return None
        return refusal("403 Forbidden", "RequestTimeTooSkewed", Date=format_datetime(now))

    store.refuse = refuse
    cache = open_cache()
    for number in range(3):
        assert cache.open(f"s3://lab/{number}.tar").read() == SHARD
    [warning] = [r.getMessage() for r in caplog.records if "clock" in r.getMessage()]
    assert re.search("clock is (40m|39m 5.s) off", warning)
    store.refuse = lambda head: refusal("403 Forbidden", "RequestTimeTooSkewed")
    with pytest.raises(AccessDeniedError, match="clock is off; synchronise"):
        open_cache().open("s3://lab/a.tar")


def test_a_read_waits_for_a_silent_metadata_service(open_cache, source, clock, monkeypatch):
    monkeypatch.setattr("shardcache.origins.aws._TIMEOUT", 0.2)
    ended = threading.Event()

    def stall(head: str) -> bytes | None:
        if clock.elapsed < 1:
            ended.wait(30)
        return None

    source("metadata").refuse = stall
    assert open_cache(storage_options={}).open("s3://lab/a.tar").read() == SHARD
    ended.set()


@pytest.mark.parametrize(
    ("name", "refuse", "message"),
    [
        ("metadata", lambda head: None if "PUT" in head else answer("404 None"), "Log in"),
        ("sts", lambda head: sts_error("403 Forbidden", "AccessDenied"), "AccessDenied"),
        ("program", "/no/such/program", r"No such file.*\. Log in"),
        ("program", "echo not json", r"Expecting value.*\. Log in"),
        ("program", f"echo '{json.dumps(EXPIRED)}'", r"still expired.*\. Log in"),
    ],
)
def test_a_lack_of_credentials_is_final(store, open_cache, clock, source, name, refuse, message):
    service = source(name, refuse)
    service.refuse = refuse
    cache = open_cache(storage_options={})
    with pytest.raises(AccessDeniedError, match=message):
        cache.open("s3://lab/a.tar")
    assert (clock.elapsed < 1, len(store.heads)) == (True, 0)
    if name != "program":
        service.refuse = lambda head: None
        assert cache.open("s3://lab/a.tar").read() == SHARD


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_child_uses_fresh_credentials_of_its_parent(open_cache, source, monkeypatch, is_fresh):
    metadata = source("metadata")
    if not is_fresh:
        monkeypatch.setattr("shardcache.origins.s3._RENEWED_BEFORE", 200 * 365 * 86400)
        monkeypatch.setattr("shardcache.origins.s3._RENEWAL_PAUSE", 0.0)
    cache = open_cache(storage_options={})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    requests = len(metadata.heads)
    with forked(lambda parent: parent.say(cache.open("s3://lab/b.tar").read())) as child:
        assert child.hear() == SHARD
    assert (len(metadata.heads) == requests) == is_fresh


@pytest.fixture
def keys(tmp_path, monkeypatch) -> Callable[..., None]:
    """Return a function that writes the credentials of a profile, or their first bytes."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    text = "[lab]\naws_access_key_id = {0}\naws_secret_access_key = SK\naws_session_token = {0}\n"
    return lambda name, most=None: file.write_text(text.format(name)[:most])


@pytest.mark.parametrize("written", [1000, 40, 2, 0])
def test_a_read_waits_for_a_new_login(store, open_cache, clock, keys, monkeypatch, caplog, written):
    """While it waits, the file has the old credentials, or the first bytes of new ones."""
    keys("OLD")
    cache = open_cache(storage_options={"profile": "lab"})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    expired = refusal("400 Bad Request", "ExpiredToken")
    store.refuse = lambda head: expired if "x-amz-security-token: OLD" in head else None
    keys("OLD", written)
    clock.on_sleep.append(lambda: keys("NEW") if clock.elapsed > 100 else None)
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert 100 < clock.elapsed < 115
    found = warnings(caplog)
    assert "aws sso login --profile lab" in found[0] and len(found) <= 3
    requests = len(store.heads)
    store.refuse = lambda head: expired
    monkeypatch.setattr("shardcache.origins.s3._stores", {})  # as in a new process
    with pytest.raises(AccessDeniedError, match="log in again"):
        open_cache(storage_options={"profile": "lab"}).open("s3://lab/c.tar")
    assert len(store.heads) == requests + 1


def test_a_read_through_s3fs_waits_until_the_throttling_ends(store, open_cache, clock):
    refused = [refusal("503 Slow Down", "SlowDown")]
    store.refuse = lambda head: refused.pop() if refused and head.startswith("GET") else None
    owner = {"s3_additional_kwargs": {"ExpectedBucketOwner": "123456789012"}}
    assert open_cache(storage_options={**KEYS, **owner}).open("s3://b/a.tar").read() == SHARD
    assert "\r\nx-amz-expected-bucket-owner: 123456789012\r\n" in store.heads[-1].lower()
    assert clock.naps


def test_a_hanging_source_of_keys_stops_no_read(
    source, store, open_cache, pool, tmp_path, monkeypatch
):
    monkeypatch.setattr("shardcache.origins.aws.CHAIN_TIMEOUT", 0.5)
    keys = json.dumps(EXPIRED | {"Expiration": "2099-01-01T00:00:00Z"})
    program, hangs = tmp_path / "program", tmp_path / "hangs"
    program.write_text(f"echo '{keys}'; while [ -e {hangs} ]; do sleep 0.05; done")
    source("program", f"sh {program}")
    cache = open_cache(storage_options={}, patience=1)
    assert cache.open("s3://lab/first.tar").read() == SHARD
    hangs.touch()
    sent, answered = threading.Event(), threading.Event()

    def refuse(head: str) -> bytes:
        if "/slow.tar" in head:
            sent.set()
            answered.wait(PATIENCE)
        return refusal("400 Bad Request", "ExpiredToken")

    store.refuse = refuse
    slow = pool.submit(cache.open, "s3://lab/slow.tar")
    sent.wait(PATIENCE)
    try:
        with pytest.raises(TransferError, match=r"has not answered for 0\.5 s \(for 1.0 s"):
            cache.open("s3://lab/second.tar")
        answered.set()
        assert "has not answered" in str(slow.exception(PATIENCE))
    finally:
        hangs.unlink()


SSO = {
    "legacy": "[profile lab]\nsso_start_url = https://start\nsso_region = us-east-1\n",
    "session": "[sso-session on]\nsso_start_url = https://start\nsso_region = us-east-1\n"
    "[profile lab]\nsso_session = on\n",
}


@pytest.mark.parametrize("end", ["expires", "is revoked"])
@pytest.mark.parametrize("kind", SSO)
def test_a_read_waits_for_a_new_sso_login(
    open_cache, serve, clock, tmp_path, monkeypatch, caplog, kind, end
):
    name = hashlib.sha1({"legacy": b"https://start", "session": b"on"}[kind]).hexdigest()
    revoked, tokens = set(), map(str, count())

    def log_in(token: str, year: int = 2099) -> None:
        login = {"accessToken": token, "expiresAt": f"{year}-01-01T00:00:00Z"}
        (tmp_path / f"{name}.json").write_text(json.dumps(login))

    def portal(head: str) -> bytes:
        if re.search("x-amz-sso_bearer_token: (.*)\r", head)[1] in revoked:
            return answer("401 Unauthorized", b"{}", x_amzn_ErrorType="UnauthorizedException")
        soon = (datetime.now(UTC).timestamp() + 60) * 1000  # each request needs new ones
        keys = {"accessKeyId": "AK", "secretAccessKey": "SK", "sessionToken": next(tokens)}
        text = json.dumps({"roleCredentials": {**keys, "expiration": soon}})
        return answer("200 OK", text.encode())

    for provider in ("credentials.SSOProvider", "tokens.SSOTokenProvider"):
        monkeypatch.setattr(f"botocore.{provider}._SSO_TOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", serve(portal, most=100).url)
    config = tmp_path / "config"
    config.write_text(f"{SSO[kind]}sso_role_name = lab\nsso_account_id = 123456789012\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    log_in("old")
    cache = open_cache(storage_options={"profile": "lab"})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    for each in s3._stores.values():  # the credentials expire
        each.expire_at = 0.0
    revoked.add("old")
    log_in("old", 2099 if end == "is revoked" else 2001)
    clock.on_sleep.append(lambda: log_in("new") if clock.elapsed > 100 else None)
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert 100 < clock.elapsed < 115
    assert any("aws sso login --profile lab" in text for text in warnings(caplog))


@pytest.mark.parametrize(
    ("retry_after", "rounds"),
    [
        # Four refusals at once, so that one success after each later refusal does not end it.
        pytest.param(None, [(0, 4, 0), *[(10, 0, 1), (0, 1, 0)] * 100], id="in turn"),
        pytest.param(30, [(0, 1, 1), (0, 1, 0), *[(10, 0, 1)] * 10], id="in the first pause"),
        pytest.param(None, [(0, 8, 0), (0, 0, 1), (600, 1, 0)], id="after a long time"),
        pytest.param(None, [(0, 8, 0), (400, 1, 0)], id="after an idle time"),
    ],
)
def test_patience_is_for_refusals_without_a_success_in_between(clock, caplog, retry_after, rounds):
    """A round is a pause in seconds, and the numbers of requests refused and served at once."""
    caplog.set_level("INFO", "shardcache")
    pace = Pace("s3://lab", 60)
    error = TransientError("503 SlowDown", patient=True, retry_after=retry_after)
    for pause, refused, served in rounds:
        clock.sleep(pause)
        turns = [pace.turn(clock.sleep) for _ in range(refused + served)]
        for turn in turns:
            turn.__enter__()
        for number, turn in enumerate(turns):
            is_refused = number < refused
            assert not turn.__exit__(*((type(error), error, None) if is_refused else [None] * 3))
        assert not pace.is_over
    assert ("responds again" in caplog.messages[-1]) == (refused == 0)


def test_a_versioned_bucket_needs_no_permission_for_its_versions(store, open_cache):
    def respond(head: str) -> bytes:
        if "versionId" in head:  # takes s3:GetObjectVersion
            return refusal("403 Forbidden", "AccessDenied")
        return b"".join(part_of(SHARD, head, ETag='"v1"', x_amz_version_id="1"))

    store.refuse = respond
    assert open_cache(part_size="1MiB").open("s3://lab/a.tar").read() == SHARD
    assert len(store.heads) > 3


@pytest.mark.parametrize(
    "code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"]
)
def test_rotated_keys_are_read_again(store, open_cache, keys, code):
    keys("OLD")
    cache = open_cache(storage_options={"profile": "lab"})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    keys("NEW")
    refused = refusal("400 Bad Request" if code == "ExpiredToken" else "403 Forbidden", code)
    bodiless = refused.partition(b"<")[0]  # the response to a HEAD
    store.refuse = lambda head: (
        None if "=OLD/" not in head else bodiless if head.startswith("HEAD") else refused
    )
    report = cache.prewarm("s3://lab/a.tar", refresh=True)
    assert (report.cached, report.failures) == (1, {})
    assert cache.open("s3://lab/b.tar").read() == SHARD


@pytest.mark.parametrize("url", ["s3://lab/a.tar", "{}/a.tar?sv=1&se=2&sig=c0ffee"])
@pytest.mark.parametrize("status", ["400 Bad", "403 Forbidden", "405 Unknown", "501 None"])
def test_a_refresh_sends_a_get_only_if_the_head_is_refused(store, open_cache, url, status):
    store.refuse = lambda head: answer(status) if head.startswith("HEAD") else None
    cache, url = open_cache(), url.format(store.url)
    assert cache.open(url).read() == SHARD
    report = cache.prewarm(url, refresh=True)
    assert (report.cached, report.failures) == (1, {})
    assert "Range: bytes=0-0" in store.heads[-1]
    store.refuse = lambda head: answer("404 Not Found")
    [error] = cache.prewarm(url, refresh=True).failures.values()
    assert isinstance(error, ShardNotFoundError) and store.heads[-1].startswith("HEAD")


def test_valid_credentials_are_used_while_the_service_fails(open_cache, source, clock, monkeypatch):
    container = source("container")
    soon = datetime.now(UTC) + timedelta(minutes=5)
    monkeypatch.setitem(CREDENTIALS, "Expiration", soon.strftime("%Y-%m-%dT%H:%M:%SZ"))
    cache = open_cache(storage_options={})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    container.refuse = lambda head: answer("500 Oh")
    for name in "bcd":
        assert cache.open(f"s3://lab/{name}.tar").read() == SHARD
    assert clock.elapsed == 0


def test_a_wait_for_credentials_needs_no_directory(open_cache, source, clock, monkeypatch):
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    source("container").refuse = until(clock, 60, answer("429 Slow"))
    assert open_cache(storage_options={}).open("s3://lab/a.tar").read() == SHARD


@pytest.mark.parametrize("options", [{}, {"max_size": 1_000_000}])  # stored, and streamed
def test_an_upstream_that_throttles_holds_up_nothing(store, open_cache, serve, clock, options):
    def refused(head: str) -> bytes | None:
        if ".shardcache.json" in head:
            return answer("404 Not Found")
        return refusal("503 Slow Down", "SlowDown") if head.startswith("GET") else None

    mirror = serve(store_of(SHARD), most=1000)
    mirror.refuse = refused
    upstream = {"url": "s3://mirror", "endpoint_url": mirror.url, "storage_options": KEYS}
    cache = open_cache(upstreams=[upstream], **options)
    for name in "ab":
        assert cache.open(f"s3://lab/{name}.tar").read() == SHARD
    assert [head for head in mirror.heads if "GET /mirror/lab/a.tar " in head]
    pages = [refusal("503 Slow Down", "SlowDown")]
    store.refuse = lambda head: pages.pop() if pages else None  # this one has patience
    assert clock.elapsed == 0 and cache.open("s3://lab/c.tar").read() == SHARD


@pytest.mark.parametrize("retry_after", [None, 5.0, 3600.0])
def test_pauses_are_random_and_grow_beyond_retry_after(retry_after, monkeypatch):
    """Uniform between zero and a limit that doubles with every attempt, up to a cap."""
    monkeypatch.setattr(retry, "BASE", BASE)
    state, runs = random.getstate(), [list[float]() for _ in range(100)]
    for naps in runs:

        def fail() -> None:
            raise TransientError("503 SlowDown", retry_after=retry_after)

        with pytest.raises(TransferError, match="10 attempts failed"):
            RetryLimits(10, None, 0).started("s3://lab/a.tar").call(fail, sleep=naps.append)
    least = min(retry_after or 0, RETRY_AFTER_CAP)
    for number, spread in enumerate(zip(*runs, strict=True)):
        longest = min(CAP, BASE * 2**number)
        assert least <= min(spread) < least + longest / 5
        assert least + longest * 0.8 < max(spread) <= least + longest
    assert (number, longest) == (8, CAP)  # the cap was reached
    assert random.getstate() == state  # that of the user's program, which ranks seed alike
