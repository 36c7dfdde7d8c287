"""Every option of the library: its type, its default, its help, and where it was set.

One declaration serves the keyword arguments of ``Cache``, the keys of the TOML files, the
``SHARDCACHE_*`` variables, the table in the README and ``shardcache config``. First wins, key by
key::

    argument > SHARDCACHE_* > TOML files > WDS_CACHE, WDS_CACHE_SIZE > default

A `Config` that exists is valid. An unknown key, variable or argument is an error. No repr, row or
error shows a value of ``storage_options``, and no pickle holds a secret, except on the way into a
process that multiprocessing is spawning.
"""
# ruff: noqa: RUF009  (_opt is dataclasses.field with the help beside the default)

from __future__ import annotations

import contextlib
import grp
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.units import Limit

#: The version of this library; pyproject.toml says the same, and a test compares them.
__version__ = "0.1.0"

logger = logging.getLogger(__name__)

NONE = "none"
MIB = 1 << 20
# Patterns are compiled when first used: `import shardcache` stays light.
#: Storage options and HTTP headers that hold credentials: of s3fs, gcsfs, adlfs, botocore, aiohttp.
_CREDENTIALS = (
    r"(?i)(key$|key_?id$|secret|token|passw|passphrase|credential|sas|connection_string|cookie|"
    r"signature|(^|[_-])auth($|[_-]|oriz))"
)
# Greedy up to the last @: a password may hold / and @ of its own.
_USERINFO = r"(?is)^([a-z][a-z0-9+.-]*://)?.*@"
_QUERY = r"(?s)[?#].*"
_SCHEME = r"[a-z][a-z0-9+.-]*"
_VARIABLE = r"(?a)\$(?:(\w+)|\{(\w+)\})"
_ENDPOINT = r"(?i)https?://(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]{1,5})?(/[^?#@\s]*)?"
_HIDDEN = "***"
#: The highest group number, which says "leave it as it is", chown(2).
_NO_GROUP = (1 << 32) - 1


class StorageOptions(dict[str, object]):
    """Options for fsspec or S3 (key, secret, token, ...) that never print their values."""

    def __hash__(self) -> int:  # type: ignore[override]  # names only: values may be anything
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without secrets.

        A spawned worker has to read the same bucket, and its pickle goes through a pipe. Any other
        pickle may end up in a file. `multiprocessing.process.AuthenticationString` does the same.
        """
        from multiprocessing.context import get_spawning_popen

        items = dict(self)
        return StorageOptions, (items if get_spawning_popen() else _without_secrets(items),)

    def __repr__(self) -> str:
        return f"StorageOptions({_names_only(self)})"


def _without_secrets(items: Mapping[Any, object]) -> dict[Any, object]:
    kept = {n: _public(value) for n, value in items.items() if not re.search(_CREDENTIALS, str(n))}
    for name in items:
        if kept.get(name) != items[name]:
            logger.warning(
                "storage option %s is left out of a pickle, or a part of it; who reads it needs "
                "credentials of its own (environment, profile, role)",
                name,
            )
    return kept


def _public(value: object) -> object:
    """A value without the credentials inside it: those of tables, lists and URLs."""
    if isinstance(value, Mapping):
        return _without_secrets(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_public, value))
    if isinstance(value, str) and "://" in value:  # of a proxy, an endpoint
        return re.sub(_QUERY, "", re.sub(_USERINFO, r"\1", value))
    return value


def _names_only(items: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={_HIDDEN}" for key in items)


def _redact(text: str) -> str:
    """``text`` without what stands before an ``@``, and a URL without its query."""
    shown = re.sub(_USERINFO, rf"\1{_HIDDEN}@", text)
    return re.sub(_QUERY, f"?{_HIDDEN}", shown) if "://" in shown else shown


# -- values: a parser takes what people write; its ValueError says what is wrong -------------------


def _directory(value: object, base: str = "") -> Path:
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
    return Path(base, text).absolute()


def _above_zero(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As ``parse``, for values that must not be nothing."""

    def parsed(value: Any) -> Any:
        found = parse(value)
        if found in (0, Limit(bytes=0), Limit(percent=0.0)):
            raise ValueError("is nothing")
        return found

    return parsed


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
    """A directory, or the URL of a store."""
    text = str(value).strip() if isinstance(value, str | Path) else ""
    if "://" not in text:
        return os.fspath(_directory(text))
    login = re.match(_USERINFO, text) and not text.startswith(("abfs", "az", "oci"))
    if login or "?" in text or not re.fullmatch(_SCHEME, text.partition("://")[0].lower()):
        raise ValueError("is no store")
    return text


def _storage_options(value: object) -> StorageOptions:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return StorageOptions(value)
    # Not even a string is shown: it may be a secret in the wrong place.
    accepted = "a dict in code, a [storage_options] table in TOML"
    raise ConfigError(f"a {type(value).__name__} is no table of names. Accepted: {accepted}.")


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
    parse: Callable[..., Any]
    show: Callable[[Any], str] = str


def _opt(kind: Kind, default: Any, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


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
SOME_TIME = Kind("duration above 0", _above_zero(units.parse_duration), units.exact_duration)
LIMIT = Kind("size or %", units.parse_limit)
ROOM = Kind("size or % above 0", _above_zero(units.parse_limit))
SIZE = Kind("size above 0", _above_zero(units.parse_bytes), units.exact_bytes)
PART_SIZE = Kind("multiple of 1MiB up to 1GiB", _part_size, units.exact_bytes)
# Not the repr: a functools.partial would print its arguments.
CALL = Kind("function of a path", _function, lambda value: getattr(value, "__name__", "function"))
TABLE = Kind("table", _storage_options, _names_only)
SCHEMES = Kind("list of URL schemes", _schemes, _listed)
GROUP = Kind("name or number of a group", _group, group_name)
ENDPOINT = Kind("http(s) URL without credentials", _endpoint, _redact)
STORE = Kind("path, or URL without credentials", _store, _redact)


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
    min_free: Limit = _opt(LIMIT, Limit(percent=5.0), "Space on its filesystem that stays free.")

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
        return _redact(self.url) + (" (write_back)" if self.write_back else "")


TIERS = Kind("list of DIRECTORY=SIZE or tables", _tables(TierOption, "dir", "max_size"), _listed)
UPSTREAMS = Kind("list of paths, URLs or tables", _tables(Upstream, "url"), _listed)

_PREFIX = "SHARDCACHE_"
#: Variables with our prefix that are no options; the last two belong to `shardcache.ranks`.
OTHER_VARIABLES = frozenset(
    {"SHARDCACHE_CONFIG", "SHARDCACHE_RANK", "SHARDCACHE_JOB", "SHARDCACHE_SYNC_DIR"}
)
#: WebDataset's own variables, honoured where nothing of ours is set.
_WDS_VARIABLES = {"dir": "WDS_CACHE", "max_size": "WDS_CACHE_SIZE"}
#: Kubernetes puts the address of every Service into the environment of the pods beside
#: it ("service links"); a Service called "shardcache" or "shardcache-x" is no typo.
_SERVICE_LINK = rf"{_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?"


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
    prefetch: int = _opt(_count(64, 0), 2, "Shards fetched ahead of the one that is read.")
    connections: int = _opt(_count(256), 32, "Most connections to the origin per process.")
    part_size: int | None = _opt(PART_SIZE, None, "Bytes per request; 16 MiB unless it is set.")
    attempts: int = _opt(_count(100), 5, "Tries before a transient error counts as final.")
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
        TABLE, StorageOptions(), "Options for fsspec or S3; in code or TOML only."
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
                    f"the tiers {one} and {other} are not apart. Give each a directory of its own.",
                    option="tiers",
                )

    def replace(self, **changes: object) -> Config:
        """A copy with ``changes``, validated like the original; None clears an option."""
        for name in changes:
            _check_known(name, "argument")
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ parses them

    def by_tier(self) -> tuple[Config, ...]:
        """The same for each tier alone, the fastest first; the last one is ``dir``."""
        alone = replace(self, tiers=()) if self.tiers else self
        faster = [
            alone.replace(dir=t.dir, max_size=t.max_size, min_free=t.min_free, ephemeral_limit=None)
            for t in self.tiers
        ]
        return (*faster, alone)

    def __repr__(self) -> str:
        """What differs from the defaults, secrets hidden."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        shown = (f"{f.name}={_show(f, value)!r}" for f, value in values if value != f.default)
        return f"Config({', '.join(shown)})"


_FIELDS: dict[str, Field[Any]] = {option.name: option for option in fields(Config)}


# -- where values come from ------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A `Config` and, for each option, the source of its value.

    A source is ``argument``, ``environment NAME``, ``file PATH`` or ``default``.
    """

    config: Config
    sources: dict[str, str]


class _Given(NamedTuple):
    name: str
    value: object
    source: str
    base: str = ""  # what a relative ``dir`` is relative to


def load(
    explicit: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Loaded:
    """The options in force for ``explicit`` arguments, ``environ`` and TOML ``files``.

    In the environment and in TOML the text ``none`` clears an option that may be unset.

    Args:
        explicit: options given in code; a value of None means "not given".
        environ: the environment (default ``os.environ``); empty variables are not set.
        files: exactly these files, which must exist, instead of the usual places
            (``$SHARDCACHE_CONFIG``, ``./shardcache.toml``, the user's, ``/etc``).

    Raises:
        ConfigError: an unknown name, a value that cannot be used, a file that cannot be
            read, or no ``dir`` anywhere.
    """
    env = os.environ if environ is None else environ
    arguments = (_Given(*item, "argument") for item in (explicit or {}).items())
    wds = (
        _Given(name, env[variable], f"environment {variable}")
        for name, variable in _WDS_VARIABLES.items()
        if env.get(variable, "").strip()
    )
    given: dict[str, _Given] = {}
    for item in itertools.chain(arguments, _environment(env), _from_files(env, files), wds):
        _check_known(item.name, item.source)
        if item.value is not None:
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
        context = {"base": item.base} if name == "dir" else {}
        values[name] = _parse(_FIELDS[name], item.value, item.source, **context)
    sources = {name: given[name].source if name in given else "default" for name in _FIELDS}
    return Loaded(Config(**values), sources)


def _environment(env: Mapping[str, str]) -> Iterator[_Given]:
    for variable in sorted(env):
        ours = variable.startswith(_PREFIX) and variable not in OTHER_VARIABLES
        if ours and env[variable].strip() and not re.fullmatch(_SERVICE_LINK, variable):
            name = variable.removeprefix(_PREFIX).lower()
            yield _Given(name, env[variable], f"environment {variable}")


def _from_files(env: Mapping[str, str], files: Sequence[Path] | None) -> Iterator[_Given]:
    paths = [Path(file) for file in files or ()]
    if files is None:
        if stated := env.get("SHARDCACHE_CONFIG", "").strip():
            paths.append(Path(stated))
        home = env.get("XDG_CONFIG_HOME", "")
        if not home.startswith("/"):  # the XDG specification: ignore a relative one
            home = f"{env['HOME']}/.config" if env.get("HOME") else ""
        usual = [Path("shardcache.toml"), Path("/etc/shardcache.toml")]
        if home:
            usual.insert(1, Path(home, "shardcache", "config.toml"))
        # os.path.exists, for it takes a directory we may not enter (a $HOME of another
        # user in a container) as "not there", where Path.exists raises.
        paths += [path for path in usual if os.path.exists(path)]  # noqa: PTH110
    for path in map(Path.absolute, paths):
        for name, value in _table(path).items():
            yield _Given(name, value, f"file {path}", str(path.parent))


def _table(path: Path) -> dict[str, object]:
    import tomllib  # here: it would be a third of the cost of importing this module

    advice = "Correct the file or name another with --config or SHARDCACHE_CONFIG"
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as exn:
        raise ConfigError(f"{path} cannot be read: {exn.strerror}. {advice}.") from exn
    except ValueError as exn:
        raise ConfigError(f"{path} is not valid TOML: {exn}. {advice}.") from exn


def _check_known(name: str, source: str) -> None:
    """Refuse what is no option, or cannot be given there."""
    message = None
    if name not in _FIELDS:
        import difflib  # only a mistake has to wait for it

        similar = difflib.get_close_matches(name, _FIELDS, n=1)
        hint = f"Did you mean {similar[0]}?" if similar else f"Known: {', '.join(sorted(_FIELDS))}."
        message = f"unknown option {name!r} ({source}). {hint}"
    elif name == "validate" and source != "argument":
        message = f"{name} ({source}) can only be given in code. Remove it there."
    elif name == "storage_options" and source.startswith("environment"):
        message = (
            f"{name} ({source}) can only be given in code or as a TOML table. Remove it there."
        )
    if message is not None:
        raise ConfigError(message, option=name, source=source)


def _parse(option: Field[Any], value: object, source: str, **context: Any) -> object:
    cleared = isinstance(value, str) and value.strip().lower() == NONE
    if option.default is None and (value is None or cleared):
        return None
    name, kind = option.name, option.metadata["kind"]
    try:
        return kind.parse(value, **context)
    except ConfigError as exn:
        message = exn.message
    except ValueError as exn:
        # Of other types only the name: they may hold anything, secrets included.
        plain = isinstance(value, str | int | float | Path)
        shown = repr(_redact(str(value))[:80]) if plain else f"a {type(value).__name__}"
        unset = f", or {NONE}" if option.default is None else ""
        message = f"{shown} {exn}. Accepted: {kind.text}{unset}."
    raise ConfigError(f"{name} ({source}): {message}", option=name, source=source)


# -- what people are shown -------------------------------------------------------------------------


class Option(NamedTuple):
    """One option as text, secrets hidden: what it is, its value in force, and who set it."""

    name: str
    type: str
    default: str
    help: str
    value: str
    source: str


def describe(loaded: Loaded) -> tuple[Option, ...]:
    """All options in their order of declaration, with what is in force."""
    rows = []
    for name, option in _FIELDS.items():
        default = "required" if option.default is MISSING else _show(option, option.default)
        value = _show(option, getattr(loaded.config, name))
        kind, help = option.metadata["kind"], option.metadata["help"]
        rows.append(Option(name, kind.text, default, help, value, loaded.sources[name]))
    return tuple(rows)


def _show(option: Field[Any], value: object) -> str:
    unset = value is None or value in ((), {})
    return NONE if unset else str(option.metadata["kind"].show(value))
