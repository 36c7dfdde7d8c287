"""Options: precedence of sources, refused values, and hidden secrets."""

import inspect
import os
import pickle
import re
import traceback
from copy import deepcopy
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import s3fs

from shardcache.cache import Cache
from shardcache.config import S3_OPTIONS, Config, Options, TierOption, Upstream, describe, load
from shardcache.errors import REMOVED, ConfigError
from shardcache.units import Limit

DIR = Path("/local/nvme/shards")
SECRET = "hUnTeR2/s@cret"


def only(environ=None, **explicit):
    """Load arguments and environment, but no file of this machine."""
    return load({"dir": DIR, **explicit}, environ or {}, files=[])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home directory; the working directory is below it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


# A valid text, its value, and an invalid text.
CASES: dict[str, tuple[str, object, str]] = {
    "dir": ("/tmp/x", Path("/tmp/x"), "s3://bucket/x"),
    "max_size": ("80%", Limit(percent=80), "0"),
    "min_free": ("10GB", Limit(bytes=10**10), "none"),
    "ephemeral_limit": ("50GB", 50 * 10**9, "0"),
    "max_age": ("14d", 1_209_600.0, "0"),
    "tiers": (" /ram = 5GB ", (TierOption(Path("/ram"), Limit(bytes=5 * 10**9)),), "s3://b/x"),
    "policy": ("LRU", "lru", "newest"),
    "isolation": ("Rank", "rank", "gpu"),
    "fill": ("Complete", "complete", "later"),
    "prefetch": ("0", 0, "-1"),
    "connections": ("32", 32, "257"),
    "part_size": ("8MiB", 8 << 20, "8MB"),
    "attempts": ("1", 1, "0"),
    "deadline": ("5m", 300.0, "soon"),
    "timeout": ("10", 10.0, "0"),
    "lock_timeout": ("0", 0.0, "-1"),
    "stale_after": ("90s", 90.0, "0s"),
    "strict": ("yes", True, "maybe"),
    "fsync": ("none", "none", "sometimes"),
    "locks": ("Lease", "lease", "nfs"),
    "allow_schemes": ("pipe, FTP", ("ftp", "pipe"), "pi/pe"),
    "upstreams": ("/nas", (Upstream("/nas"),), "no scheme://x"),
    "cache_local": ("on", True, "2"),
    "endpoint_url": ("http://minio:9000", "http://minio:9000", "minio:9000"),
    "shared_group": ("root", 0, "no such group"),
}


@pytest.mark.parametrize("name", CASES)
def test_options_are_parsed_alike_from_every_source(name, home):
    text, value, bad = CASES[name]
    variable, file = f"SHARDCACHE_{name.upper()}", home / "x.toml"
    base: dict[str, object] = {} if name == "dir" else {"dir": DIR}
    for source, given in {
        "argument": lambda content: load({**base, name: content}, {}, []),
        f"environment {variable}": lambda content: load(base, {variable: content}, []),
        f"file {file}": lambda content: load(base, {}, [file]),
    }.items():
        file.write_text(f'{name} = "{text}"\n')
        loaded = given(text)
        found = getattr(loaded.config, name)
        assert (found, type(found), loaded.sources[name]) == (value, type(value), source)
        file.write_text(f'{name} = "{bad}"\n')
        with pytest.raises(ConfigError, match=rf"^{name} \({re.escape(source)}\): ") as caught:
            given(bad)
        assert bad in str(caught.value) and "Accepted: " in str(caught.value)


def test_the_first_source_wins(home):
    user = home / ".config" / "shardcache" / "config.toml"
    user.parent.mkdir(parents=True)
    (home / "stated.toml").write_text('dir = "/stated"\nattempts = 2\n')
    Path("shardcache.toml").write_text('dir = "/local"\nattempts = 2\n')
    user.write_text('dir = "/user"\nattempts = 3\nconnections = 4\n')
    sources = {
        f"file {home}/here/shardcache.toml": {},
        f"file {home}/stated.toml": {"SHARDCACHE_CONFIG": str(home / "stated.toml")},
        "environment SHARDCACHE_DIR": {"SHARDCACHE_DIR": "/env"},
        "argument": {},
    }
    environ = {"HOME": str(home), "WDS_CACHE": "/wds", "WDS_CACHE_SIZE": "3e9"}
    for source, variables in sources.items():
        environ |= variables
        config, found = load({"dir": "/arg"} if source == "argument" else {}, environ)
        assert found["dir"] == source
        usual = 32 if "SHARDCACHE_CONFIG" in environ else 4  # a named file replaces the usual ones
        assert (config.attempts, config.connections, str(config.max_size)) == (2, usual, "3GB")
    assert found["attempts"] == f"file {home}/stated.toml"
    assert (found["max_size"], found["fill"]) == ("environment WDS_CACHE_SIZE", "default")
    more = {"SHARDCACHE_MAX_SIZE": "None", "SHARDCACHE_ATTEMPTS": " "}  # cleared, and ignored
    config, _ = load({}, {**environ, **more, "XDG_CONFIG_HOME": str(home / "absent")})
    assert (config.max_size, config.attempts, config.connections) == (None, 2, 32)


def test_the_default_directory(monkeypatch, caplog):
    caplog.set_level("INFO", "shardcache")
    monkeypatch.delenv("SHARDCACHE_DIR")
    directory = Cache().dir
    assert f"caching in {directory}; set SHARDCACHE_DIR" in caplog.text
    monkeypatch.setenv("HOME", "/home/me")
    for caches, parent in ("/scratch/me", "/scratch/me"), ("relative", "/home/me/.cache"):
        config, sources = load({"dir": None}, {"XDG_CACHE_HOME": caches}, [])
        assert (config.dir, sources["dir"]) == (Path(parent) / "shardcache", "default")


def test_files_have_tables_and_sizes_with_units(home):
    file = home / "x.toml"
    for line in "max_size = 800", 'tiers = [{dir = "/ram", max_size = 800}]', 'tiers = "/ram=800"':
        file.write_text(f"timeout = 1.5\nattempts = 2\n{line}\n")
        with pytest.raises(ConfigError, match=r"800 has no unit\. Write 800GB\.$"):
            load({"dir": DIR}, {}, [file])
    for content in b"attempts = \n", b"\xff":
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.toml is not valid TOML: "):
            load({"dir": DIR}, {}, [file])
    assert str(only({"WDS_CACHE_SIZE": "800"}).config.max_size) == "800B"  # as in WebDataset
    assert only({"WDS_CACHE_SIZE": "-1"}).config.max_size is None
    file.write_text('[storage_options]\nkey = "k"\nanon = true\n')
    assert dict(load({"dir": DIR}, {}, [file]).config.storage_options) == {"key": "k", "anon": True}
    config = Config(DIR, storage_options={"gcs": {"token": "anon"}})
    assert config.scheme_options("gs") == {"token": "anon"}


def test_all_options_of_s3fs_are_known():
    known = inspect.signature(s3fs.S3FileSystem.__init__).parameters
    assert {*known} - {"self", "kwargs"} <= S3_OPTIONS


DIR_IS = r"^dir \(argument\): .*"
TIERS = [
    *(5, [5, 6], [{}], [{"dir": "/ram", "size": 5}], ["/ram=much"], ["=5GB"], ["/ram=0"]),
    *(str(DIR), str(DIR.parent), f"{DIR}/ram", "/ram,/ram", ["s3://b/x"]),
    *(f"{DIR}/../shards", f"/proc/self/root{DIR}"),  # the latter is a symbolic link
]
#: Options that are refused, and a part of the message.
REFUSED: list[tuple[dict[str, object], str]] = [
    *(({"tiers": tiers}, "tiers") for tiers in (*TIERS, '["/ram', '{"dir": 1}', "[1]")),
    ({"tiers": "/ram:10MB"}, r"tiers: write /ram=10MB in place of /ram:10MB\."),
    ({"tiers": TIERS[3]}, r"\(a table has the keys dir, max_size, min_free\)"),
    ({"dir": "${EMPTY}/x"}, f"{DIR_IS}EMPTY, which is not set"),
    ({"dir": "~no-such-user/x"}, f"{DIR_IS}is in an unknown home directory"),
    ({"dir": "s3://bucket/x"}, f"{DIR_IS}is a URL"),
    ({"dir": "a\0b"}, f"{DIR_IS}is not a path"),
    ({"dir": 7}, f"{DIR_IS}is not a path"),
    ({"dir": None}, r"^dir \(default\): .* home directory: .*SHARDCACHE_DIR, --dir"),
    ({"dir": f"s3://me:{SECRET}@bucket/x"}, "dir"),
    ({"endpoint_url": f"me:{SECRET}@minio:9000"}, "endpoint_url"),
    ({"endpoint_url": f"ftp://me:{SECRET}@minio"}, "endpoint_url"),
    ({"endpoint_url": f"http://minio/?token={SECRET.replace('@', '')}"}, "endpoint_url"),
    ({"endpoint_url": {"url": SECRET}}, "endpoint_url"),
    ({"storage_options": SECRET}, "TOML table"),
    ({"storage_options": {1: SECRET}}, "TOML table"),
    ({"storage_options": {"annon": True}}, r"no option 'annon' for S3\. Did you mean anon\?"),
    ({"storage_options": {"aws_access_key_id": SECRET}}, r"for S3\. Did you mean key\?"),
    ({"storage_options": {"s3": {}, "key": SECRET}}, r"'key' for S3\. Put it into the table s3\."),
    ({"upstreams": [{"url": "s3://b", "storage_options": {"endpoint": "x"}}]}, "mean endpoint_url"),
    ({"validate": "x"}, "function of a path"),
    ({"upstreams": [{"url": "/nas", SECRET: "x"}]}, "upstreams"),
    ({"upstreams": f"s3://me:{SECRET}@bucket"}, "upstreams"),
    ({"upstreams": f'[{{"url": "/nas", "x": "{SECRET.replace("@", "")}"}}]'}, "upstreams"),
    ({"cache_dir": "/x"}, r"'cache_dir' \(argument\). Did you mean dir\?"),
    ({"max_sise": "1GB"}, r"'max_sise' \(argument\). Did you mean max_size\?"),
    ({"policy": "fifo"}, r"policy \(argument\): fifo was removed. Use lru"),
    *(
        ({name: "1"}, re.escape(REMOVED[f"option {name}"]))
        for name in ("protect_for", "stats", "touch_interval")
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_an_invalid_option_is_explained_without_secrets(given, message, set_variables):
    set_variables(EMPTY="", HOME="~")  # the user has no home directory
    with pytest.raises(ConfigError, match=message) as caught:
        only(**given)
    assert "hUnTeR2" not in "".join(traceback.format_exception(caught.value))


def test_variables_of_a_kubernetes_service_are_ignored():
    for name in ("SERVICE_HOST", "PORT_80_TCP_ADDR", "METRICS_PORT_53_UDP_PROTO"):
        assert only({f"SHARDCACHE_{name}": "tcp://10.0.0.1:80"}).config == Config(DIR)


def test_dir_expands_variables_and_is_relative_to_its_source(home, set_variables):
    set_variables(HOME="/home/me", SCRATCH="/scratch", USER="me")
    (home / "x.toml").write_text('dir = "cache"\n')
    for text, found in {
        "~": "/home/me",
        "$SCRATCH/${USER}/x": "/scratch/me/x",
        "~root/x": os.path.expanduser("~root/x"),
        "cache": str(home / "here" / "cache"),
    }.items():
        for given in text, Path(text):
            assert str(load({"dir": given}, {}, []).config.dir) == found
    assert load({}, {}, [home / "x.toml"]).config.dir == home / "cache"


def test_relative_paths_need_a_working_directory(home, run):
    (home / "here").rmdir()
    advice = "relative to the working directory, which was removed. Give an absolute path"
    for given in {"dir": "cache"}, {"dir": DIR, "tiers": "ram"}, {"dir": DIR, "upstreams": "nas"}:
        with pytest.raises(ConfigError, match=advice):
            Cache(**given)
    with pytest.raises(ConfigError, match=advice):
        Cache(DIR).parse("a.tar")
    for options in "--dir cache", "--config x.toml":
        for command in "ls", "run --env", "prewarm --ray s3://b/x":
            code, out, err = run(*options.split(), *command.split())
            assert (code, out) == (2, "") and advice in err


def test_only_spawned_workers_get_secrets_in_a_pickle(monkeypatch):
    headers = [("Authorization", SECRET), ("X-Team", "a")]
    client = {"verify": False, "headers": headers}
    options = {"key": "AK", "secret": SECRET, "profile": "p", "client_kwargs": client}
    upstreams = [{"url": "s3://b/x", "storage_options": options}]
    given = {"storage_options": options, "upstreams": upstreams}
    config = only(**given, validate=only).config
    assert deepcopy(config) == config and SECRET not in repr(config)
    pickled = pickle.dumps(config)
    assert SECRET.encode() not in pickled
    copy = pickle.loads(pickled)
    for found in copy.storage_options, copy.upstreams[0].storage_options:
        client = {"verify": False, "headers": headers[1:]}
        assert dict(found) == {"profile": "p", "client_kwargs": client}
    assert copy.replace(**given) == config
    monkeypatch.setattr("multiprocessing.context.get_spawning_popen", object)
    assert pickle.loads(pickle.dumps(config)) == config


def test_describe_round_trips():
    loaded = only(**{name: case[0] for name, case in CASES.items()})
    rows = describe(loaded)
    assert all(row.help.endswith(".") and len(row.help) < 80 for row in rows)
    texts = (row for row in rows if row.name not in ("validate", "storage_options"))
    again = {f"SHARDCACHE_{row.name.upper()}": row.value for row in texts}
    assert load({}, again, []).config == loaded.config
    assert {row.source for row in rows} == {"argument", "default"}


def test_type_checkers_know_every_option():
    real = {name: hint for name, hint in get_type_hints(Config).items() if name not in ("dir", "_")}
    typed = get_type_hints(Options, None, {"TierOption": TierOption, "Upstream": Upstream})
    assert list(typed) == list(real)
    for name, hint in typed.items():
        assert get_args(hint)[0] == real[name] or get_origin(real[name]) is not Literal
