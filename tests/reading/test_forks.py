"""Forks while a stream reads: the child follows the download, or continues independently."""

import threading

import pytest

from shardcache import Cache, TransferError
from tests.support.storetools import BLOCK, forked
from tests.support.tars import make_tar
from tests.support.webservers import Files, running

DATA = make_tar(1, members=3, size=BLOCK)


@pytest.fixture(params=["http", "https", "file", "upstream", "pipe", "download"])
def reached(request, tmp_path, monkeypatch, context, authority):
    """A kind of source, a cache, and the URL of a shard. Only one kind is stored."""
    with running(Files()) as plain, running(Files(), context) as tls:
        plain.files["/a.tar"] = tls.files["/a.tar"] = DATA
        path = tmp_path / "nas" / plain.url.removeprefix("http://") / "a.tar"
        path.parent.mkdir(parents=True)
        path.write_bytes(DATA)
        monkeypatch.setenv("SSL_CERT_FILE", authority[0])
        kinds = {
            "http": (f"{plain.url}/a.tar", {}),
            "https": (f"{tls.url}/a.tar", {}),
            "file": (str(path), {"cache_local": True}),
            "upstream": (f"{plain.url}/a.tar", {"upstreams": [tmp_path / "nas"]}),
            "pipe": (f"pipe:cat {path} | tail -c +1", {"allow_schemes": ["pipe"]}),
            "download": (f"{plain.url}/a.tar", {"min_free": 0}),
        }
        url, options = kinds[request.param]
        if request.param == "download":
            threading.Timer(0.3, plain.hold("/a.tar", 3 * BLOCK + 5).set).start()
        given = {"min_free": "1000TB", "attempts": 1, **options}
        yield request.param, Cache(tmp_path / "cache", **given), url


@pytest.mark.parametrize("order", ["parent first", "child first", "child closes"])
def test_parent_and_child_both_read_the_rest(reached, order):
    kind, cache, url = reached

    def work(parent):
        parent.hear()
        try:
            parent.say(stream.close() if order == "child closes" else stream.read())
        except TransferError as exn:
            parent.say(str(exn))

    with cache, cache.open(url) as stream:
        begin = stream.read(BLOCK + 5)
        with forked(work) as child:
            if order == "parent first":
                rest, heard = stream.read(), child.ask()
            else:
                heard, rest = child.ask(), stream.read()
    assert begin + rest == DATA
    assert kind != "download" or cache.stats().bytes_origin == len(DATA)
    if order == "child closes":
        assert heard is None
    elif kind == "pipe":  # a command cannot be continued
        assert "the process that opened it" in heard
    else:
        assert begin + heard == DATA
