"""One canary through everything: no credential is logged, raised, shown, pickled or stored."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from shardcache import Cache, ShardCacheError
from shardcache.origins import Origins
from shardcache.wds import url_opener
from tests.conftest import make_tar
from tests.test_rangebody import Scripted, answer, serve  # noqa: F401 - a fixture

CANARY = "CaNaRyCaNaRy0123456789"
SHARD = make_tar(3)
Serve = Callable[[bytes | Callable[[str], bytes]], Scripted]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Watch:
    """Everything that a run lets be seen."""

    def __init__(self, caplog: pytest.LogCaptureFixture, root: Path) -> None:
        self.caplog = caplog
        self.root = root
        self.seen: list[str] = []
        self.failures = 0

    def read(self, cache: Cache, url: str) -> None:
        """Open and read a shard; what it raises is looked at from all sides."""
        self.show(cache)
        try:
            list(url_opener([{"url": url}], cache=cache))
            with cache.open(url) as stream:
                self.seen.append(str(stream.name))
                stream.read()
        except ShardCacheError as exn:
            self.failures += 1
            self.seen += [str(exn), repr(exn), repr(exn.args), repr(vars(exn))]
            self.seen += traceback.format_exception(exn)
            self.seen.append(pickle.dumps(exn).decode("latin-1"))
            logging.getLogger("shardcache.test").error("failed", exc_info=exn)

    def show(self, cache: Cache) -> None:
        self.seen += [repr(cache), repr(cache.config), str(cache.sources)]
        if "@" not in (cache.config.endpoint_url or ""):
            self.seen.append(pickle.dumps(cache).decode("latin-1"))

    def assert_clean(self) -> None:
        for record in self.caplog.records:
            # At DEBUG, botocore and urllib3 show requests as they are sent; theirs to change.
            if record.name.startswith("shardcache") or record.levelno > logging.DEBUG:
                self.seen += [record.getMessage(), record.exc_text or ""]
        for path in self.root.rglob("*"):
            self.seen.append(str(path))
            if path.is_file() and path.suffix != ".tar":
                self.seen.append(path.read_bytes().decode("latin-1"))
        assert [text for text in self.seen if CANARY in text] == []


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Watch:
    caplog.set_level(logging.DEBUG)
    return Watch(caplog, tmp_path / "cache")


def whole(head: str) -> bytes:
    end = len(SHARD) - 1
    body = b"" if head.startswith("HEAD") else SHARD
    return answer("206 Partial", body, Content_Range=f"bytes 0-{end}/{end + 1}")


ANSWERS: dict[str, Callable[[str], bytes]] = {
    "whole": whole,
    "denied": lambda head: answer("403 Forbidden"),
    "missing": lambda head: answer("404 Not Found"),
    "refused": lambda head: answer("400 Bad Request"),
    "busy": lambda head: answer("503 Slow Down"),
    "cut": lambda head: whole(head)[:-100],
    "no answer": lambda head: b"",
    "no shard": lambda head: answer("200 OK", b"<html>" * 200),
    "circle": lambda head: answer("302 Found", Location=f"/b.tar?X-Amz-Signature={CANARY}"),
    "elsewhere": lambda head: answer(
        "302 Found", Location=f"http://u:{CANARY}@127.0.0.1:1/b.tar?sig={CANARY}"
    ),
}
WEB = (
    "http://{place}/a.tar?X-Amz-Signature={canary}&X-Amz-Credential={canary}",
    "http://user:{canary}@{place}/a.tar?sig={canary}&se=2030",
)


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("url", WEB)
def test_signed_urls(watch: Watch, serve: Serve, url: str, answered: str) -> None:  # noqa: F811
    server = serve(ANSWERS[answered])
    cache = Cache(watch.root, min_free=0, attempts=1)
    place = server.url.removeprefix("http://")
    watch.read(cache, url.format(place=place, canary=CANARY))
    assert watch.failures == (answered != "whole")
    assert server.heads
    watch.assert_clean()


@pytest.mark.parametrize("answered", ANSWERS)
def test_s3_options_and_endpoints(watch: Watch, serve: Serve, answered: str) -> None:  # noqa: F811
    server = serve(ANSWERS[answered])
    options = {
        "key": CANARY,
        "secret": CANARY,
        "token": CANARY,
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    endpoint = server.url.replace("://", f"://user:{CANARY}@")
    for extra in ({"endpoint_url": server.url}, {"endpoint_url": endpoint}):
        cache = Cache(watch.root, min_free=0, attempts=1, storage_options=options, **extra)
        watch.read(cache, f"s3://lab/{len(extra['endpoint_url'])}.tar")
    assert watch.failures >= (answered != "whole")
    watch.assert_clean()


@pytest.mark.parametrize("url", WEB)
def test_a_refused_connection_and_a_name_that_is_none(watch: Watch, url: str) -> None:
    cache = Cache(watch.root, min_free=0, attempts=2, timeout=1)
    for place in ("127.0.0.1:1", "nowhere.invalid"):
        watch.read(cache, url.format(place=place, canary=CANARY))
    assert watch.failures == 2
    watch.assert_clean()


@pytest.mark.parametrize("error", [OSError, ValueError, FileNotFoundError, PermissionError])
def test_filesystems_that_name_whole_urls(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error(f"404, url='https://account/a.tar?sig={CANARY}'")

    memory = fsspec.get_filesystem_class("memory")
    monkeypatch.setattr(memory, "info", fail)
    cache = Cache(watch.root, min_free=0, attempts=1, storage_options={"memory": {}})
    watch.read(cache, "memory://lab/a.tar")
    assert watch.failures == 1
    watch.assert_clean()


@pytest.mark.parametrize(
    "secret",
    [f'-H "Authorization: Bearer {CANARY}"', f"'https://x.invalid/a?X-Amz-Signature={CANARY}'"],
)
@pytest.mark.parametrize("end", ["cat {shard}", "exit 3", "exec >&-; sleep 9"])
def test_commands(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, end: str
) -> None:
    monkeypatch.setattr("shardcache.pipes._END_SECONDS", 0.1)
    (tmp_path / "a.bin").write_bytes(SHARD)
    cache = Cache(watch.root, min_free=0, attempts=1, allow_schemes=["pipe"])
    watch.read(cache, f"pipe:: curl {secret}; {end.format(shard=tmp_path / 'a.bin')}")
    assert watch.failures == (not end.startswith("cat"))
    watch.assert_clean()


def test_a_full_disk_and_a_waiting_reader(
    watch: Watch,
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve(whole)
    url = f"{server.url}/a.tar?X-Amz-Signature={CANARY}"
    cache = Cache(watch.root, min_free=0, attempts=1, lock_timeout=0, max_size=10)
    watch.read(cache, url)  # streamed: no room

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shardcache.partials.Partial.write", full)
    watch.read(Cache(watch.root, min_free=0, attempts=1), url)
    assert "is streamed, not cached" in watch.caplog.text
    watch.assert_clean()


def test_origins_do_not_show_their_options() -> None:
    cache = Cache("/nowhere", storage_options={"secret": CANARY, "gs": {"token": CANARY}})
    origins = Origins(cache.config)
    for url in ("s3://lab/a.tar", "gs://lab/a.tar"):
        shard = cache.parse(url)
        assert CANARY not in f"{origins.of(shard)!r} {shard!r}"
