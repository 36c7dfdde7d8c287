"""What a shard is called: canonical URL, key, file name, and the text people may see.

Invariants:

* Two URLs share a key only if they name the same object. Object keys are exact
  bytes: no percent-decoding, no ``..`` or ``//`` folding, no Unicode folding.
* One object keeps one key whatever its signature: credentials in the query or
  before an ``@`` are no part of the identity, ``versionId`` and all other query
  parameters are.
* Nothing but ``ShardURL.raw`` holds a credential, and ``raw`` is for the origin
  only: never for logs, errors, file names or sidecars.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from shardcache.errors import ConfigError

#: Schemes read without asking. ``pipe`` runs a shell, so it is not among them.
DEFAULT_SCHEMES = frozenset(
    {"abfs", "abfss", "az", "file", "gs", "hf", "http", "https", "memory", "oci", "s3"}
)
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}

#: Schemes whose ``user:password@`` logs in. Elsewhere a part before an ``@`` is a
#: name (``abfs://container@account``, ``oci://bucket@namespace``).
_LOGINS = frozenset({"ftp", "http", "https", "sftp", "smb", "ssh", "webdav", "webdavs"})
#: Longest canonical URL in bytes: S3 keys have 1 KiB, servers refuse URLs beyond
#: 8 KiB, and a sidecar must be able to hold it.
_MAX_CANONICAL = 8192

#: Query parameters that are always credentials.
_SECRETS = frozenset(
    {"access_token", "api_key", "apikey", "auth_token", "authorization", "awsaccesskeyid"}
    | {"googleaccessid", "password", "secret", "security-token", "sig", "signature", "token"}
)
#: Short names that belong to a signature only when that signature is there:
#: Azure SAS (beside ``sig``), AWS SigV2 and CloudFront (beside ``Signature``).
_BESIDE = {
    "sig": frozenset(
        {"sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sr", "sdd", "skoid", "sktid"}
        | {"skt", "ske", "sks", "skv", "saoid", "suoid", "scid"}
    ),
    "signature": frozenset({"expires", "policy", "key-pair-id"}),
}
_AUTH_PREFIXES = ("x-amz-", "x-goog-", "x-oss-", "x-cos-")

# Patterns are compiled when first used: `import shardcache` stays light.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*):(//)?"
_CHAIN = r"(^[A-Za-z0-9+.-]+::|::[A-Za-z0-9+.-]+:/)"
_UNSAFE = r"[^A-Za-z0-9._-]+"
_TARGET = r"[a-z][a-z0-9+.-]*://[^\s\"'|;<>()]+"
_CONTROL = r"[\x00-\x1f\x7f]"
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: 255 bytes is the limit of every common filesystem; leave room for suffixes.
_MAX_BASENAME = 120
#: Files that shardcache writes beside a shard's own file; no shard gets one of these names.
SIDE_FILES = frozenset({"meta.json", "progress", "samples.idx"})

# Of these schemes a name without a password is no login.
_NAMED = "(?:abfss?|az|oci)://"
#: What is taken out of text that people see, and what is left of it.
_REDACTED = {
    # Logins. Secret keys of AWS hold slashes.
    r"(?i)\b(s3[an]?://)[^\s\"'/@]*:[^\s\"'@]*@": r"\1",
    rf"(?i)\b({_NAMED})[^/\s@\"':]*:[^/\s@\"']*@": r"\1",
    rf"(?i)\b(?!{_NAMED})([a-z][a-z0-9+.-]*://)[^/\s@\"']+@": r"\1",
    # Headers and parameters.
    r"(?i)\b((?:proxy-)?authorization:\s*(?:[a-z]+\s+)?)[^\s\"']+": r"\1***",
    r"(?i)\b((?:x-(?:amz|goog|oss|cos)-[a-z0-9-]+|key-pair-id|policy|"
    + "|".join(map(re.escape, sorted(_SECRETS)))
    + r")=)[^&\s\"'<>]+": r"\1***",
}


@dataclass(frozen=True, slots=True)
class ShardURL:
    """One shard's names."""

    #: As it was given, signatures included; only origins read it. Empty for a pickled command.
    raw: str = field(repr=False)
    scheme: str  # lower case; ``file`` for plain paths
    canonical: str  # the identity in words, free of credentials; also what people see
    key: str  # 32 hexadecimal digits, blake2b-128 of the canonical URL and endpoint
    basename: str  # a safe file name that keeps the shard's own suffix
    version_id: str | None = None  # of the object, where the URL asks for one
    #: What a command says about its client: ``endpoint_url``, ``profile``, ``region_name``.
    options: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without credentials.

        A command is left out whole: what is secret in it cannot be told.
        """
        from multiprocessing.context import get_spawning_popen

        raw = self.raw
        if get_spawning_popen() is None:
            raw = "" if self.scheme == "pipe" else self.canonical
        names = (self.scheme, self.canonical, self.key, self.basename, self.version_id)
        return ShardURL, (raw, *names, self.options)

    @property
    def is_local(self) -> bool:
        """Whether this is a path of a filesystem mounted here."""
        return self.scheme == "file"

    @property
    def local_path(self) -> Path:
        """The path of a ``file`` URL."""
        return Path(self.canonical.removeprefix("file://"))

    def bucket_and_key(self) -> tuple[str, str]:
        """Bucket and object key of an ``s3`` URL."""
        bucket, _, name = self.canonical.removeprefix("s3://").partition("/")
        return bucket, name.removesuffix(f"?versionId={self.version_id}")

    def __str__(self) -> str:
        return self.canonical


def parse_url(
    url: str, *, endpoint: str | None = None, allow_schemes: Collection[str] = ()
) -> ShardURL:
    """Name the shard behind a URL or a plain path.

    Args:
        url: which.
        endpoint: the S3 endpoint in force; None and ``*.amazonaws.com`` mean AWS. One bucket name
            on two endpoints is two objects.
        allow_schemes: schemes allowed beyond `DEFAULT_SCHEMES`.

    Raises:
        ConfigError: the URL is malformed, too long, or of a scheme that is not allowed.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a shard URL must be a string, not {type(url).__name__}")
    url = url.removeprefix("shardcache::")
    if not url:
        raise ConfigError("a shard URL must not be empty")
    if re.search(_CONTROL, url):
        # Replaced before redacting, or what follows a line end inside a signature would show.
        shown = redact(re.sub(_CONTROL, "\N{REPLACEMENT CHARACTER}", url))
        raise ConfigError(f"{shown!r} holds a control character; is a line end left in it?")
    match = re.match(_SCHEME, url)
    scheme = match.group(1).lower() if match else "file"
    scheme = _ALIASES.get(scheme, scheme)
    if scheme != "pipe" and re.search(_CHAIN, url):
        raise ConfigError(f"{redact(url)} is a chain of URLs; give the cache the origin's own URL")
    if scheme not in DEFAULT_SCHEMES and scheme not in allow_schemes:
        # Of a command nothing is shown: what is secret in it cannot be told.
        shown = "'pipe:' URLs run a shell command" if scheme == "pipe" else redact(url)
        known = ", ".join(sorted(DEFAULT_SCHEMES))
        raise ConfigError(
            f"{shown}: the scheme {scheme!r} is not one of {known}; pass "
            f"allow_schemes=[{scheme!r}] if you trust every shard list and something can read it"
        )
    rest = url[match.end() if match else 0 :]
    version_id: str | None = None
    if scheme == "file":
        canonical = name = _file(url, rest)
    elif scheme == "s3":
        canonical, version_id, name = _s3(url, rest)
    elif scheme == "pipe":
        canonical, name = _pipe(rest.strip()), "pipe"
    else:
        canonical, name = _generic(url, scheme, rest)
    identity = canonical
    if scheme == "s3" and (own := _own_endpoint(endpoint)):
        identity = f"{canonical}\0{own}"
    elif scheme == "pipe":  # what looks like a credential may be all that tells two commands apart
        identity = f"pipe:{rest.strip()}"
    try:
        # Paths may be any bytes; everything else is text.
        encoded = identity.encode("utf-8", "surrogateescape" if scheme == "file" else "strict")
    except UnicodeEncodeError as exn:
        raise ConfigError(f"{redact(url)!r} is not text that UTF-8 can hold") from exn
    if len(encoded) > _MAX_CANONICAL:
        raise ConfigError(
            f"{redact(url)[:80]}... has {len(encoded)} bytes; a URL may have {_MAX_CANONICAL}"
        )
    key = hashlib.blake2b(encoded, digest_size=16, usedforsecurity=False).hexdigest()
    return ShardURL(url, scheme, canonical, key, _basename(name), version_id)


class _Reader(NamedTuple):
    """A program that writes an object to its standard output."""

    words: tuple[str, ...]  # its arguments; {} is the URL
    target: str  # what the URL must look like
    flags: frozenset[str]  # options that change nothing about the bytes
    values: Mapping[str, str] = {}  # options of the client, and what we call them


_S3 = r"s3://[^/]+/.+"
_READERS = {
    "aws": _Reader(
        ("s3", "cp", "{}", "-"),
        _S3,
        frozenset({"--no-progress", "--only-show-errors", "--quiet"}),
        {"--endpoint-url": "endpoint_url", "--profile": "profile", "--region": "region_name"},
    ),
    "s5cmd": _Reader(
        ("cat", "{}"),
        _S3,
        frozenset(),
        {"--endpoint-url": "endpoint_url", "--profile": "profile"},
    ),
    "gsutil": _Reader(("cat", "{}"), r"gs://[^/]+/.+", frozenset({"-q", "-m"})),
    "curl": _Reader(
        ("{}",),
        r"https?://.+",
        frozenset({"-s", "-S", "-L", "-f", "--silent", "--show-error", "--location", "--fail"}),
    ),
}
#: What a shell would expand; a command with any of it is not understood.
_EXPANDED = r"[$`\\*\[\]{}~#!\n]"


def read_command(url: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """The URL that a ``pipe:`` command reads, and what it says about the client.

    Understood are ``aws s3 cp URL -``, ``s5cmd cat URL``, ``gsutil cat URL`` and ``curl URL`` with
    the options of `_READERS`. No other command is read by us: None.
    """
    if not url.startswith("pipe:") or re.search(_EXPANDED, url):
        return None
    import shlex  # here: `import shardcache` stays light

    try:
        # Unquoted, what ends or joins commands (;|&<>()) is a word of its own.
        lexer = shlex.shlex(url.removeprefix("pipe:"), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        program, *words = lexer
    except ValueError:  # nothing, or a quote that is not closed
        return None
    if program not in _READERS:
        return None
    reader, options, plain = _READERS[program], {}, []
    for word in (rest := iter(words)):
        name, equals, value = word.partition("=")
        if name in reader.values:
            options[reader.values[name]] = value if equals else next(rest, "")
        elif word[:1] == "-" and word[1:2].isalpha() and len(word) > 2:  # -sLf
            plain += [flag for flag in word[1:] if f"-{flag}" not in reader.flags]
        elif word not in reader.flags:
            plain.append(word)
    found = [word for word in plain if re.fullmatch(reader.target, word)]
    if len(found) != 1 or plain != [word.format(*found) for word in reader.words]:
        return None
    return found[0], tuple(sorted(options.items()))


def _file(url: str, path: str) -> str:
    if not path:
        raise ConfigError(f"{url!r} names no file")
    try:
        # Links and ".." stay as they are: behind a link, ".." is not what it looks like.
        return f"file://{Path(path).absolute()}"
    except FileNotFoundError as exn:
        raise ConfigError(f"{url!r} is relative to a directory that was removed") from exn


def _pipe(command: str) -> str:
    """A command as people may see it: its program, the URL it reads, a digest of the rest.

    Options, headers and variables are left out: what is a credential among them
    (``-u me:secret``, ``X-Api-Key: ...``) cannot be told by looking.
    """
    words = (word.rpartition("/")[2] for word in command.split() if "=" not in word)
    program = re.sub(_UNSAFE, "_", next(words, "sh"))
    target = re.search(_TARGET, command)
    reads = f" {redact(target.group())}" if target else ""
    digest = hashlib.blake2b(command.encode("utf-8", "surrogateescape"), digest_size=4)
    return f"pipe:{program}{reads} #{digest.hexdigest()}"


def _s3(url: str, rest: str) -> tuple[str, str | None, str]:
    bucket, _, name = _without_credentials(rest).partition("/")
    bucket, version_id = bucket.rpartition("@")[2], None
    # Any other question mark belongs to the object's own key.
    if versioned := re.fullmatch(r"(?s)(.*)\?versionId=([^&?]+)", name):
        name, version_id = versioned.groups()
    if not bucket or not name:
        raise ConfigError(f"{redact(url)} names no object; expected s3://bucket/key")
    if ":" in bucket:
        raise ConfigError(
            f"{redact(url)}: no bucket has a colon in its name. Give an access point by its alias "
            "(...-s3alias). Credentials belong into a profile, the environment or "
            "storage_options, not into the URL."
        )
    query = "" if version_id is None else f"?versionId={version_id}"
    return f"s3://{bucket}/{name}{query}", version_id, name


def _generic(url: str, scheme: str, rest: str) -> tuple[str, str]:
    web = scheme in _DEFAULT_PORTS
    if web:
        rest = rest.partition("#")[0]  # never sent; elsewhere a part of the object's name
    place, mark, query = _without_credentials(rest).partition("?")
    netloc, slash, path = place.partition("/")
    user, at, host = netloc.rpartition("@")
    if web:
        host, slash = _web_host(url, scheme, host), "/"
    elif at and scheme not in _LOGINS:
        if ":" in user:
            raise ConfigError(
                f"{redact(url)}: a password before the @ cannot be told from a name in "
                f"{scheme}:// URLs. Give credentials through storage_options."
            )
        host = netloc
    if not (host or path):
        raise ConfigError(f"{redact(url)} names no object")
    return f"{scheme}://{host}{slash}{path}{mark}{query}", path or host


def _without_credentials(name: str) -> str:
    """A name without what is a credential in its query; to the byte as it was if nothing is."""
    base, _, query = name.partition("?")
    # A name may hold question marks: then what is behind the last one is a parameter.
    pairs = [(pair, pair.rpartition("?")[2].partition("=")[0].lower()) for pair in query.split("&")]
    names = {parameter for _, parameter in pairs}
    gone = _SECRETS.union(*(beside for sign, beside in _BESIDE.items() if sign in names))
    kept = []
    for pair, parameter in pairs:
        if parameter not in gone and not parameter.startswith(_AUTH_PREFIXES):
            kept.append(pair)
        elif "?" in pair:
            kept.append(pair.rpartition("?")[0])
    public = "&".join(kept)
    if public == query:
        return name
    return _without_credentials(f"{base}?{public}" if public else base)


def _web_host(url: str, scheme: str, host: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as exn:
        raise ConfigError(f"{redact(url)} is not a URL: {exn}") from exn
    if not named:
        raise ConfigError(f"{redact(url)} names no host")
    return host.lower().removesuffix(":").removesuffix(_DEFAULT_PORTS[scheme])


def _basename(name: str) -> str:
    safe = re.sub(_UNSAFE, "_", name.rstrip("/").rpartition("/")[2])[-_MAX_BASENAME:].lstrip(".")
    return f"shard-{safe}" if safe in SIDE_FILES else safe or "shard"


def redact(text: str) -> str:
    """``text`` without user names, signatures and tokens of any URL in it."""
    for pattern, left in _REDACTED.items():
        text = re.sub(pattern, left, text)
    return text


def _own_endpoint(endpoint: str | None) -> str:
    """The endpoint as part of an identity; empty for AWS itself."""
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    except ValueError as exn:
        raise ConfigError(f"the S3 endpoint {redact(endpoint)} is not a URL: {exn}") from exn
    host = parts.netloc.rpartition("@")[2].lower()
    host = host.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ":"))
    if host.partition(":")[0].endswith(".amazonaws.com"):
        return ""
    # http and https on one host serve one object store.
    return host + parts.path.rstrip("/")
