"""Every option of the library: its type, its default, its help, and where it was set.

One declaration per option serves the keyword arguments of ``Cache``, the keys of the
TOML files, the ``SHARDCACHE_*`` variables, the table in the README and the command
``shardcache config``. Precedence, first wins, key by key::

    argument > SHARDCACHE_* > TOML files > WDS_CACHE, WDS_CACHE_SIZE > default

Invariants:

* A `Config` that exists is valid: every way in goes through the same parsers.
* Nothing is ignored silently: an unknown key, variable or argument is an error.
* No repr, row or error shows a value of ``storage_options``. A pickle leaves secrets out,
  except on the way into a process that multiprocessing is spawning.

`Config` is immutable and safe to share between threads and processes; `load` reads
the environment and files and writes nothing.
"""
# ruff: noqa: RUF009  (_opt is dataclasses.field with the help beside the default)

from __future__ import annotations

import contextlib
import grp
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

#: The version of this library; pyproject.toml says the same, and a test compares them.
__version__ = "0.1.0"

logger = logging.getLogger(__name__)

#: Names of storage options that hold credentials in s3fs, gcsfs, adlfs, botocore and
#: aiohttp, and of HTTP headers that do.
_SECRET = re.compile(
    r"(key$|key_?id$|secret|token|passw|passphrase|credential|sas|connection_string|cookie|"
    r"signature|(^|[_-])auth($|[_-]|oriz))",
    re.I,
)

_HIDDEN = "***"
# Greedy up to the last @: a password may hold / and @ of its own.
USERINFO = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


class StorageOptions(Mapping[str, object]):
    """Options for fsspec or S3 (key, secret, token, ...) that never print their values.

    An immutable copy of the mapping it is made from; equal to any mapping with the
    same items. ``dict(options)`` gives what fsspec takes, in clear.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> object:
        """The value itself, in clear."""
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._items)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def __hash__(self) -> int:
        """By names only: values need not be hashable."""
        return hash(frozenset(self._items))

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without secrets.

        A spawned worker has to read the same bucket and its pickle goes through a
        pipe to a child; any other pickle may end up in a file or on a wire. This is
        how `multiprocessing.process.AuthenticationString` tells the two apart.
        """
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is not None:
            return StorageOptions, (self._items,)
        return StorageOptions, (_without_secrets(self._items),)

    def __repr__(self) -> str:
        """Names, with every value hidden."""
        return f"StorageOptions({names_only(self)})"


@dataclass(frozen=True, slots=True)
class TierOption:
    """A directory in front of ``dir``, with limits of its own; see `tier`.

    Attributes:
        dir: where.
        max_size: most it may hold.
        min_free: space that stays free on its filesystem.
    """

    dir: Path
    max_size: Limit | None = None
    min_free: Limit = Limit(percent=5.0)

    def __str__(self) -> str:
        return str(self.dir) if self.max_size is None else f"{self.dir}={self.max_size}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where copies of shards are, or are to be kept; see `upstreams`.

    Attributes:
        url: a directory, or ``scheme://...`` of a store.
        write_back: whether what was fetched is copied there.
        endpoint_url: of an S3 store that is not AWS.
        storage_options: its own, for S3 or fsspec.
    """

    url: str
    write_back: bool = False
    endpoint_url: str | None = None
    storage_options: StorageOptions = field(default_factory=StorageOptions)

    def __str__(self) -> str:
        return redact(self.url) + (" (write_back)" if self.write_back else "")


def _without_secrets(items: Mapping[Any, object]) -> dict[Any, object]:
    kept = {}
    for name, value in items.items():
        kept[name] = None if _SECRET.search(str(name)) else _public(value)
        if kept[name] != value:
            logger.warning(
                "storage option %s is left out of a pickle, or a part of it; who reads it needs "
                "credentials of its own (environment, profile, role)",
                name,
            )
    return {name: value for name, value in kept.items() if not _SECRET.search(str(name))}


def _public(value: object) -> object:
    """A value without the credentials inside it: those of tables, lists and URLs."""
    if isinstance(value, Mapping):
        return _without_secrets(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_public, value))
    if isinstance(value, str) and "://" in value:  # of a proxy, an endpoint
        return re.sub(r"[?#].*", "", USERINFO.sub(r"\1", value), flags=re.DOTALL)
    return value


def names_only(items: Mapping[str, object]) -> str:
    """The names in a table, with every value hidden."""
    return ", ".join(f"{key}={_HIDDEN}" for key in items)


def redact(text: str) -> str:
    """``text`` without what stands before an ``@``, and a URL without its query."""
    shown = USERINFO.sub(rf"\1{_HIDDEN}@", text)
    return re.sub(r"[?#].*", f"?{_HIDDEN}", shown, flags=re.DOTALL) if "://" in shown else shown


MIB = 1 << 20
NONE = "none"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_ENDPOINT = re.compile(
    r"https?://(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]{1,5})?(/[^?#@\s]*)?",
    re.IGNORECASE,
)


_NO_GROUP = (1 << 32) - 1
_CREDENTIALS_BELONG = (
    "http:// or https://, a host, a port if need be; credentials belong into the environment "
    "(AWS_ACCESS_KEY_ID), a profile or storage_options"
)


def refuse(value: object, reason: str, accepted: str) -> ConfigError:
    """The error for a value that cannot be used; the caller raises it."""
    # Of other types only the name: they may hold anything, secrets included.
    shown = f"a {type(value).__name__}"
    if isinstance(value, str | int | float | Path):
        shown = repr(redact(str(value))[:80])
    return ConfigError(f"{shown} {reason}. Accepted: {accepted}.")


def _directory(value: object, environ: Mapping[str, str] = os.environ, base: str = "") -> Path:
    accepted = "a local directory; ~ and $VARIABLES in it are expanded"
    text = str(value) if isinstance(value, str | Path) else ""
    if not text.strip() or "\0" in text:
        raise refuse(value, "is not a path", accepted)
    if "://" in text:
        raise refuse(value, "is a URL", accepted)
    for found in _VARIABLE.finditer(text):
        if not environ.get(name := found[1] or found[2]):
            # os.path.expandvars keeps it: a directory called "$SCRATCH" would be the result.
            raise refuse(value, f"names ${name}, which is not set", accepted)
    text = _VARIABLE.sub(lambda found: environ[found[1] or found[2]], text)
    if (text == "~" or text.startswith("~/")) and environ.get("HOME"):
        text = environ["HOME"] + text[1:]
    text = os.path.expanduser(text)  # noqa: PTH111  Path.expanduser raises RuntimeError
    if text.startswith("~"):
        raise refuse(value, "names a home directory that is not known", accepted)
    return Path(base, text).absolute()


def _limit(value: Any) -> Limit:
    limit = units.parse_limit(value)
    if limit is None:
        raise refuse(value, "is no limit", "a size or a percentage, 0 for none")
    return limit


def _above_zero(parse: Callable[[Any], Any], reason: str, accepted: str) -> Callable[[Any], Any]:
    """As ``parse``, for values that must not be nothing."""

    def parsed(value: Any) -> Any:
        found = parse(value)
        if found in (0, Limit(bytes=0), Limit(percent=0.0)):
            raise refuse(value, reason, accepted)
        return found

    return parsed


_room = _above_zero(_limit, "leaves no room", f'more than 0, or "{NONE}" for no limit')
_size = _above_zero(units.parse_bytes, "leaves no room", "a size of more than 0")
_some_time = _above_zero(units.parse_duration, "is no time at all", "a duration of more than 0")


def _part_size(value: Any) -> int:
    size = units.parse_bytes(value)
    if size % MIB or not MIB <= size <= 1024 * MIB:
        raise refuse(value, "cannot be used", "a multiple of 1MiB from 1MiB to 1GiB")
    return size


def _function(value: object) -> object:
    if not callable(value):
        raise refuse(value, "cannot be called", "a function of the path of a fetched file")
    return value


def _items(value: object, what: str, accepted: str) -> list[Any]:
    """The items of a list, or of text that separates them by commas."""
    if isinstance(value, str):
        return [] if value.strip().lower() == NONE else value.split(",")
    if not isinstance(value, list | tuple | set | frozenset):
        raise refuse(value, f"is no list of {what}", accepted)
    return list(value)


def _schemes(value: object) -> tuple[str, ...]:
    accepted = 'URL schemes such as "pipe", separated by commas or as a list'
    found = set()
    for item in _items(value, "schemes", accepted):
        scheme = item.strip().lower() if isinstance(item, str) else ""
        if not _SCHEME.fullmatch(scheme):
            raise refuse(item, "is no scheme", accepted)
        found.add(scheme)
    return tuple(sorted(found))


def _tiers(value: object) -> tuple[TierOption, ...]:
    accepted = (
        "directories, each with =SIZE if it is to hold no more (/dev/shm/shards=50GB), as a list "
        "or separated by commas; as tables with dir, max_size and min_free in code and TOML"
    )
    return tuple(_tier(item, accepted) for item in _items(value, "tiers", accepted))


def _tier(item: object, accepted: str) -> TierOption:
    if isinstance(item, TierOption):
        return item
    table: Mapping[str, object]
    if isinstance(item, Mapping):
        table = item
    else:
        text = str(item) if isinstance(item, str | Path) else ""
        path, _, size = text.strip().partition("=")
        table = {"dir": path, **({"max_size": size} if size else {})}
    if set(table) - {"dir", "max_size", "min_free"} or not table.get("dir"):
        raise refuse(item, "is no tier", accepted)
    max_size, min_free = table.get("max_size"), table.get("min_free")
    return TierOption(
        _directory(table["dir"]),
        None if max_size is None else _room(max_size),
        *(() if min_free is None else (_limit(min_free),)),
    )


def _upstreams(value: object) -> tuple[Upstream, ...]:
    accepted = (
        "directories or URLs, as a list or separated by commas; as tables with url, write_back, "
        "endpoint_url and storage_options in code and TOML"
    )
    return tuple(_upstream(item, accepted) for item in _items(value, "upstreams", accepted))


def _upstream(item: object, accepted: str) -> Upstream:
    if isinstance(item, Upstream):
        return item
    table = item if isinstance(item, Mapping) else {"url": item}
    unknown = set(table) - {"url", "write_back", "endpoint_url", "storage_options"}
    url = table.get("url")
    if unknown or not isinstance(url, str | Path) or not str(url).strip():
        raise refuse(item, "is no upstream", accepted)
    text = str(url).strip()
    if "://" not in text:
        text = os.fspath(_directory(text))
    elif not _SCHEME.fullmatch(text.partition("://")[0].lower()) or "?" in text:
        raise refuse(text, "is no upstream", accepted)
    elif USERINFO.match(text) and not text.startswith(("abfs", "az", "oci")):
        raise refuse(text, "has a part before an @", "credentials belong into storage_options")
    endpoint, write_back = table.get("endpoint_url"), table.get("write_back", False)
    if not isinstance(write_back, bool | str):
        raise refuse(write_back, "is neither true nor false", accepted)
    return Upstream(
        text,
        units.parse_bool(write_back),
        None if endpoint is None else _endpoint(endpoint),
        _storage_options(table.get("storage_options", {})),
    )


def _storage_options(value: object) -> StorageOptions:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value if isinstance(value, StorageOptions) else StorageOptions(value)
    # Not even a string is shown: it may be a secret in the wrong place.
    accepted = "a dict in code, a [storage_options] table in TOML"
    raise ConfigError(f"a {type(value).__name__} is no table of names. Accepted: {accepted}.")


def _group(value: object) -> int:
    accepted = "the name of a group that this machine knows, or its number"
    number = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if isinstance(value, str):
        text = value.strip()
        with contextlib.suppress(KeyError, ValueError):
            number = int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    # The highest number says "leave it as it is", chown(2).
    if not 0 <= number < _NO_GROUP:
        raise refuse(value, "is no group", accepted)
    return number


def _endpoint(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if USERINFO.match(text):
        raise refuse(value, "has a part before an @, which S3 does not use", _CREDENTIALS_BELONG)
    if not _ENDPOINT.fullmatch(text):
        raise refuse(value, "is no endpoint", "http:// or https://, a host, a port if need be")
    return text


def group_name(gid: int) -> str:
    """What people call a group; its number where it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


class Kind(NamedTuple):
    """How one kind of value is called, read and shown."""

    text: str
    parse: Callable[..., Any]
    show: Callable[[Any], str] = str


def count(most: int, least: int = 1) -> Kind:
    """Whole numbers from ``least`` to ``most``."""
    return Kind(f"{least} to {most}", lambda value: units.parse_count(value, least, most))


def _choice(*names: str) -> Kind:
    return Kind(" or ".join(names), lambda value: units.parse_choice(value, names))


PATH = Kind("path", _directory)
BOOL = Kind("bool", units.parse_bool, lambda value: str(value).lower())
TIME = Kind("duration", units.parse_duration, units.exact_duration)
SOME_TIME = Kind("duration", _some_time, units.exact_duration)
# Not the repr: a functools.partial would print its arguments.
CALL = Kind("function", _function, lambda value: getattr(value, "__name__", "function"))
LIST = Kind("list", _schemes, ", ".join)
TABLE = Kind("table", _storage_options, names_only)
TIERS = Kind("list", _tiers, lambda value: ", ".join(map(str, value)))
UPSTREAMS = Kind("list", _upstreams, lambda value: ", ".join(map(str, value)))
ROOM = Kind("size or %", _room)
LIMIT = Kind("size or %", _limit)
SIZE = Kind("size", _size, units.exact_bytes)
PART_SIZE = Kind("size", _part_size, units.exact_bytes)
ENDPOINT = Kind("URL", _endpoint, redact)
GROUP = Kind("name or number", _group, group_name)


_PREFIX = "SHARDCACHE_"
#: Variables with our prefix that are no options; the last two belong to `shardcache.ranks`.
OTHER_VARIABLES = frozenset(
    {"SHARDCACHE_CONFIG", "SHARDCACHE_RANK", "SHARDCACHE_JOB", "SHARDCACHE_SYNC_DIR"}
)
#: WebDataset's own variables, honoured where nothing of ours is set.
_WDS_VARIABLES = {"dir": "WDS_CACHE", "max_size": "WDS_CACHE_SIZE"}
#: Kubernetes puts the address of every Service into the environment of the pods beside
#: it ("service links"); a Service called "shardcache" or "shardcache-x" is no typo.
_SERVICE_LINK = re.compile(
    rf"{_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|"
    r"PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def _opt(kind: Kind, default: Any, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """Validated options; text is parsed wherever the type is more than text.

    Raises:
        ConfigError: a value that cannot be used; names the option and what is accepted.
    """

    dir: Path = _opt(PATH, MISSING, "Directory of the cache, on a local disk.")
    _: KW_ONLY
    max_size: Limit | None = _opt(
        ROOM, None, "Most the cache may hold: bytes or % of the filesystem."
    )
    min_free: Limit = _opt(LIMIT, Limit(percent=5.0), "Space on the filesystem that stays free.")
    ephemeral_limit: int | None = _opt(
        SIZE, None, "Kubernetes' ephemeral-storage limit of the pod; nine tenths of it may be held."
    )
    max_age: float | None = _opt(SOME_TIME, None, "Entries unused for so long may be evicted.")
    tiers: tuple[TierOption, ...] = _opt(
        TIERS, (), "Faster places in front of dir, filled first, such as /dev/shm/shards=50GB."
    )
    policy: Literal["working-set", "lru", "fifo"] = _opt(
        _choice("working-set", "lru", "fifo"),
        "working-set",
        "What goes first; working-set keeps what running jobs use.",
    )
    protect_for: float = _opt(
        SOME_TIME, 86400.0, "Unused for so long, an entry of a running job may go, too."
    )
    isolation: Literal["node", "rank", "job"] = _opt(
        _choice("node", "rank", "job"), "node", "Who shares one copy."
    )
    fill: Literal["follow", "complete"] = _opt(
        _choice("follow", "complete"),
        "follow",
        "Read a shard while it is fetched, or when all of it is there.",
    )
    prefetch: int = _opt(count(64, 0), 2, "Shards fetched ahead of the one that is read.")
    connections: int = _opt(count(256), 32, "Most connections to the origin per process.")
    part_size: int | None = _opt(
        PART_SIZE, None, "Bytes per request; the default suits the link, 8 to 64 MiB."
    )
    attempts: int = _opt(count(100), 5, "Tries before a transient error counts as final.")
    deadline: float | None = _opt(SOME_TIME, None, "Most time for the whole fetch of a shard.")
    timeout: float = _opt(SOME_TIME, 30.0, "No byte for so long is a failed attempt.")
    lock_timeout: float = _opt(TIME, 1800.0, "Longest wait for another process's fetch.")
    stale_after: float = _opt(SOME_TIME, 120.0, "A partial not growing for so long is stale.")
    strict: bool = _opt(BOOL, False, "Raise on a fault of the cache instead of streaming.")
    validate: Callable[[Path], None] | None = _opt(
        CALL, None, "Called on each fetched shard before it is published; in code only."
    )
    fsync: Literal["verify-after-boot", "fsync", "none"] = _opt(
        _choice("verify-after-boot", "fsync", "none"),
        "verify-after-boot",
        "What guards entries against a crash of the machine.",
    )
    locks: Literal["auto", "flock", "lease"] = _opt(
        _choice("auto", "flock", "lease"),
        "auto",
        "How to lock; auto is flock on local filesystems, else leases among nodes.",
    )
    touch_interval: float = _opt(TIME, 600.0, "Last use is recorded at most this often.")
    stats: bool = _opt(BOOL, True, "Count hits, bytes and waits for `shardcache stats`.")
    allow_schemes: tuple[str, ...] = _opt(LIST, (), "Extra URL schemes; pipe runs a shell.")
    upstreams: tuple[Upstream, ...] = _opt(
        UPSTREAMS, (), "Nearer copies, asked before the origin: a NAS, a store of the cluster."
    )
    cache_local: bool = _opt(BOOL, False, "Cache plain paths and file:// too (slow mounts).")
    storage_options: StorageOptions = _opt(
        TABLE, StorageOptions(), "Options for fsspec or S3; in code or TOML only."
    )
    endpoint_url: str | None = _opt(ENDPOINT, None, "S3 endpoint if it is not that of AWS.")
    shared_group: int | None = _opt(
        GROUP, None, "Group whose members share the cache; the default is one user's own."
    )

    def __post_init__(self) -> None:
        """Bring every value to its type."""
        for option in fields(self):
            value = _parse(option, getattr(self, option.name), "argument")
            object.__setattr__(self, option.name, value)
        _check_apart([*(tier.dir for tier in self.tiers), self.dir])

    def replace(self, **changes: object) -> Config:
        """A copy with ``changes``, validated like the original; None clears an option."""
        for name in changes:
            _check_known(name, "argument", _FIELDS)
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ parses them

    def by_tier(self) -> tuple[Config, ...]:
        """The same for each tier alone, the fastest first; the last one is ``dir``."""
        alone = replace(self, tiers=()) if self.tiers else self
        faster = [
            replace(
                alone,
                dir=tier.dir,
                max_size=tier.max_size,
                min_free=tier.min_free,
                ephemeral_limit=None,
            )
            for tier in self.tiers
        ]
        return (*faster, alone)

    def __repr__(self) -> str:
        """What differs from the defaults, secrets hidden."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        shown = (f"{f.name}={_show(f, value)!r}" for f, value in values if value != f.default)
        return f"Config({', '.join(shown)})"


_FIELDS: dict[str, Field[Any]] = {option.name: option for option in fields(Config)}


def _check_apart(directories: Sequence[Path]) -> None:
    """Refuse tiers that are one directory, or inside each other."""
    for number, one in enumerate(directories):
        for other in directories[number + 1 :]:
            if one == other or one in other.parents or other in one.parents:
                raise ConfigError(
                    f"the tiers {one} and {other} are not apart. Give each a directory of its own.",
                    option="tiers",
                )


class Option(NamedTuple):
    """One row of the generated table of options."""

    name: str
    type: str
    default: str
    help: str


class Setting(NamedTuple):
    """One option in force: its value as text, secrets hidden, and who set it."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A `Config` and, for each option, the source of its value.

    A source is ``argument``, ``environment NAME``, ``file PATH`` or ``default``.
    """

    config: Config
    sources: dict[str, str]


class _Given(NamedTuple):
    name: str
    value: object
    source: str
    base: str = ""


def load(
    explicit: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Loaded:
    """The options in force for ``explicit`` arguments, ``environ`` and TOML ``files``.

    Args:
        explicit: options given in code; a value of None means "not given".
        environ: the environment (default ``os.environ``); empty variables are not set.
        files: exactly these files, which must exist, instead of the usual places
            (``$SHARDCACHE_CONFIG``, ``./shardcache.toml``, the user's, ``/etc``).

    In the environment and in TOML the text ``none`` clears an option that may be unset.

    Raises:
        ConfigError: an unknown name, a value that cannot be used, a file that cannot be
            read, or no ``dir`` anywhere.
    """
    env = os.environ if environ is None else environ
    given: dict[str, _Given] = {}
    from_files = (item for file in _files(env, files) for item in _from_file(*file))
    for layer in (_arguments(explicit or {}), _environment(env), from_files, _from_wds(env)):
        for item in layer:
            given.setdefault(item.name, item)
    if "dir" not in given:
        raise ConfigError(
            "no cache directory is set. Set it in one of three ways: "
            'Cache("/local/nvme/shards") in code or --dir on the command line; '
            "SHARDCACHE_DIR=/local/nvme/shards in the environment; "
            'dir = "/local/nvme/shards" in shardcache.toml.',
            option="dir",
        )
    values: dict[str, Any] = {}
    for name, item in given.items():
        context = {"environ": env, "base": item.base} if name == "dir" else {}
        values[name] = _parse(_FIELDS[name], item.value, item.source, **context)
    sources = {name: given[name].source if name in given else "default" for name in _FIELDS}
    return Loaded(Config(**values), sources)


def _arguments(explicit: Mapping[str, object]) -> Iterator[_Given]:
    for name, value in explicit.items():
        _check_known(name, "argument", _FIELDS)
        if value is not None:
            yield _Given(name, value, "argument")


def _environment(env: Mapping[str, str]) -> Iterator[_Given]:
    names = {f"{_PREFIX}{name.upper()}": name for name in _FIELDS}
    for variable in sorted(env):
        if not variable.startswith(_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in names and _SERVICE_LINK.fullmatch(variable):
            continue
        _check_known(variable, "environment", (*names, *OTHER_VARIABLES))
        name, source = names[variable], f"environment {variable}"
        if name in ("validate", "storage_options"):
            _refuse_source(name, source)
        if env[variable].strip():
            yield _Given(name, env[variable], source)


def _from_wds(env: Mapping[str, str]) -> Iterator[_Given]:
    for name, variable in _WDS_VARIABLES.items():
        if env.get(variable, "").strip():
            yield _Given(name, env[variable], f"environment {variable}")


def _files(env: Mapping[str, str], files: Sequence[Path] | None) -> Iterator[tuple[Path, bool]]:
    """Files to read, in order, each with whether it has to exist."""
    if files is not None:
        yield from ((Path(file), True) for file in files)
        return
    if stated := env.get("SHARDCACHE_CONFIG", "").strip():
        yield Path(stated), True
    yield Path("shardcache.toml"), False
    home = env.get("XDG_CONFIG_HOME", "")
    if not home.startswith("/"):  # the XDG specification: ignore a relative one
        home = f"{env['HOME']}/.config" if env.get("HOME") else ""
    if home:
        yield Path(home, "shardcache", "config.toml"), False
    yield Path("/etc/shardcache.toml"), False


def _from_file(path: Path, required: bool) -> Iterator[_Given]:
    advice = "Correct the file or name another with --config or SHARDCACHE_CONFIG"
    try:
        text = path.read_bytes()
    except OSError as exn:
        # os.path.exists, for it takes a directory we may not enter (a $HOME of another
        # user in a container) as "not there", where Path.exists raises.
        if not required and not os.path.exists(path):  # noqa: PTH110
            return
        raise ConfigError(f"{path} cannot be read: {exn.strerror}. {advice}.") from exn
    import tomllib  # here: it would be a third of the cost of importing this module

    try:
        table = tomllib.loads(text.decode())
    except ValueError as exn:
        raise ConfigError(f"{path} is not valid TOML: {exn}. {advice}.") from exn
    path = path.absolute()
    for name, value in table.items():
        _check_known(name, f"file {path}", _FIELDS)
        if name == "validate":
            _refuse_source(name, f"file {path}")
        yield _Given(name, value, f"file {path}", str(path.parent))


def _refuse_source(name: str, source: str) -> None:
    where = "in code" if name == "validate" else "in code or as a TOML table"
    message = f"{name} ({source}) can only be given {where}. Remove it there."
    raise ConfigError(message, option=name, source=source)


def _check_known(name: str, source: str, known: Iterable[str]) -> None:
    choices = sorted(known)
    if name in choices:
        return
    import difflib  # only a mistake has to wait for it

    near = difflib.get_close_matches(name, choices, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(choices)}."
    raise ConfigError(f"unknown option {name!r} ({source}). {hint}", option=name, source=source)


def _parse(option: Field[Any], value: object, source: str, **context: Any) -> object:
    cleared = isinstance(value, str) and value.strip().lower() == NONE
    if option.default is None and (value is None or cleared):
        return None
    try:
        return option.metadata["kind"].parse(value, **context)
    except ConfigError as exn:
        name = option.name
        raise ConfigError(f"{name} ({source}): {exn}", option=name, source=source) from exn


def _show(option: Field[Any], value: object) -> str:
    unset = value is None or value in ((), {})
    return NONE if unset else str(option.metadata["kind"].show(value))


def options() -> tuple[Option, ...]:
    """All options in their order of declaration, for generated documentation."""
    return tuple(
        Option(
            option.name,
            option.metadata["kind"].text,
            "required" if option.default is MISSING else _show(option, option.default),
            option.metadata["help"],
        )
        for option in _FIELDS.values()
    )


def describe(loaded: Loaded) -> tuple[Setting, ...]:
    """All options with the value in force and its source; secrets are hidden."""
    return tuple(
        Setting(name, _show(option, getattr(loaded.config, name)), loaded.sources[name])
        for name, option in _FIELDS.items()
    )
