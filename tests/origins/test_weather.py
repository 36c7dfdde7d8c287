"""A store that is not well: it throttles, refuses a header, or has another time."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from shardcache import AccessDeniedError, Cache, TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.pace import Pace
from tests.support.fakes import FakeClock
from tests.support.storetools import Parent, forked
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, part_of

SHARD = make_tar(1, members=40, size=100_000)
KEYS = {"key": "AK", "secret": "SK"}


def refusal(status: str, code: str, **headers: object) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code></Error>".encode(), **headers)


class Store:
    """Serves one shard in parts, except while ``refuse`` returns another answer."""

    def __init__(self, serve: Callable[..., Scripted]) -> None:
        self.refuse: Callable[[str], bytes | None] = lambda head: None
        self.server = serve(self.answer, most=1000)

    def answer(self, head: str) -> bytes:
        if (refused := self.refuse(head)) is not None:
            return refused
        stated, body = part_of(SHARD, head, ETag='"v1"')
        return stated if head.startswith("HEAD") else stated + body

    @property
    def requests(self) -> int:
        return len(self.server.heads)


@pytest.fixture
def store(serve: Callable[..., Scripted]) -> Store:
    return Store(serve)


@pytest.fixture
def open_cache(store: Store, tmp_path, clock: FakeClock) -> Iterator[Callable[..., Cache]]:
    caches = []

    def make(**options: object) -> Cache:
        given = {"endpoint_url": store.server.url, "storage_options": KEYS, "attempts": 2}
        caches.append(Cache(tmp_path / str(len(caches)), min_free=0, **{**given, **options}))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def until(clock: FakeClock, seconds: float, refused: bytes) -> Callable[[str], bytes | None]:
    end = clock.monotonic() + seconds
    return lambda head: refused if clock.monotonic() < end else None


@pytest.mark.parametrize(
    "refused",
    [
        refusal("503 Slow Down", "SlowDown"),
        refusal("503 Service Unavailable", ""),
        refusal("429 Too Many Requests", ""),
        refusal("400 Bad Request", "ThrottlingException"),
        refusal("400 Bad Request", "RequestLimitExceeded"),
        refusal("400 Bad Request", "SlowDown"),
    ],
    ids=lambda refused: refused.split(b"</")[0].decode()[9:].replace("\r\n", " ")[:12],
)
def test_throttling_is_waited_out(store, open_cache, clock, caplog, refused):
    store.refuse = until(clock, 180, refused)
    assert open_cache().open("s3://lab/a.tar").read() == SHARD
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert 3 <= len(warnings) <= 4 and all("s3://lab is not ready" in said for said in warnings)
    assert "requests wait for up to 5m" in warnings[0] and "2m" in warnings[-1]
    assert clock.elapsed < 180 + 10  # lost after the end
    assert store.requests < 60


def test_patience_has_an_end(store, open_cache, clock):
    store.refuse = lambda head: refusal("503 Slow Down", "SlowDown")
    with pytest.raises(TransferError, match="SlowDown.*for 1m, the patience"):
        open_cache(patience=60).open("s3://lab/a.tar")
    assert 60 <= clock.elapsed < 70
    requests = store.requests
    with pytest.raises(TransferError, match="2 attempts failed"):
        open_cache(patience=0).open("s3://lab/a.tar")
    assert store.requests == requests + 2


def test_a_storm_costs_fewer_requests_than_calm_weather(store, open_cache, clock):
    """Many shards at once, in parts: one request probes, and the others wait for it."""
    options = {"part_size": "1MiB", "connections": 32}
    urls = [f"s3://lab/{number}.tar" for number in range(12)]
    assert open_cache(**options).prewarm(urls).fetched == 12
    calm = store.requests
    storm = clock.monotonic() + 60
    refused = []

    def refuse(head: str) -> bytes | None:
        if clock.monotonic() >= storm:
            return None
        refused.append(head)
        return refusal("503 Slow Down", "SlowDown")

    store.refuse = refuse
    assert open_cache(**options).prewarm(urls).fetched == 12
    assert len(refused) < calm
    assert store.requests <= 2 * calm + len(refused) + 5  # no more after it than without it


@pytest.mark.parametrize(
    "refused",
    [
        refusal("501 Not Implemented", "NotImplemented"),
        refusal("400 Bad Request", "InvalidArgument"),
        answer("400 Bad Request"),
    ],
)
def test_a_store_that_does_not_know_checksums_is_asked_for_them_once(store, open_cache, refused):
    store.refuse = lambda head: refused if "x-amz-checksum-mode" in head.lower() else None
    cache = open_cache()
    for number in range(4):
        assert cache.open(f"s3://lab/{number}.tar").read() == SHARD
    asked = [head for head in store.server.heads if "x-amz-checksum-mode" in head.lower()]
    assert len(asked) == 1


def test_a_clock_that_is_off_is_corrected_by_the_store(store, open_cache, caplog):
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
    said = [r.getMessage() for r in caplog.records if "clock" in r.getMessage()]
    assert len(said) == 1 and re.search("clock is (40m|39m 5.s) off", said[0])
    now += timedelta(days=1)  # then nothing helps
    store.refuse = lambda head: refusal("403 Forbidden", "RequestTimeTooSkewed")
    with pytest.raises(AccessDeniedError, match="clock is off; synchronise"):
        open_cache().open("s3://lab/a.tar")


# -- credentials -----------------------------------------------------------------------------------


class Metadata:
    """The metadata service of EC2; ``refuse`` may answer in its place."""

    def __init__(self, serve: Callable[..., Scripted]) -> None:
        self.refuse: Callable[[str], bytes | None] = lambda head: None
        self.server = serve(self.answer, most=1000)

    def answer(self, head: str) -> bytes:
        if (refused := self.refuse(head)) is not None:
            return refused
        if head.startswith("PUT"):
            return answer("200 OK", b"token")
        if head.split()[1].endswith("/security-credentials/"):
            return answer("200 OK", b"role")
        keys = {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Token": "T", "Code": "Success"}
        keys["Expiration"] = "2099-01-01T00:00:00Z"
        return answer("200 OK", json.dumps(keys).encode())


@pytest.fixture
def metadata(serve, monkeypatch) -> Metadata:
    service = Metadata(serve)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.server.url)
    return service


@pytest.mark.parametrize("status", ["429 Too Many Requests", "500 Oh"])
def test_a_metadata_service_that_throttles_is_waited_for(
    store, open_cache, metadata, clock, status
):
    metadata.refuse = until(clock, 60, answer(status))
    cache = open_cache(storage_options={})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    assert 55 < clock.elapsed < 75
    requests = len(metadata.server.heads)
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert len(metadata.server.heads) == requests


def test_a_metadata_service_that_accepts_connections_but_answers_late_is_waited_for(
    store, open_cache, metadata, clock, monkeypatch
):
    monkeypatch.setattr("shardcache.origins.credentials._TIMEOUT", 0.2)
    ended = threading.Event()

    def stall(head: str) -> bytes | None:
        if clock.elapsed < 3:
            ended.wait(30)
        return None

    metadata.refuse = stall
    try:
        assert open_cache(storage_options={}).open("s3://lab/a.tar").read() == SHARD
    finally:
        ended.set()


def test_a_machine_without_a_role_has_no_credentials_at_once(store, open_cache, metadata, clock):
    metadata.refuse = lambda head: None if head.startswith("PUT") else answer("404 Not Found")
    cache = open_cache(storage_options={})
    with pytest.raises(AccessDeniedError, match="Log in"):
        cache.open("s3://lab/a.tar")
    assert clock.elapsed < 1
    metadata.refuse = lambda head: None  # and that is not remembered
    assert cache.open("s3://lab/a.tar").read() == SHARD


def read_in_child(parent: Parent, cache: Cache) -> None:
    parent.say(cache.open("s3://lab/b.tar").read() == SHARD)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_forked_child_uses_its_parents_credentials_while_they_are_fresh(
    store, open_cache, metadata, monkeypatch, is_fresh
):
    if not is_fresh:
        monkeypatch.setattr("shardcache.origins.s3._RENEWED_BEFORE", 200 * 365 * 86400)
    cache = open_cache(storage_options={})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    requests = len(metadata.server.heads)
    with forked(read_in_child, cache) as child:
        assert child.hear()
    assert (len(metadata.server.heads) == requests) == is_fresh


@pytest.mark.parametrize("failing", [4, 0])
def test_the_service_of_a_container_is_waited_for(
    store, open_cache, serve, monkeypatch, clock, failing
):
    keys = {"AccessKeyId": "AK", "SecretAccessKey": "SK", "Expiration": "2099-01-01T00:00:00Z"}
    body, refused = json.dumps({**keys, "Token": "T"}).encode(), []

    def vend(head: str) -> bytes:
        refused.append(head)
        return answer("429 Slow") if len(refused) <= failing else answer("200 OK", body)

    url = serve(vend, most=100).url
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
    assert open_cache(storage_options={}).open("s3://lab/a.tar").read() == SHARD
    assert len(refused) == failing + 1


def test_a_login_that_ends_in_the_middle_of_a_run_is_waited_for(
    store, open_cache, clock, tmp_path, monkeypatch, caplog
):
    """A new session in the file is found without a restart."""
    file = tmp_path / "credentials"
    text = "[lab]\naws_access_key_id = AK\naws_secret_access_key = SK\naws_session_token = {}\n"
    file.write_text(text.format("old"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    cache = open_cache(storage_options={"profile": "lab"})
    assert cache.open("s3://lab/a.tar").read() == SHARD

    def expired(head: str) -> bytes | None:
        if clock.elapsed > 100:
            file.write_text(text.format("new"))
        old = "x-amz-security-token: old" in head
        return refusal("400 Bad Request", "ExpiredToken") if old else None

    store.refuse = expired
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert 100 < clock.elapsed < 115
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "aws sso login --profile lab" in said[0] and len(said) <= 3
    requests = store.requests
    store.refuse = lambda head: refusal("400 Bad Request", "ExpiredToken")
    monkeypatch.setattr("shardcache.origins.s3._stores", {})  # of a process that begins
    with pytest.raises(AccessDeniedError, match="log in again"):
        open_cache(storage_options={"profile": "lab"}).open("s3://lab/c.tar")
    assert store.requests == requests + 1


def test_throttling_behind_s3fs_is_waited_for_in_one_layer(store, open_cache, clock):
    refused = [refusal("503 Slow Down", "SlowDown")]
    store.refuse = lambda head: refused.pop() if refused and head.startswith("GET") else None
    owner = {"s3_additional_kwargs": {"ExpectedBucketOwner": "123456789012"}}
    cache = open_cache(storage_options={**KEYS, **owner})
    assert cache.open("s3://b/a.tar").read() == SHARD
    assert "\r\nx-amz-expected-bucket-owner: 123456789012\r\n" in store.server.heads[-1].lower()
    assert clock.naps


STS_KEYS = b"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>AK</AccessKeyId><SecretAccessKey>SK</SecretAccessKey><SessionToken>T</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


def sts_error(status: str, code: str) -> bytes:
    return answer(
        status, f"<ErrorResponse><Error><Code>{code}</Code></Error></ErrorResponse>".encode()
    )


@pytest.fixture
def web_identity(serve, monkeypatch, tmp_path) -> Metadata:
    """STS, which gives credentials for the token of a pod; ``refuse`` may answer in its place."""
    (tmp_path / "token").write_text("token")
    sts = Metadata(serve)
    sts.server.answer = lambda head: sts.refuse(head) or answer("200 OK", STS_KEYS)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.server.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own retries wait in real time
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/lab")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    return sts


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("503 Service Unavailable", "ServiceUnavailable"),
        ("429 Too Many Requests", "TooManyRequests"),
        ("400 Bad Request", "Throttling"),
        ("400 Bad Request", "IDPCommunicationError"),
    ],
)
def test_sts_is_waited_for(store, open_cache, web_identity, clock, status, code):
    web_identity.refuse = until(clock, 60, sts_error(status, code))
    assert open_cache(storage_options={}).open("s3://lab/a.tar").read() == SHARD
    assert 55 < clock.elapsed < 75
    assert len(web_identity.server.heads) < 30


def test_a_role_that_sts_does_not_give_is_refused_at_once(store, open_cache, web_identity, clock):
    web_identity.refuse = lambda head: sts_error("403 Forbidden", "AccessDenied")
    with pytest.raises(AccessDeniedError, match="AccessDenied"):
        open_cache(storage_options={}).open("s3://lab/a.tar")
    assert clock.elapsed < 1


SSO = {
    "legacy": "[profile lab]\nsso_start_url = https://start\nsso_region = us-east-1\n",
    "session": "[sso-session on]\nsso_start_url = https://start\nsso_region = us-east-1\n"
    "[profile lab]\nsso_session = on\n",
}


@pytest.mark.parametrize("end", ["expires", "is revoked"])
@pytest.mark.parametrize("kind", SSO)
def test_an_sso_login_that_ends_in_the_middle_of_a_run_is_waited_for(
    store, open_cache, serve, clock, tmp_path, monkeypatch, caplog, kind, end
):
    name = hashlib.sha1({"legacy": b"https://start", "session": b"on"}[kind]).hexdigest()
    revoked = set()

    def log_in(token: str, year: int = 2099) -> None:
        login = {"accessToken": token, "expiresAt": f"{year}-01-01T00:00:00Z"}
        (tmp_path / f"{name}.json").write_text(json.dumps(login))

    def portal(head: str) -> bytes:
        if re.search("x-amz-sso_bearer_token: (.*)\r", head)[1] in revoked:
            return answer("401 Unauthorized", b"{}", x_amzn_ErrorType="UnauthorizedException")
        soon = (datetime.now(UTC).timestamp() + 60) * 1000  # so every request asks for new ones
        keys = {"accessKeyId": "AK", "secretAccessKey": "SK", "sessionToken": "T"}
        return answer(
            "200 OK", json.dumps({"roleCredentials": {**keys, "expiration": soon}}).encode()
        )

    for provider in ("credentials.SSOProvider", "tokens.SSOTokenProvider"):
        monkeypatch.setattr(f"botocore.{provider}._SSO_TOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", serve(portal, most=100).url)
    config = tmp_path / "config"
    config.write_text(f"{SSO[kind]}sso_role_name = lab\nsso_account_id = 123456789012\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    log_in("old")
    cache = open_cache(storage_options={"profile": "lab"})
    assert cache.open("s3://lab/a.tar").read() == SHARD
    revoked.add("old")
    log_in("old", 2099 if end == "is revoked" else 2001)
    clock.on_sleep.append(lambda: log_in("new") if clock.elapsed > 100 else None)
    assert cache.open("s3://lab/b.tar").read() == SHARD
    assert 100 < clock.elapsed < 115
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("shardcache")]
    assert any("aws sso login --profile lab" in warning for warning in warnings)


def test_patience_lasts_while_the_store_answers_some_requests(clock):
    pace = Pace("s3://lab", 60)
    # Four at once, so that one answer after each refusal does not end the throttling.
    for _ in range(100):
        turns = [pace.turn(clock.sleep) for _ in range(4 if clock.elapsed == 0 else 1)]
        for turn in turns:
            turn.__enter__()
        for turn in turns:
            refused = TransientError("503 SlowDown", patient=True)
            assert not turn.__exit__(TransientError, refused, None)
        clock.sleep(10)
        with pace.turn(clock.sleep):
            pass
        assert not pace.is_over
