"""A canary as credential: it is never logged, raised, shown, pickled or stored."""

import contextlib
import functools
import json
import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import webdataset as wds

from shardcache import Cache, ConfigError, IntegrityError, ShardCacheError, TarDataset
from shardcache.config import describe, load
from shardcache.wds import url_opener
from tests.support.clitools import command
from tests.support.tars import make_tar
from tests.support.webservers import answer, part_of

CANARY = "CaNaRyCaNaRy0123456789"
SHARD = make_tar(3)


class Watch:
    """Collects all text that a test can see."""

    def __init__(self, caplog, root):
        self.caplog, self.root = caplog, root
        self.seen, self.errors, self.failures = [], [], 0

    def cache(self, **options):
        return Cache(self.root, attempts=1, patience=0, **options)

    def read(self, cache, url):
        """Read a shard in three ways; collects results and errors."""
        self.show(cache, url)
        failures = len(self.errors)
        for read in (
            lambda: [sample["stream"] for sample in url_opener([{"url": url}], cache=cache)],
            lambda: self.stream(cache, url),
            lambda: cache.fetch(url),
        ):
            try:
                self.seen.append(repr(read()))
            except (ShardCacheError, OSError) as exn:
                self.errors.append(exn)
                logging.getLogger("shardcache.test").error("failed", exc_info=exn)
        self.failures += len(self.errors) > failures

    def stream(self, cache, url):
        with cache.open(url) as stream:
            self.seen += [str(stream.name), repr(stream)]
            stream.read()

    def show(self, cache, url):
        """Collect all objects that describe the cache or the shard, as text and as a pickle."""
        loaded = load({"dir": "/"}, {}, [])._replace(config=cache.config)
        things = [cache, loaded, describe(loaded), cache.config.storage_options]
        things.append(functools.partial(url_opener, cache=cache))
        with contextlib.suppress(ConfigError):
            things.append(cache.parse(url))
        pickled = pickle.dumps({"nested": [things]})
        self.seen += [repr(things), pickled.decode("latin-1"), repr(pickle.loads(pickled))]

    def disk(self):
        """Collect every path below the root, and the content of all files except shards."""
        for path in self.root.rglob("*"):
            self.seen.append(str(path))
            with contextlib.suppress(OSError):
                if path.is_file() and path.suffix != ".tar":
                    self.seen.append(path.read_bytes().decode("latin-1"))

    def command(self, *arguments):
        """Run the command line, and collect its output; returns the exit code."""
        code, text = command("--dir", self.root, *arguments)
        self.seen.append(text)
        return code

    def assert_clean(self):
        for exn in self.errors:
            self.seen += traceback.format_exception(exn)
            with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
                self.seen.append(pickle.dumps(exn).decode("latin-1"))
            while exn is not None:
                self.seen += [str(exn), repr(exn), repr(exn.args), repr(vars(exn))]
                exn = exn.__cause__ or exn.__context__
        for record in self.caplog.get_records("call"):
            # At DEBUG, botocore logs requests with their credentials, and fsspec URLs.
            is_foreign = record.name.startswith(("botocore", "urllib3", "fsspec"))
            if not is_foreign or record.levelno > logging.DEBUG:
                self.seen += [record.getMessage(), record.exc_text or "", repr(record.args)]
        self.disk()
        assert [text for text in self.seen if CANARY in text] == []


@pytest.fixture
def watch(caplog, tmp_path, monkeypatch):
    """Collect all visible text, and check it at the end of the test."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.DEBUG)
    watch = Watch(caplog, tmp_path / "cache")
    yield watch
    watch.assert_clean()


def whole(head, **headers):
    end = len(SHARD) - 1
    body = b"" if head.startswith("HEAD") else SHARD
    return answer("206 Partial", body, Content_Range=f"bytes 0-{end}/{end + 1}", **headers)


def echo(head):
    """Return the beginning of a request, as one line."""
    return " ".join(head.split())[:900]


ERROR = "<Error><Code>Odd</Code><Message>You sent {}</Message></Error>"
ANSWERS: dict[str, Callable[[str], bytes]] = {
    "whole": whole,
    "denied": lambda head: answer("403 Forbidden"),
    "missing": lambda head: answer("404 Not Found"),
    "busy": lambda head: answer("503 Slow Down"),
    "cut": lambda head: whole(head)[:-100],
    "no answer": lambda head: b"",
    "no shard": lambda head: answer("200 OK", f"{CANARY} is not valid".encode() * 99),
    "no head": lambda head: whole(head).replace(b"Connection", b"no colon\r\nConnection"),
    "circle": lambda head: answer("302 Found", Location=f"/b.tar?X-Amz-Signature={CANARY}"),
    "echoed version": lambda h: whole(h, ETag=f'"{echo(h)}"', Last_Modified=echo(h)),
    "echoed error": lambda head: answer(f"400 {echo(head)}", ERROR.format(echo(head)).encode()),
    "echoed trouble": lambda head: answer(f"503 {echo(head)}"),
    "echoed secret": lambda h: answer("200 OK", ETag=None, Content_Type=f"text/html;{CANARY}"),
    "echoed type": lambda head: answer("200 OK", ETag=None, Content_Type=f"text/html;{echo(head)}"),
    "elsewhere": lambda head: answer("302 Found", Location=f"http://u:{CANARY}@127.0.0.1:1/b.tar"),
}
#: A signed URL, a login, and a command; tests/test_urls.py has all kinds of signatures.
WEB = (
    "http://{place}/a.tar?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={canary}"
    "&X-Amz-Credential={canary}&X-Amz-Security-Token={canary}",
    "http://user:{canary}@{place}/a.tar?sig={canary}&se=2030&sp=r&sv=2024&skoid=x",
    "http://{canary}@{place}/a.tar?access_token={canary}&token={canary};{canary}#{canary}",
    "pipe:curl -sH 'Authorization: Bearer {canary}' http://{place}/a.tar",
)


@pytest.mark.parametrize(
    "url",
    [
        "pipe:touch ran; cat ran # {canary}",
        "shardcache::pipe:touch ran # {canary}",
        "shardcache://pipe://touch ran # {canary}",
        "filecache::pipe:touch ran # {canary}",
        "pipe:KEY='Bearer {canary}' cat /dev/null #",
        'pipe:KEY="a {canary}"; cat /dev/null',
        "pipe:KEY=$(echo {canary} -n) cat /dev/null",
        "pipe:cat /dev/null # -u me:{canary}",
        "pipe:cat /dev/null # -u me:{canary}\n",
        "pipe:cat /dev/null # -u me:{canary} {{0..1}}",
        "pipe:cat /dev/null # -u me:{canary} {{",
        'pipe:true curl -H "Authorization: Bearer {canary}"; exit 3',
        "pipe:true curl 'https://x.invalid/a?X-Amz-Signature={canary}'; exec >&-; sleep 9",
        'pipe:true curl -H "Authorization: Bearer {canary}"; head -c 10240 /dev/zero',
        "http://me:a/{canary}@host/a.tar",
        "http://me:{canary}/a@host/a.tar",
        "https:/me:{canary}@host/a.tar",
    ],
)
def test_secrets_in_unusual_places(watch, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = url.format(canary=CANARY)
    watch.read(watch.cache(), url)
    assert watch.command("path", "--fetch", url) and watch.command("prewarm", url)
    assert watch.failures and not (tmp_path / "ran").exists()  # a refused command does not run
    watch.read(watch.cache(allow_schemes=["pipe"], timeout=1), url)
    assert (tmp_path / "ran").exists() == ("pipe:touch ran" in url and "file" not in url)
    watch.command("ls")


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("url", WEB)
def test_signed_urls(watch, serve, url, answered):
    def answer(head):
        watch.disk()  # during the download: the partial, and the record in the lock
        return ANSWERS[answered](head)

    server = serve(answer)
    cache = watch.cache()
    place = server.url.removeprefix("http://")
    watch.read(cache, url.format(place=place, canary=CANARY))
    assert any("/locks/" in text for text in watch.seen)
    assert watch.failures == (answered not in ("whole", "echoed version"))
    assert any(CANARY in head for head in server.heads)


def test_data_sets(watch, serve):
    row = {"url": "a.tar", "nsamples": 99}

    def respond(head):
        index = answer("200 OK", json.dumps({"shardlist": [row]}).encode(), ETag='"1"')
        return index if "train.json" in head else whole(head)

    def fail(sample):
        raise ValueError("in a stage")

    url = serve(respond, most=20).url.replace("://", f"://me:{CANARY}@")
    indexed = TarDataset(f"{url}/train.json", cache=watch.cache())
    watch.seen.append(repr(vars(indexed) | {"cache": "", "shards": ""}))
    for data in indexed, TarDataset(f"{url}/a.tar", cache=watch.cache(), stages=[wds.map(fail)]):
        with pytest.raises((IntegrityError, ValueError)) as raised:
            data[0]
        watch.errors.append(raised.value)


def test_tokens_distinguish_shards_and_signatures_do_not(watch, serve):
    tokens = [f"token={CANARY}{number}" for number in range(2)]

    def answered(head):
        body = make_tar(int(tokens[1] in head))
        return b"".join(part_of(body, head)[: 1 if head.startswith("HEAD") else 2])

    server = serve(answered, most=100)
    urls = [f"{server.url}/a.tar?{token}" for token in tokens]
    place = server.url.removeprefix("http://")
    signed = [WEB[0].format(place=place, canary=f"{CANARY}{number}") for number in range(2)]
    with watch.cache() as cache:
        for number, url in [*enumerate(urls), *enumerate(urls), (0, signed[0]), (0, signed[1])]:
            assert cache.open(url).read() == make_tar(number)
        assert len([head for head in server.heads if head.startswith("GET")]) == 3
        # A masked URL names a shard, but cannot download it.
        one, other = (str(cache.parse(url)) for url in urls)
        assert watch.command("ls", one) == 0
        assert one in watch.seen[-1] and other not in watch.seen[-1]
        assert watch.command("prewarm", "--refresh", one) == 3
        assert "Pass the whole URL" in watch.seen[-1]
        assert watch.command("rm", "-y", one) == 0
        assert [url in cache for url in urls] == [False, True]
        requests = len(server.heads)
        for url in (one, pickle.loads(pickle.dumps(cache.parse(urls[0]))).raw):
            with pytest.raises(ConfigError, match="Pass the whole URL"):
                cache.open(url).read()
        assert watch.command("rm", "-y", f"{server.url}/*.tar") == 0
        assert urls[1] not in cache and len(server.heads) == requests


NAMES = ("access_key_id", "secret_access_key", "session_token")
STATED = [*(("options", answered) for answered in ANSWERS)]
STATED += [("profile", "whole"), ("profile", "denied")]


@pytest.mark.parametrize(("where", "answered"), STATED)
def test_s3_credentials(watch, serve, tmp_path, monkeypatch, answered, where):
    server = serve(ANSWERS[answered])
    endpoint = server.url.replace("://", f"://user:{CANARY}@")
    options: dict[str, Any] = {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    if where == "options":
        options |= {"key": CANARY, "secret": CANARY, "token": CANARY}
        options["client_kwargs"] = {"endpoint_url": endpoint}
    else:
        lines = [f"aws_{name}={CANARY}" for name in NAMES]
        lines = ["[profile p]", *lines, f"endpoint_url={endpoint}", ""]
        (tmp_path / "aws").write_text("\n".join(lines))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
        options["profile"] = "p"
    cache = watch.cache(storage_options=options)
    watch.read(cache, f"s3://{CANARY}:{CANARY}@lab/a.tar")
    assert watch.failures >= (answered not in ("whole", "echoed version"))
    assert server.heads


@pytest.mark.parametrize("proxied", ["http_proxy", "https_proxy"])
def test_a_proxy_with_a_login(watch, monkeypatch, proxied):
    monkeypatch.setenv(proxied, f"http://user:{CANARY}@127.0.0.1:1")
    scheme = proxied.removesuffix("_proxy")
    watch.read(watch.cache(), f"{scheme}://nowhere.invalid/a.tar?sig={CANARY}")
    options = {"key": "a", "secret": CANARY, "endpoint_url": f"{scheme}://nowhere.invalid"}
    options |= {"config_kwargs": {"proxies": {scheme: f"http://u:{CANARY}@127.0.0.1:1"}}}
    watch.read(watch.cache(storage_options=options), "s3://lab/a.tar")
    assert watch.failures == 2


@pytest.mark.parametrize("options", [(), ("--json",), ("-vv",)], ids=str)
def test_the_command_line(watch, serve, tmp_path, set_variables, options):
    served = serve(lambda head: whole(head) if "/a.tar" in head else answer("403 Forbidden"))
    place = served.url.removeprefix("http://")
    set_variables(SHARDCACHE_CONFIG=tmp_path / "x.toml")
    for text in (
        f"[storage_options]\nsecret = {CANARY}\n",
        f'[storage_options]\nsecret = "{CANARY}\n',
        f'[storage_options]\nsecret = "{CANARY}"\nsecret = "{CANARY}"\n',
        f'storage_options = ["{CANARY}"]\n',
    ):
        (tmp_path / "x.toml").write_text(text)
        assert watch.command(*options, "config") == 2
    (tmp_path / "x.toml").write_text(
        f'[storage_options]\nkey = "{CANARY}"\nsecret = "{CANARY}"\n'
        f'[storage_options.client_kwargs.headers]\nAuthorization = "{CANARY}"\n'
    )
    set_variables(SHARDCACHE_ATTEMPTS=1, SHARDCACHE_MIN_FREE=0, SHARDCACHE_ALLOW_SCHEMES="pipe")
    good = WEB[1].format(place=place, canary=CANARY)
    bad = good.replace("a.tar", "b.tar")
    pipe = f"pipe:curl -u me:{CANARY} http://127.0.0.1:1/c.tar?sig={CANARY}"
    (tmp_path / "list").write_text(f"{good}\n{bad}\n")
    for expected, *arguments in (
        (0, "config"),
        (3, "prewarm", good, bad),
        (3, "prewarm", "-f", str(tmp_path / "list")),
        (4, "prewarm", "--check", good, bad),
        (1, "path", "--fetch", bad),
        (1, "path", "--fetch", pipe),
        (2, "path", f"ssh://u:{CANARY}@h/a?sig={CANARY}"),
        (0, "ls", "--long"),
        (0, "verify"),
        (1, "rm", "-y", good, bad),
        (0, "clean", "--all", "-y"),
        (2, "index", "-o", str(tmp_path / "x.json"), f"{served.url}/a.tar?file=1"),
    ):
        assert watch.command(*options, *arguments) == expected, arguments
    assert "Pass the URLs to TarDataset" in watch.seen[-1] and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("source", ["service", "program"])
def test_what_a_source_of_credentials_says(watch, serve, tmp_path, set_variables, source):
    service = serve(lambda head: answer("403 Forbidden", head.encode()), most=1000)
    config, places = tmp_path / "config", {"AWS_EC2_METADATA_DISABLED": "true"}
    config.write_text("[default]\n")
    if source == "service":
        places["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{service.url}/a?x={CANARY}"
        places["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = CANARY
    else:
        config.write_text(f"[default]\ncredential_process = sh -c 'echo {CANARY} >&2; false'\n")
    set_variables(AWS_CONFIG_FILE=config, **places)
    watch.read(watch.cache(), "s3://lab/a.tar")
    assert [watch.command(name) for name in ("config", "doctor")] == [0, 0]
    assert watch.failures == 1


@pytest.mark.parametrize("method", ["info", "ls", "size", "ukey"])
@pytest.mark.parametrize(("answered", "error"), [("missing", OSError), ("denied", Exception)])
def test_the_filesystem(watch, serve, tmp_path, method, answered, error):
    server = serve(ANSWERS[answered], most=100)
    filesystem = fsspec.filesystem("shardcache", target_protocol="http", dir=tmp_path / "x")
    with pytest.raises(error) as caught:
        getattr(filesystem, method)(f"{server.url}/a.tar?token={CANARY}")
    watch.errors.append(caught.value)


@pytest.mark.parametrize("error", [OSError, ValueError, FileNotFoundError])
def test_filesystems_whose_errors_state_urls(watch, monkeypatch, error):
    def fail(*arguments, **options):
        raise error(f"404, url='https://account/a.tar?sig={CANARY}'")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", fail)
    watch.read(watch.cache(storage_options={"memory": {}}), "memory://lab/a.tar")
    assert watch.failures == 1


@pytest.mark.parametrize("allowed", [(), ("pipe",)], ids=str)
@pytest.mark.parametrize(
    "url",
    [
        "pipe:curl -s http://{place}/$MYTOKEN.tar",
        'pipe:curl -sk "http://{place}/a.tar?x=${{AWS_SECRET_ACCESS_KEY}}" | tail -c +1',
        "pipe:curl -s http://$DB_PASSWORD.{place}/a.tar",
        "pipe:aws --endpoint-url http://{place}/$MYTOKEN s3 cp s3://lab/a.tar -",
        "pipe:s5cmd --endpoint-url=http://{place} cat s3://lab/$AWS_SESSION_TOKEN",
        "pipe:aws s3 cp s3://lab/a.tar - --region $MYTOKEN | cat",
        "s3://lab/${{MYTOKEN}}.tar",
    ],
)
def test_a_list_cannot_put_a_credential_into_an_address(watch, serve, monkeypatch, url, allowed):
    for name in ("MYTOKEN", "WDS_MYTOKEN", "DB_PASSWORD", *(f"AWS_{n.upper()}" for n in NAMES)):
        monkeypatch.setenv(name, CANARY)
    server = serve(ANSWERS["missing"], most=100)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("SHARDCACHE_ALLOW_SCHEMES", ",".join(allowed) or "none")
    url = url.format(place=server.url.removeprefix("http://"))
    watch.read(watch.cache(), url)
    assert watch.command("prewarm", url) > 0
    watch.seen += [head.splitlines()[0] for head in server.heads]
    assert watch.failures == 1
