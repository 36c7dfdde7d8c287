"""Every option of the library: its type, its default, its help, and where it was set.

One declaration serves the keyword arguments of ``Cache``, the keys of the TOML files, the
``SHARDCACHE_*`` variables, docs/options.md and ``shardcache config``. First wins, key by
key::

    argument > SHARDCACHE_* > TOML files > WDS_CACHE, WDS_CACHE_SIZE > default

Without any ``dir``, it is ``shardcache`` in the user's cache directory.
A `Config` that exists is valid. An unknown key, variable or argument is an error. No repr, row or
error shows a value of ``storage_options``, and no pickle holds a secret, except on the way into a
process that multiprocessing is spawning.
"""
# ruff: noqa: RUF009  (_opt is dataclasses.field with the help beside the default)

from __future__ import annotations

import contextlib
import dataclasses
import grp
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

#: The version of this library; pyproject.toml says the same, and a test compares them.
__version__ = "0.1.0"

logger = logging.getLogger(__name__)

NONE = "none"
#: The default of ``dir``, for people.
DEFAULT_DIR = "~/.cache/shardcache"
MIB = 1 << 20
# Patterns are compiled when first used: `import shardcache` stays light.
#: Storage options and HTTP headers that hold credentials: of s3fs, gcsfs, adlfs, botocore, aiohttp.
_CREDENTIALS = (
    r"(?i)(key$|key_?id$|secret|token|passw|passphrase|credential|sas|connection_string|cookie|"
    r"signature|(^|[_-])auth($|[_-]|oriz))"
)
# Greedy up to the last @: a password may hold / and @ of its own.
_LOGIN = r"(?is)://.*@"
_SCHEME = r"[a-z][a-z0-9+.-]*"
_VARIABLE = r"(?a)\$(?:(\w+)|\{(\w+)\})"
_ENDPOINT = r"(?i)https?://(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]{1,5})?(/[^?#@\s]*)?"
#: The highest group number, which says "leave it as it is", chown(2).
_NO_GROUP = (1 << 32) - 1


class StorageOptions(dict[str, object]):
    """Options for fsspec or S3 (key, secret, token, ...) that never print their values."""

    def __hash__(self) -> int:  # type: ignore[override]  # dataclasses take no other default
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without secrets.

        A spawned worker has to read the same bucket, and its pickle goes through a pipe. Any other
        pickle may end up in a file. `multiprocessing.process.AuthenticationString` does the same.
        """
        from multiprocessing.context import get_spawning_popen

        return StorageOptions, (dict(self) if get_spawning_popen() else _public(self),)

    def __repr__(self) -> str:
        return f"StorageOptions({_names_only(self)})"


def _public(value: object) -> object:
    """A value without the credentials inside it: those of tables, lists and URLs."""
    if isinstance(value, Mapping):
        kept = {n: _public(v) for n, v in value.items() if not re.search(_CREDENTIALS, str(n))}
        if gone := [str(name) for name in value if kept.get(name) != value[name]]:
            logger.warning(
                "storage options %s are left out of a pickle, or a part of them; whoever reads it "
                "needs credentials of its own (environment, profile, role)",
                ", ".join(gone),
            )
        return kept
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_public, value))
    if isinstance(value, str) and "://" in value:  # of a proxy, an endpoint
        return re.sub(_LOGIN, "://", value).partition("?")[0].partition("#")[0]
    return value


def _names_only(items: Mapping[str, object]) -> str:
    return ", ".join(f"{key}=***" for key in items)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute form of a path.

    Raises:
        ConfigError: the path is relative, and the working directory was removed.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is relative to the working directory, which was removed. Give an absolute "
            "path, or change to another directory."
        ) from None


# -- values: a parser takes what people write; its ValueError says what is wrong -------------------


def _directory(value: object) -> Path:
    text = str(value) if isinstance(value, str | Path) else ""
    if not text.strip() or "\0" in text:
        raise ValueError("is not a path")
    if "://" in text:
        raise ValueError("is a URL")
    for found in re.finditer(_VARIABLE, text):
        # os.path.expandvars keeps it: a directory called "$SCRATCH" would be the result.
        if not os.environ.get(name := found[1] or found[2]):
            raise ValueError(f"names ${name}, which is not set")
    text = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111  pathlib's raises
    if text.startswith("~"):
        raise ValueError("names a home directory that is not known")
    return absolute(text)


def _part_size(value: Any) -> int:
    size = units.parse_bytes(value)
    if size % MIB or not MIB <= size <= 1024 * MIB:
        raise ValueError("cannot be used")
    return size


def _function(value: object) -> object:
    if not callable(value):
        raise ValueError("cannot be called")
    return value


def _items(value: object) -> list[Any]:
    """The items of a list, or of text that separates them by commas."""
    if isinstance(value, str):
        return [] if value.strip().lower() == NONE else value.split(",")
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError("is no list")
    return list(value)


def _schemes(value: object) -> tuple[str, ...]:
    found = sorted({str(item).strip().lower() for item in _items(value)})
    if not all(re.fullmatch(_SCHEME, scheme) for scheme in found):
        raise ValueError("holds what is no scheme")
    return tuple(found)


def _tables(made: Any, *names: str) -> Callable[[object], tuple[Any, ...]]:
    """A parser of lists of ``made``: items are tables, or these fields with ``=`` between them."""

    def one(item: Any) -> object:
        if isinstance(item, made):
            return item
        if isinstance(item, str | Path):
            parts = str(item).strip().split("=", len(names) - 1)
            item = dict(zip(names, parts, strict=False))
        try:
            return made(**item)
        except TypeError:  # no table, or other fields: the error would show them
            raise ValueError("holds what cannot be used") from None

    return lambda value: tuple(map(one, _items(value)))


def _store(value: object) -> str:
    """A directory, or the URL of a store, in which a name may stand before an @."""
    text = str(value).strip() if isinstance(value, str | Path) else ""
    scheme, is_url, rest = text.partition("://")
    if not is_url:
        return os.fspath(_directory(text))
    user, at, _ = rest.rpartition("@")
    login = ":" in user or (at and not scheme.startswith(("abfs", "az", "oci")))
    if login or "?" in rest or not re.fullmatch(_SCHEME, scheme.lower()):
        raise ValueError("is no store")
    return text


def _storage_options(value: object) -> StorageOptions:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return StorageOptions(value)
    raise ValueError("is no table of names")


def _group(value: object) -> int:
    number = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if isinstance(value, str):
        text = value.strip()
        with contextlib.suppress(KeyError, ValueError):
            number = int(text) if text.isdecimal() else grp.getgrnam(text).gr_gid
    if not 0 <= number < _NO_GROUP:
        raise ValueError("is no group")
    return number


def group_name(gid: int) -> str:
    """What people call a group; its number where it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


def _endpoint(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(_ENDPOINT, text):
        raise ValueError("is no endpoint (credentials belong into the environment or a profile)")
    return text


class Kind(NamedTuple):
    """What is accepted as one kind of value, and how that is read and shown."""

    text: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def _above_zero(kind: Kind) -> Kind:
    def parse(value: Any) -> Any:
        found = kind.parse(value)
        if found in (0, Limit(bytes=0), Limit(percent=0.0)):
            raise ValueError("is nothing")
        return found

    return Kind(f"{kind.text} above 0", parse, kind.show)


def _opt(kind: Kind, default: Any, help: str) -> Any:
    # Not the repr of a function: a functools.partial would print its arguments.
    return field(default=default, repr=kind is not CALL, metadata={"kind": kind, "help": help})


def _choose(help: str, *names: str) -> Any:
    """One of some names, of which the first is the default."""
    kind = Kind(" or ".join(names), lambda value: units.parse_choice(value, names))
    return _opt(kind, names[0], help)


def _count(most: int, least: int = 1) -> Kind:
    return Kind(f"{least} to {most}", lambda value: units.parse_count(value, least, most))


def _listed(value: Sequence[object]) -> str:
    return ", ".join(map(str, value))


PATH = Kind("local directory", _directory)
BOOL = Kind("bool", units.parse_bool, lambda value: str(value).lower())
TIME = Kind("duration", units.parse_duration, units.exact_duration)
SOME_TIME = _above_zero(TIME)
LIMIT = Kind("size or %", units.parse_limit)
ROOM = _above_zero(LIMIT)
SIZE = _above_zero(Kind("size", units.parse_bytes, units.exact_bytes))
PART_SIZE = Kind("multiple of 1MiB up to 1GiB", _part_size, units.exact_bytes)
CALL = Kind("function of a path", _function, lambda value: getattr(value, "__name__", "function"))
TABLE = Kind("dict in code, table in TOML", _storage_options, _names_only)
SCHEMES = Kind("list of URL schemes", _schemes, _listed)
GROUP = Kind("name or number of a group", _group, group_name)
ENDPOINT = Kind("http(s) URL without credentials", _endpoint)
STORE = Kind("path, or URL without credentials", _store)


def _parse_all(made: Any) -> None:
    """Parse every field of a dataclass whose fields are made by `_opt`."""
    for option in fields(made):
        value = _parse(option, getattr(made, option.name), "argument")
        object.__setattr__(made, option.name, value)


@dataclass(frozen=True, slots=True)
class TierOption:
    """A directory in front of ``dir``, with limits of its own; see the option ``tiers``."""

    dir: Path = _opt(PATH, MISSING, "Where.")
    max_size: Limit | None = _opt(ROOM, None, "Most it may hold.")
    min_free: Limit = _opt(LIMIT, Limit(percent=10.0), "Space on its filesystem that stays free.")

    def __post_init__(self) -> None:
        _parse_all(self)

    def __str__(self) -> str:
        return str(self.dir) if self.max_size is None else f"{self.dir}={self.max_size}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where copies of shards are, or are to be kept; see the option ``upstreams``."""

    url: str = _opt(STORE, MISSING, "A directory, or scheme://... of a store.")
    write_back: bool = _opt(BOOL, False, "Whether what was fetched is copied there.")
    endpoint_url: str | None = _opt(ENDPOINT, None, "Of an S3 store that is not AWS.")
    storage_options: StorageOptions = _opt(TABLE, StorageOptions(), "Its own, for S3 or fsspec.")

    def __post_init__(self) -> None:
        _parse_all(self)

    def __str__(self) -> str:
        return self.url + (" (write_back)" if self.write_back else "")


TIERS = Kind("list of DIRECTORY=SIZE or tables", _tables(TierOption, "dir", "max_size"), _listed)
UPSTREAMS = Kind("list of paths, URLs or tables", _tables(Upstream, "url"), _listed)


@dataclass(frozen=True, slots=True)
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
    min_free: Limit = _opt(LIMIT, Limit(percent=10.0), "Space on the filesystem that stays free.")
    ephemeral_limit: int | None = _opt(
        SIZE, None, "Kubernetes' ephemeral-storage limit of the pod; nine tenths of it may be held."
    )
    max_age: float | None = _opt(SOME_TIME, None, "Entries unused for so long may be evicted.")
    tiers: tuple[TierOption, ...] = _opt(
        TIERS, (), "Faster places in front of dir, filled first, such as /dev/shm/shards=50GB."
    )
    policy: Literal["working-set", "lru", "fifo"] = _choose(
        "What goes first; working-set keeps what running jobs use.", "working-set", "lru", "fifo"
    )
    protect_for: float = _opt(
        SOME_TIME, 86400.0, "Unused for so long, an entry of a running job may go, too."
    )
    isolation: Literal["node", "rank", "job"] = _choose(
        "Who shares one copy.", "node", "rank", "job"
    )
    fill: Literal["follow", "complete"] = _choose(
        "Read a shard while it is fetched, or when all of it is there.", "follow", "complete"
    )
    prefetch: int = _opt(_count(64, 0), 3, "Shards fetched ahead of the one that is read.")
    connections: int = _opt(_count(256), 32, "Most connections per process, of 64 per node.")
    part_size: int | None = _opt(PART_SIZE, None, "Bytes per request; 16 MiB unless it is set.")
    attempts: int = _opt(_count(100), 5, "Tries before a transient error counts as final.")
    patience: float = _opt(TIME, 300.0, "Longest wait for a store that throttles, or for a login.")
    deadline: float | None = _opt(SOME_TIME, None, "Most time for the whole fetch of a shard.")
    timeout: float = _opt(SOME_TIME, 30.0, "No byte for so long is a failed attempt.")
    lock_timeout: float = _opt(TIME, 1800.0, "Longest wait for another process's fetch.")
    stale_after: float = _opt(SOME_TIME, 120.0, "A partial not growing for so long is stale.")
    strict: bool = _opt(BOOL, False, "Raise on a fault of the cache instead of streaming.")
    validate: Callable[[Path], None] | None = _opt(
        CALL, None, "Called on each fetched shard before it is published; in code only."
    )
    fsync: Literal["verify-after-boot", "fsync", "none"] = _choose(
        "What guards entries against a crash of the machine.", "verify-after-boot", "fsync", "none"
    )
    locks: Literal["auto", "flock", "lease"] = _choose(
        "How to lock; auto is flock on local filesystems, else leases among nodes.",
        "auto",
        "flock",
        "lease",
    )
    touch_interval: float = _opt(TIME, 600.0, "Last use is recorded at most this often.")
    stats: bool = _opt(BOOL, True, "Count hits, bytes and waits for `shardcache stats`.")
    allow_schemes: tuple[str, ...] = _opt(SCHEMES, (), "Extra URL schemes; pipe runs a shell.")
    upstreams: tuple[Upstream, ...] = _opt(
        UPSTREAMS, (), "Nearer copies, asked before the origin: a NAS, a store of the cluster."
    )
    cache_local: bool = _opt(BOOL, False, "Cache plain paths and file:// too (slow mounts).")
    storage_options: StorageOptions = _opt(
        TABLE, StorageOptions(), "Options for fsspec or S3; no variable sets them."
    )
    endpoint_url: str | None = _opt(ENDPOINT, None, "S3 endpoint if it is not that of AWS.")
    shared_group: int | None = _opt(
        GROUP, None, "Group whose members share the cache; the default is one user's own."
    )

    def __post_init__(self) -> None:
        _parse_all(self)
        for one, other in itertools.combinations([*(t.dir for t in self.tiers), self.dir], 2):
            if one.is_relative_to(other) or other.is_relative_to(one):
                raise ConfigError(
                    f"the tiers {one} and {other} are not apart. Give each a directory of its own."
                )

    def replace(self, **changes: Any) -> Config:
        """A copy with ``changes``, validated like the original; None clears an option."""
        return dataclasses.replace(self, **changes)

    def limits(self) -> dict[str, str]:
        """The options that limit the cache, as text that parses back."""
        kinds = {name: _FIELDS[name].metadata["kind"] for name in _LIMITS}
        return {name: _show(kind, getattr(self, name)) for name, kind in kinds.items()}

    def by_tier(self) -> tuple[Config, ...]:
        """The same for each tier alone, the fastest first; the last one is ``dir``."""
        alone = self.replace(tiers=()) if self.tiers else self
        faster = [
            alone.replace(dir=t.dir, max_size=t.max_size, min_free=t.min_free, ephemeral_limit=None)
            for t in self.tiers
        ]
        return (*faster, alone)


#: How much the cache may hold, and what goes first.
_LIMITS = ("max_size", "min_free", "ephemeral_limit", "max_age", "policy", "protect_for")
_FIELDS = {option.name: option for option in fields(Config)}

Size = int | str
Duration = float | str


class Options(TypedDict, total=False):
    """What `Cache` takes by name, for type checkers and editors; None is the default of each."""

    max_size: Size | None
    min_free: Size | None
    ephemeral_limit: Size | None
    max_age: Duration | None
    tiers: str | Sequence[str | Path | Mapping[str, Any] | TierOption] | None
    policy: Literal["working-set", "lru", "fifo"] | None
    protect_for: Duration | None
    isolation: Literal["node", "rank", "job"] | None
    fill: Literal["follow", "complete"] | None
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
    fsync: Literal["verify-after-boot", "fsync", "none"] | None
    locks: Literal["auto", "flock", "lease"] | None
    touch_interval: Duration | None
    stats: bool | None
    allow_schemes: str | Collection[str] | None
    upstreams: str | Sequence[str | Path | Mapping[str, Any] | Upstream] | None
    cache_local: bool | None
    storage_options: Mapping[str, object] | None
    endpoint_url: str | None
    shared_group: int | str | None


# -- where values come from ------------------------------------------------------------------------

_PREFIX = "SHARDCACHE_"
#: Variables with our prefix that are no options: those of `ranks` and `sync`, and those that
#: Kubernetes gives every pod beside a Service called "shardcache" or "shardcache-x".
_NO_OPTIONS = rf"{_PREFIX}(CONFIG|RANK|JOB|SYNC_DIR|(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?)"


class Loaded(NamedTuple):
    """A `Config` and, for each option, the source of its value.

    A source is ``argument``, ``environment NAME``, ``file PATH`` or ``default``. The default of
    ``dir`` is the user's cache directory.
    """

    config: Config
    sources: dict[str, str]

    def completed(self, limits: Mapping[str, str], source: str) -> Loaded:
        """The same with ``limits``, see `Config.limits`, where nobody has set another one.

        Raises:
            ConfigError: a value that cannot be used.
        """
        changes = {
            name: limits[name]
            for name, value in self.config.limits().items()
            if self.sources[name] == "default" and limits.get(name, value) != value
        }
        sources = {**self.sources, **dict.fromkeys(changes, source)}
        return Loaded(self.config.replace(**changes), sources)


def load(
    explicit: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Loaded:
    """The options in force for ``explicit`` arguments, ``environ`` and TOML ``files``.

    In the environment and in TOML the text ``none`` clears an option that may be unset, and
    sizes need a unit.

    Args:
        explicit: options given in code; a value of None means "not given".
        environ: the environment (default ``os.environ``); empty variables are not set.
        files: exactly these files, which must exist, instead of the usual places
            (``$SHARDCACHE_CONFIG``, ``./shardcache.toml``, the user's, ``/etc``).

    Raises:
        ConfigError: an unknown name, a value that cannot be used, a file that cannot be
            read, or no ``dir`` anywhere and no home directory.
    """
    env = {k: v for k, v in (os.environ if environ is None else environ).items() if v.strip()}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_FIELDS, "default")
    for name, value, source in itertools.chain(
        ((name, value, "argument") for name, value in (explicit or {}).items()),
        (
            (variable.removeprefix(_PREFIX).lower(), env[variable], f"environment {variable}")
            for variable in sorted(env)
            if variable.startswith(_PREFIX) and not re.fullmatch(_NO_OPTIONS, variable)
        ),
        _from_files(_usual_files(env) if files is None else files),
        _from_webdataset(env),
    ):
        if name not in _FIELDS:
            import difflib  # only a mistake has to wait for it

            similar = difflib.get_close_matches(name, _FIELDS, n=1)
            known = f"Did you mean {similar[0]}?" if similar else f"Known: {', '.join(_FIELDS)}."
            raise ConfigError(f"unknown option {name!r} ({source}). {known}")
        if value is not None and sources[name] == "default":
            values[name], sources[name] = _parse(_FIELDS[name], value, source), source
    if "dir" not in values:
        values["dir"] = _user_directory(env)
    return Loaded(Config(**values), sources)


def _user_directory(env: Mapping[str, str]) -> Path:
    """Where a user's cache is if nobody says where."""
    caches = env.get("XDG_CACHE_HOME", "")
    if not caches.startswith("/"):  # the XDG specification has relative paths ignored
        caches = "~/.cache"
    try:
        return _directory(f"{caches}/shardcache")
    except ValueError:
        raise ConfigError(
            "no cache directory is set, and this user has no home directory. Set one in one of "
            'three ways: Cache("/local/nvme/shards") in code or --dir on the command line; '
            "SHARDCACHE_DIR=/local/nvme/shards in the environment; "
            'dir = "/local/nvme/shards" in shardcache.toml.'
        ) from None


def _from_webdataset(env: Mapping[str, str]) -> Iterator[tuple[str, str | None, str]]:
    """WebDataset's own variables, honoured where nothing of ours is set."""
    yield "dir", env.get("WDS_CACHE"), "environment WDS_CACHE"
    size = env.get("WDS_CACHE_SIZE", "").strip()
    size += "B" if size[-1:].isdigit() else ""  # WebDataset takes a number of bytes
    yield "max_size", size or None, "environment WDS_CACHE_SIZE"


def _usual_files(env: Mapping[str, str]) -> list[Path]:
    home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '')}/.config"
    usual = ["shardcache.toml", f"{home}/shardcache/config.toml", "/etc/shardcache.toml"]
    # os.path.exists, for it takes a directory we may not enter (a $HOME of another user in a
    # container) as "not there", where Path.exists raises.
    found = [path for path in usual if os.path.exists(path)]  # noqa: PTH110
    stated = env.get("SHARDCACHE_CONFIG")
    return [Path(path) for path in ([stated, *found] if stated else found)]


def _from_files(paths: Sequence[Path]) -> Iterator[tuple[str, object, str]]:
    advice = "Correct the file or name another with --config or SHARDCACHE_CONFIG"
    for path in map(absolute, paths):
        import tomllib  # here: most have no file, and it would be a third of importing this module

        try:
            table = tomllib.loads(path.read_bytes().decode())
        except OSError as exn:
            raise ConfigError(f"{path} cannot be read: {exn.strerror}. {advice}.") from exn
        except ValueError as exn:
            raise ConfigError(f"{path} is not valid TOML: {exn}. {advice}.") from exn
        for name, value in table.items():
            # A relative ``dir`` is relative to its file.
            if name == "dir" and isinstance(value, str) and not re.match(r"[~$]|\w+://|$", value):
                value = path.parent / value
            yield name, value if name == "storage_options" else _spelt(value), f"file {path}"


def _spelt(value: Any) -> Any:
    """A value of a file with its numbers as text, so that sizes need a unit there, too."""
    if isinstance(value, list):
        return list(map(_spelt, value))
    if isinstance(value, dict):
        return {k: v if k == "storage_options" else _spelt(v) for k, v in value.items()}
    return str(value) if type(value) in (int, float) else value


def _parse(option: dataclasses.Field[Any], value: object, source: str) -> object:
    cleared = isinstance(value, str) and value.strip().lower() == NONE
    if option.default is None and (value is None or cleared):
        return None
    kind = option.metadata["kind"]
    try:
        return kind.parse(value)
    except ConfigError as exn:
        message = exn.message
    except ValueError as exn:
        # Only the type of what may be or hold a secret: of tables, and of URLs with more than a
        # place in them.
        text = str(value) if isinstance(value, str | int | float | Path | Limit) else ""
        hidden = not text or kind is TABLE or not {*"@?#"}.isdisjoint(text)
        shown = f"a {type(value).__name__}" if hidden else repr(text[:80])
        unset = f", or {NONE}" if option.default is None else ""
        message = f"{shown} {exn}. Accepted: {kind.text}{unset}."
    raise ConfigError(f"{option.name} ({source}): {message}")


# -- what people are shown -------------------------------------------------------------------------


class Option(NamedTuple):
    """One option as text, secrets hidden: what it is, its value in force, and who set it."""

    name: str
    type: str
    default: str
    help: str
    value: str
    source: str


def _show(kind: Kind, value: object) -> str:
    return NONE if value is None or value in ((), {}) else str(kind.show(value))


def describe(loaded: Loaded) -> tuple[Option, ...]:
    """All options in their order of declaration, with what is in force."""
    rows = []
    for name, option in _FIELDS.items():
        kind, help = option.metadata["kind"], option.metadata["help"]
        default = DEFAULT_DIR if option.default is MISSING else _show(kind, option.default)
        value = _show(kind, getattr(loaded.config, name))
        rows.append(Option(name, kind.text, default, help, value, loaded.sources[name]))
    return tuple(rows)
