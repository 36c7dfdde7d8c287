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

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardcache.errors import ConfigError
from shardcache.optionkinds import (
    BOOL,
    CALL,
    ENDPOINT,
    FILL,
    FSYNC,
    GROUP,
    ISOLATION,
    LIMIT,
    LIST,
    LOCKS,
    NONE,
    PART_SIZE,
    PATH,
    POLICY,
    ROOM,
    SIZE,
    SOME_TIME,
    TABLE,
    TIERS,
    TIME,
    UPSTREAMS,
    Kind,
    count,
)
from shardcache.optionvalues import StorageOptions, TierOption, Upstream
from shardcache.units import Limit

__all__ = ["OTHER_VARIABLES", "Config", "Loaded", "Option", "Setting", "StorageOptions"]
__all__ += ["describe", "load", "options"]

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
        POLICY, "working-set", "What goes first; working-set keeps what running jobs use."
    )
    protect_for: float = _opt(
        SOME_TIME, 86400.0, "Unused for so long, an entry of a running job may go, too."
    )
    isolation: Literal["node", "rank", "job"] = _opt(ISOLATION, "node", "Who shares one copy.")
    fill: Literal["follow", "complete"] = _opt(
        FILL, "follow", "Read a shard while it is fetched, or when all of it is there."
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
        FSYNC, "verify-after-boot", "What guards entries against a crash of the machine."
    )
    locks: Literal["auto", "flock", "node", "lease"] = _opt(
        LOCKS, "auto", "Where locks are: in the cache (flock), on the node, or leased by nodes."
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
