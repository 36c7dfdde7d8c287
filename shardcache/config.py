"""The options of the library: types, defaults, help texts, and the sources of their values.

The fields of `Config` declare each option once, for all sources of values, docs/options.md and
``shardcache config``. For each option, the first source that sets it wins::

    argument > SHARDCACHE_* > TOML files > WDS_CACHE, WDS_CACHE_SIZE > last job > default

Every `Config` object is valid. No repr, error or command shows values of ``storage_options``.
"""
# ruff: noqa: RUF009  (_opt calls dataclasses.field)

from __future__ import annotations

import contextlib
import dataclasses
import grp
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

from shardcache import units
from shardcache.errors import REMOVED, ConfigError
from shardcache.units import Limit
from shardcache.urls import ALIASES, VARIABLE, absolute, find_scheme

#: The version of this library. A test compares it with pyproject.toml.
__version__ = "0.1.0"

logger = logging.getLogger(__name__)

#: The text that clears an option in the environment and in TOML files.
NONE = "none"
#: The choices of some options; the first is the default.
PolicyName: TypeAlias = Literal["working-set", "lru"]
Isolation: TypeAlias = Literal["node", "rank", "job"]
Fill: TypeAlias = Literal["follow", "complete"]
Fsync: TypeAlias = Literal["verify-after-boot", "fsync", "none"]
Locks: TypeAlias = Literal["auto", "flock", "lease"]

#: Options and HTTP headers of s3fs, gcsfs, adlfs, botocore and aiohttp that hold credentials.
_CREDENTIALS = (
    r"(?i)(key$|key_?id$|secret|token|passw|passphrase|credential|sas|connection_string|cookie|"
    r"signature|(^|[_-])auth($|[_-]|oriz))"
)
#: Options of filesystems, and fields of Azure's connection strings, that name a server, an account,
#: an archive or a revision.
_SERVER_OPTIONS = (
    r"(?i)(account|share|store)_?(host|name)|(base_)?url|drive|(blob)?endpoint(_?suffix|_url)?|"
    r"fo|gist_id|host(name)?|instance|org|path|port|ref|region|repo|rev(ision)?|server|sha|"
    r"target_protocol"
)
#: The variables from which filesystems take such options, by scheme.
_AZURE = {
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
}
_VARIABLES = {
    **dict.fromkeys(("abfs", "abfss", "az"), _AZURE),
    "gs": {"endpoint_url": "STORAGE_EMULATOR_HOST"},
    "hf": {"endpoint": "HF_ENDPOINT"},
}
# The pattern matches up to the last @, because a password may contain / and @.
_LOGIN = r"(?is)://.*@"
_SCHEME = r"[a-z][a-z0-9+.-]*"
_ENDPOINT = r"(?i)https?://(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]{1,5})?(/[^?#@\s]*)?"
#: The highest number is not a group: chown(2) interprets it as "do not change the group".
_NO_GROUP = (1 << 32) - 1


#: The options of s3fs and of all fsspec's filesystems. shardcache's own client knows them, too, or
#: leaves the shard to s3fs.
S3_OPTIONS = {
    *("anon", "asynchronous", "batch_size", "cache_regions", "client_kwargs", "config_kwargs"),
    *("default_block_size", "default_cache_type", "default_fill_cache", "endpoint_url"),
    *("fixed_upload_size", "key", "listings_expiry_time", "local_expiry_check", "loop"),
    *("max_concurrency", "max_paths", "password", "profile", "requester_pays"),
    *("s3_additional_kwargs", "secret", "session", "skip_instance_cache", "token"),
    *("use_listings_cache", "use_ssl", "username", "version_aware"),
}
#: The options of boto3 and others, and what to use in their place.
_MEANT = {
    **dict.fromkeys(("access_key", "aws_access_key_id"), "key"),
    **dict.fromkeys(("secret_key", "aws_secret_access_key"), "secret"),
    **dict.fromkeys(("region", "region_name"), "client_kwargs={'region_name': ...}"),
    "aws_session_token": "token",
    "endpoint": "endpoint_url",
}


class StorageOptions(dict[str, object]):
    """Options for fsspec or S3 (key, secret, token, ...). The repr hides all values.

    A pickle has the secrets only on its way to a process that multiprocessing spawns.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # defaults of dataclasses must be hashable
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.context import get_spawning_popen

        return StorageOptions, (dict(self) if get_spawning_popen() else _public(self),)

    def __deepcopy__(self, memo: object) -> StorageOptions:
        return self  # with the secrets: the copy stays in this process

    def __str__(self) -> str:
        return ", ".join(f"{key}=***" for key in self)

    def __repr__(self) -> str:
        return f"StorageOptions({self})"


def _public(value: object) -> object:
    """Return a copy of a value that omits the credentials in mappings, sequences and URLs."""
    if isinstance(value, Mapping):
        kept = {n: _public(v) for n, v in value.items() if not re.search(_CREDENTIALS, str(n))}
        if omitted := [str(name) for name in value if kept.get(name) != value[name]]:
            logger.warning(
                "the pickle of this cache leaves out the credentials in the storage options %s; a "
                "process that loads it needs credentials from its environment, a profile or a role",
                ", ".join(omitted),
            )
        return kept
    if type(value) is list or type(value) is tuple:
        pairs = (item for item in value if isinstance(item, list | tuple) and item)
        secrets = [item for item in pairs if re.search(_CREDENTIALS, str(item[0]))]  # of headers
        return type(value)(_public(item) for item in value if item not in secrets)
    if isinstance(value, str) and "://" in value:  # the URL of a proxy or an endpoint
        return re.sub(_LOGIN, "://", value).partition("?")[0].partition("#")[0]
    return value


def _refuse_unknown(options: StorageOptions) -> None:
    """Raise ConfigError for an option for S3 that is not known: it would have no effect."""
    table = options.get("s3")
    known = set[str]() if isinstance(table, Mapping) else S3_OPTIONS
    names = [n for n, value in options.items() if n not in known and not isinstance(value, Mapping)]
    names += [n for n in table if n not in S3_OPTIONS] if isinstance(table, Mapping) else []
    for name in names:
        meant = _MEANT.get(name) or units.similar(name, S3_OPTIONS)
        advice = f"Did you mean {meant}?" if meant and name != meant else ""
        advice = "Put it into the table s3." if name in S3_OPTIONS else advice
        raise ConfigError(f"storage_options: there is no option {name!r} for S3. {advice}".rstrip())


# These parsers raise ValueError("is not a path"), and `_parse` puts the value in front.


def _directory(value: object) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    if not text.strip() or "\0" in text:
        raise ValueError("is not a path")
    if "://" in text:
        raise ValueError("is a URL")
    for match in re.finditer(VARIABLE, text):
        # os.path.expandvars would keep the name of an unset variable as the name of a directory.
        if not os.environ.get(name := match[1] or match[2]):
            raise ValueError(f"contains ${name}, which is not set")
    text = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111  pathlib's version raises
    if text.startswith("~"):
        raise ValueError("is in an unknown home directory: set another one (SHARDCACHE_DIR, --dir)")
    return absolute(text)


def _part_size(value: Any) -> int:
    size, mib = units.parse_bytes(value), 1 << 20
    if size % mib or not mib <= size <= 1024 * mib:
        raise ValueError("is not a valid part size")
    return size


def _function(value: object) -> object:
    if not callable(value):
        raise ValueError("is not a function")
    return value


def _from_json(value: object) -> object:
    """Return what text means in JSON, and any other value itself."""
    with contextlib.suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _items(value: object) -> list[Any]:
    """Return the items of a list or a set, or of text: separated by commas, or JSON."""
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        return [] if value.strip().lower() == NONE else value.split(",")
    value = _from_json(value)
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError("is not a list")
    return list(value)


def _schemes(value: object) -> tuple[str, ...]:
    schemes = {str(item).strip().lower() for item in _items(value)}
    if not all(re.fullmatch(_SCHEME, scheme) for scheme in schemes):
        raise ValueError("has an item that is not a URL scheme")
    return tuple(sorted(schemes))


def _tables(value: object, cls: Any) -> tuple[Any, ...]:
    """Parse a list of ``cls`` objects, tables, or texts such as ``DIRECTORY=SIZE`` and ``URL``."""

    def parsed(item: Any) -> Any:
        if isinstance(item, str | Path):
            parts = str(item).split("=", 1) if cls is TierOption else [item]
            return cls(*(str(part).strip() for part in parts))
        return item if isinstance(item, cls) else cls(**item)

    try:
        return tuple(map(parsed, _items(value)))
    except TypeError:  # not a table, or unknown fields, which the TypeError would show
        keys = ", ".join(cls.__slots__)
        raise ValueError(f"has an item that is not valid (a table has the keys {keys})") from None


def _store(value: object) -> str:
    """Parse a directory or the URL of a store. For Azure and OCI, a name before @ is no login."""
    text = str(value).strip() if isinstance(value, str | Path) else ""
    scheme, is_url, rest = text.partition("://")
    if not is_url:
        return os.fspath(_directory(text))
    user, at, _ = rest.rpartition("@")
    login = ":" in user or (at and find_scheme(scheme).user != "account")
    if login or "?" in rest or not re.fullmatch(_SCHEME, scheme.lower()):
        raise ValueError("is neither a path nor a URL without credentials")
    return text


def _storage_options(value: object) -> StorageOptions:
    value = _from_json(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        if not isinstance(value.get("client_kwargs") or {}, Mapping):
            raise ValueError("has client_kwargs that are not a table")
        return StorageOptions({ALIASES.get(str(n), str(n)): item for n, item in value.items()})
    raise ValueError("is not a table whose keys are text")


def _group(value: object) -> int:
    text, number = str(value).strip(), -1
    with contextlib.suppress(KeyError, ValueError):
        number = int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    if not 0 <= number < _NO_GROUP:
        raise ValueError("is not a group of this machine")
    return number


def group_name(gid: int) -> str:
    """Return the name of a group, or its number if it has no name on this machine."""
    with contextlib.suppress(KeyError, OverflowError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _endpoint(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(_ENDPOINT, text):
        raise ValueError("is not a URL like http://localhost:8333, without credentials")
    return text


class Kind(NamedTuple):
    """The type of an option."""

    text: str  #: the accepted values, in words
    parse: Callable[[Any], Any]
    show: Callable[[Any], str] = str  #: converts a value to text that `parse` accepts
    above_zero: bool = False  #: whether zero is refused


def _opt(kind: Kind, default: Any, help: str) -> Any:
    # Leave functions out of the repr: that of a functools.partial may contain secrets.
    return field(default=default, repr=kind is not FUNCTION, metadata={"kind": kind, "help": help})


def _choose(choices: Any, help: str) -> Any:
    """Declare an option that takes one of the values of a Literal; the first is the default."""
    names = get_args(choices)
    kind = Kind(" or ".join(names), lambda value: units.parse_choice(value, names))
    return _opt(kind, names[0], help)


def _count(maximum: int, minimum: int = 1) -> Kind:
    return Kind(f"{minimum} to {maximum}", lambda value: units.parse_count(value, minimum, maximum))


def _listed(value: Sequence[object]) -> str:
    return ", ".join(map(str, value))


PATH = Kind("local directory", _directory)
BOOL = Kind("bool", units.parse_bool, lambda value: str(value).lower())
TIME = Kind("duration", units.parse_duration, units.exact_duration)
POSITIVE_TIME = Kind("duration above 0", units.parse_duration, units.exact_duration, True)
AGE = Kind("duration above 0", units.parse_age, units.exact_duration, True)
LIMIT = Kind("size or %", units.parse_limit)
POSITIVE_LIMIT = Kind("size or % above 0", units.parse_limit, above_zero=True)
SIZE = Kind("size above 0", units.parse_bytes, units.exact_bytes, True)
PART_SIZE = Kind("multiple of 1MiB up to 1GiB", _part_size, units.exact_bytes)
FUNCTION = Kind("function of a path", _function, lambda f: getattr(f, "__name__", "function"))
TABLE = Kind("dict, TOML table or JSON object", _storage_options)
SCHEMES = Kind("list of URL schemes", _schemes, _listed)
GROUP = Kind("name or number of a group", _group, group_name)
ENDPOINT = Kind("http(s) URL without credentials", _endpoint)
STORE = Kind("path, or URL without credentials", _store)


def _parse_fields(instance: Any) -> None:
    """Parse the values of all fields that `_opt` has declared."""
    for option in fields(instance):
        value = _parse(option, getattr(instance, option.name), "argument")
        object.__setattr__(instance, option.name, value)


@dataclass(frozen=True, slots=True)
class TierOption:
    """An item of the option ``tiers``: a faster directory than ``dir``, with its own limits."""

    dir: Path = _opt(PATH, MISSING, "Directory of the tier.")
    max_size: Limit | None = _opt(POSITIVE_LIMIT, None, "Maximum size of the tier.")
    min_free: Limit = _opt(LIMIT, Limit(percent=10.0), "Space to keep free on its filesystem.")

    def __post_init__(self) -> None:
        _parse_fields(self)
        if size := re.fullmatch(r"(.+):([0-9.]+ ?[kKMGTPi]*B?|[0-9]+%)", str(self.dir)):
            raise ConfigError(f"tiers: write {size[1]}={size[2]} in place of {self.dir}.")

    def __str__(self) -> str:
        return str(self.dir) if self.max_size is None else f"{self.dir}={self.max_size}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """An item of the option ``upstreams``: a store with copies of shards."""

    url: str = _opt(STORE, MISSING, "A directory, or the URL of a store.")
    write_back: bool = _opt(BOOL, False, "Whether to copy downloaded shards to this store.")
    endpoint_url: str | None = _opt(ENDPOINT, None, "S3 endpoint of this store, if not AWS.")
    storage_options: StorageOptions = _opt(TABLE, StorageOptions(), "Options for fsspec or S3.")

    def __post_init__(self) -> None:
        _parse_fields(self)
        if re.match("s3[an]?:", self.url):
            _refuse_unknown(self.storage_options)

    def __str__(self) -> str:
        return self.url + (" (write_back)" if self.write_back else "")


TIERS = Kind("list of DIRECTORY=SIZE or tables", lambda x: _tables(x, TierOption), _listed)
UPSTREAMS = Kind("list of paths, URLs or tables", lambda x: _tables(x, Upstream), _listed)


@dataclass(frozen=True, slots=True)
class Config:
    """The options of a cache, parsed into their types; ConfigError if a value is not valid."""

    dir: Path = _opt(PATH, MISSING, "Directory of the cache, on a local disk.")
    _: KW_ONLY
    max_size: Limit | None = _opt(
        POSITIVE_LIMIT, None, "Maximum size of the cache, in bytes or % of the filesystem."
    )
    min_free: Limit = _opt(LIMIT, Limit(percent=10.0), "Space to keep free on the filesystem.")
    ephemeral_limit: int | None = _opt(
        SIZE, None, "Kubernetes' ephemeral-storage limit; the cache uses up to 90% of it."
    )
    max_age: float | None = _opt(AGE, None, "Evict shards that were unused for this long.")
    tiers: tuple[TierOption, ...] = _opt(
        TIERS, (), "Faster directories to fill before dir, such as /dev/shm/shards=50GB."
    )
    policy: PolicyName = _choose(
        PolicyName, "Eviction policy; working-set keeps the shards of running jobs."
    )
    isolation: Isolation = _choose(Isolation, "Which processes share one copy of a shard.")
    fill: Fill = _choose(Fill, "Read a shard during its download (follow) or after it (complete).")
    prefetch: int = _opt(_count(64, 0), 3, "Number of shards of a list to download ahead.")
    connections: int = _opt(_count(256), 32, "Maximum connections per process; a node shares 64.")
    part_size: int | None = _opt(PART_SIZE, None, "Bytes per request; 16 MiB if unset.")
    attempts: int = _opt(_count(100), 5, "Attempts before a transient error becomes permanent.")
    patience: float = _opt(TIME, 300.0, "Longest wait for a throttling server or for credentials.")
    deadline: float | None = _opt(POSITIVE_TIME, None, "Maximum time for the download of a shard.")
    timeout: float = _opt(POSITIVE_TIME, 30.0, "Fail an attempt after this long without data.")
    lock_timeout: float = _opt(TIME, 1800.0, "Longest wait for another process's download.")
    stale_after: float = _opt(
        POSITIVE_TIME, 120.0, "Stop waiting for a download that has not grown for this long."
    )
    strict: bool = _opt(BOOL, False, "Raise faults of the cache instead of streaming.")
    validate: Callable[[Path], None] | None = _opt(
        FUNCTION, None, "Called with each downloaded file before it is published; in code only."
    )
    fsync: Fsync = _choose(Fsync, "How to protect entries against a crash of the machine.")
    locks: Locks = _choose(
        Locks, "Kind of locks; auto uses flock on local filesystems, leases on others."
    )
    allow_schemes: tuple[str, ...] = _opt(SCHEMES, (), "More URL schemes; pipe runs a shell.")
    upstreams: tuple[Upstream, ...] = _opt(
        UPSTREAMS, (), "Nearer copies to try before the origin, such as a NAS."
    )
    cache_local: bool = _opt(BOOL, False, "Also cache paths and file:// URLs, for slow mounts.")
    storage_options: StorageOptions = _opt(
        TABLE, StorageOptions(), "Options for S3, or a table for each scheme; in a variable, JSON."
    )
    endpoint_url: str | None = _opt(ENDPOINT, None, "URL of the S3 endpoint, if not AWS.")
    shared_group: int | None = _opt(
        GROUP, None, "Group whose members share the cache; by default only its user."
    )

    def __post_init__(self) -> None:
        _parse_fields(self)
        _refuse_unknown(self.storage_options)
        for tier, other in itertools.combinations([*(t.dir for t in self.tiers), self.dir], 2):
            first, second = (Path(os.path.realpath(path)) for path in (tier, other))
            if first.is_relative_to(second) or second.is_relative_to(first):
                raise ConfigError(
                    f"one of the tiers {tier} and {other} contains the other. Give each its own "
                    "directory."
                )

    def replace(self, **changes: Any) -> Config:
        """Return a validated copy with some options changed; None clears an option."""
        return dataclasses.replace(self, **changes)

    def job_settings(self) -> dict[str, Any]:
        """Return the limits that were set, and the tiers, as values for JSON that parse back."""
        tiers = [{name: str(getattr(tier, name)) for name in tier.__slots__} for tier in self.tiers]
        limits = {name: getattr(self, name) for name in _LIMITS}
        changed = {n: _show(n, x) for n, x in limits.items() if x != _FIELDS[n].default}
        return {**changed, "tiers": tiers}

    def scheme_options(self, scheme: str) -> Mapping[str, Any]:
        """Return the table of one scheme. Without a table ``s3``, all options belong to S3."""
        options = self.storage_options.get(scheme)
        if not isinstance(options, Mapping):
            options = self.storage_options if scheme == "s3" else {}
        is_given = scheme == "s3" and self.endpoint_url
        return {**options, "endpoint_url": self.endpoint_url} if is_given else options

    def servers(self) -> dict[str, str]:
        """Return the options that name a server or an account, by scheme, without secrets."""
        servers = {}
        for scheme in (*self.storage_options, *_VARIABLES):
            named = dict(self.scheme_options(scheme))
            for name, variable in _VARIABLES.get(scheme, {}).items():
                named[name] = named.get(name) or os.environ.get(variable)
            named |= re.findall(r"(\w+)=([^;]*)", str(named.get("connection_string")))
            stated = [n for n in sorted(named) if named[n] and re.fullmatch(_SERVER_OPTIONS, n)]
            if stated:
                servers[scheme] = ",".join(f"{name}={_public(str(named[name]))}" for name in stated)
        return servers

    def by_tier(self) -> tuple[Config, ...]:
        """Return one configuration for each tier, the fastest tier first and ``dir`` last."""
        changes = {"tiers": (), "ephemeral_limit": None}
        faster = (
            self.replace(dir=tier.dir, max_size=tier.max_size, min_free=tier.min_free, **changes)
            for tier in self.tiers
        )
        return (*faster, self)


#: The options that decide how much is stored and what is evicted first.
_LIMITS = ("max_size", "min_free", "ephemeral_limit", "max_age", "policy")
_FIELDS = {option.name: option for option in fields(Config)}

Size: TypeAlias = int | str
Duration: TypeAlias = float | str


class Options(TypedDict, total=False):
    """The keyword arguments of `Cache`, for type checkers. None means the default."""

    max_size: Size | None
    min_free: Size | None
    ephemeral_limit: Size | None
    max_age: Duration | None
    tiers: str | Sequence[str | Path | Mapping[str, Any] | TierOption] | None
    policy: PolicyName | None
    isolation: Isolation | None
    fill: Fill | None
    prefetch: int | None
    connections: int | None
    part_size: Size | None
    attempts: int | None
    patience: Duration | None
    deadline: Duration | None
    timeout: Duration | None
    lock_timeout: Duration | None
    stale_after: Duration | None
    strict: bool | None
    validate: Callable[[Path], None] | None
    fsync: Fsync | None
    locks: Locks | None
    allow_schemes: str | Collection[str] | None
    upstreams: str | Sequence[str | Path | Mapping[str, Any] | Upstream] | None
    cache_local: bool | None
    storage_options: Mapping[str, object] | None
    endpoint_url: str | None
    shared_group: int | str | None


_PREFIX = "SHARDCACHE_"
#: Variables of `ranks` and `sync`, and of a Service of Kubernetes that is named "shardcache".
_NO_OPTIONS = rf"{_PREFIX}(CONFIG|RANK|JOB|RUN|SYNC_DIR|(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?)"


class Loaded(NamedTuple):
    """A `Config` and the source of each value."""

    config: Config
    #: ``argument``, ``environment NAME``, ``file PATH``, ``last job`` or ``default``
    sources: dict[str, str]


def load(
    explicit: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
    job: Mapping[str, object] | None = None,
) -> Loaded:
    """Load the options from arguments, the environment and TOML files.

    Args:
        explicit: options set in code; None means "not set".
        environ: the environment (default: ``os.environ``). Empty variables count as unset.
        files: existing files to read (default: `usual_files`).
        job: the limits and tiers of the last job; see `Config.job_settings`.

    Raises ConfigError if a name or a value is not valid, or a file cannot be read.
    """
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if v.strip()}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_FIELDS, "default")
    for name, value, source in itertools.chain(
        ((name, value, "argument") for name, value in (explicit or {}).items()),
        _from_environment(env),
        _from_files(usual_files(env) if files is None else files),
        _from_webdataset(env),
        ((name, (job or {}).get(name), "last job") for name in (*_LIMITS, "tiers")),
    ):
        if (advice := REMOVED.get(f"option {name}")) is not None:
            raise ConfigError(f"the option {name} ({source}) was removed. {advice}")
        if name not in _FIELDS:
            similar = units.similar(name, _FIELDS)
            advice = f"Did you mean {similar}?" if similar else f"Known: {', '.join(_FIELDS)}."
            raise ConfigError(f"unknown option {name!r} ({source}). {advice}")
        if value is not None and sources[name] == "default":
            values[name], sources[name] = _parse(_FIELDS[name], value, source), source
    if "dir" not in values:
        caches = env.get("XDG_CACHE_HOME", "")
        # The XDG specification says to ignore relative paths.
        caches = caches if caches.startswith("/") else "~/.cache"
        values["dir"] = _parse(_FIELDS["dir"], f"{caches}/shardcache", "default")
    return Loaded(Config(**values), sources)


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    for name in sorted(env):
        if name.startswith(_PREFIX) and not re.fullmatch(_NO_OPTIONS, name):
            yield name.removeprefix(_PREFIX).lower(), env[name], f"environment {name}"


def _from_webdataset(env: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    yield "dir", env.get("WDS_CACHE"), "environment WDS_CACHE"
    size = env.get("WDS_CACHE_SIZE", "").strip()
    size += "B" if size[-1:].isdigit() else ""  # to WebDataset, a bare number means bytes
    # -1 means no limit.
    yield "max_size", None if size[:1] in ("", "-") else size, "environment WDS_CACHE_SIZE"


def usual_files(env: Mapping[str, str]) -> list[Path]:
    """Return the existing configuration files that hold in an environment, the first one first."""
    if (named := env.get("SHARDCACHE_CONFIG", "")) and os.pathsep not in named:
        return [Path(named)]
    home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '')}/.config"
    usual = ["shardcache.toml", f"{home}/shardcache/config.toml", "/etc/shardcache.toml"]
    usual = named.split(os.pathsep) if named else usual  # from `shardcache run`
    # Path.exists would raise PermissionError in a directory that this process may not enter.
    return [Path(path) for path in usual if os.path.exists(path)]  # noqa: PTH110


def _from_files(paths: Sequence[Path]) -> Iterator[tuple[str, object, str]]:
    advice = "Correct the file or name another with --config or SHARDCACHE_CONFIG"
    for path in map(absolute, paths):
        import tomllib  # here, because most users have no file

        try:
            table = tomllib.loads(path.read_bytes().decode())
        except OSError as exn:
            raise ConfigError(f"{path} cannot be read: {exn.strerror}. {advice}.") from exn
        except ValueError as exn:
            raise ConfigError(f"{path} is not valid TOML: {exn}. {advice}.") from exn
        for name, value in table.items():
            # A relative ``dir`` is relative to the directory of the file.
            if name == "dir" and isinstance(value, str) and not re.match(r"[~$]|\w+://|$", value):
                value = path.parent / value
            yield name, _numbers_as_text(name, value), f"file {path}"


def _numbers_as_text(name: str, value: Any) -> Any:
    """Return a value with its numbers as text, so that sizes in TOML files need a unit."""
    if isinstance(value, list):
        return [_numbers_as_text(name, item) for item in value]
    if isinstance(value, dict) and name != "storage_options":
        return {key: _numbers_as_text(key, item) for key, item in value.items()}
    return str(value) if type(value) in (int, float) else value


def _parse(option: dataclasses.Field[Any], value: object, source: str) -> object:
    cleared = isinstance(value, str) and value.strip().lower() == NONE
    if option.default is None and (value is None or cleared):
        return None
    kind = option.metadata["kind"]
    try:
        parsed: object = kind.parse(value)
        if kind.above_zero and parsed in (0, Limit(bytes=0), Limit(percent=0.0)):
            raise ValueError("is not above 0")
        return parsed
    except ConfigError as exn:
        message = exn.message
    except ValueError as exn:
        # A table, or a URL with a login or a query, may contain a secret: show only its type.
        text = str(value) if isinstance(value, str | int | float | Path | Limit) else ""
        hidden = not text or "table" in kind.text or not {*"@?#"}.isdisjoint(text)
        subject = f"a {type(value).__name__}" if hidden else repr(text[:80])
        message = f"{subject} {exn}. Accepted: {kind.text}"
        message += "." if option.default is not None else f", or {NONE}."
    message = REMOVED.get(f"{option.name} {value}", message)
    raise ConfigError(f"{option.name} ({source}): {message}")


class Option(NamedTuple):
    """An option and its value as text, without secrets."""

    name: str
    type: str  #: the accepted values
    default: str
    help: str
    value: str
    source: str  #: the source of the value, as in `Loaded`


def _show(name: str, value: object) -> str:
    if value is None or value in ((), {}):
        return NONE
    return str(_FIELDS[name].metadata["kind"].show(value))


def describe(loaded: Loaded) -> list[Option]:
    """Return all options, with their values, in the order of their declaration."""
    options = []
    for name, option in _FIELDS.items():
        kind, help = option.metadata["kind"], option.metadata["help"]
        default = "~/.cache/shardcache" if name == "dir" else _show(name, option.default)
        value = _show(name, getattr(loaded.config, name))
        options.append(Option(name, kind.text, default, help, value, loaded.sources[name]))
    return options
