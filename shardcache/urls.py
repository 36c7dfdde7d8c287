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
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
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

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(//)?")
#: A bucket named by its access point: https://docs.aws.amazon.com/AmazonS3/latest/userguide/
#: access-points-naming.html. The only bucket names with a colon or a slash.
_ARN = re.compile(
    r"arn:[^/]*:(?:accesspoint[/:][^/]+|outpost[/:][^/:]+[/:]accesspoint[/:][^/]+)(?=/|\Z)"
)
_CHAIN = re.compile(r"(^[A-Za-z0-9+.-]+::|::[A-Za-z0-9+.-]+:/)")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_TARGET = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'|;<>()]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: 255 bytes is the limit of every common filesystem; leave room for suffixes.
_MAX_BASENAME = 120
_RESERVED_NAMES = frozenset({"meta.json", "progress"})

_REDACT_PARAMETER = re.compile(
    r"(?i)\b((?:x-(?:amz|goog|oss|cos)-[a-z0-9-]+|key-pair-id|policy|"
    + "|".join(map(re.escape, sorted(_SECRETS)))
    + r")=)[^&\s\"'<>]+"
)
_REDACT_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization:\s*(?:[a-z]+\s+)?)[^\s\"']+")
# Secret keys of AWS hold slashes.
_REDACT_S3_LOGIN = re.compile(r"(?i)\b(s3[an]?://)(?!arn:)[^\s\"'/@]*:[^\s\"'@]*@")
# Of these schemes a name without a password is no login.
_NAMED = "(?:abfss?|az|oci)://"
_REDACT_NAMED_LOGIN = re.compile(rf"(?i)\b({_NAMED})[^/\s@\"':]*:[^/\s@\"']*@")
_REDACT_LOGIN = re.compile(rf"(?i)\b(?!{_NAMED})([a-z][a-z0-9+.-]*://)[^/\s@\"']+@")


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

    def __reduce__(self) -> tuple[Any, ...]:
        """In clear for a process that multiprocessing is spawning, else without credentials.

        A command is left out whole: what is secret in it cannot be told.
        """
        from multiprocessing.context import get_spawning_popen

        raw = self.raw
        if get_spawning_popen() is None:
            raw = "" if self.scheme == "pipe" else self.canonical
        names = (self.scheme, self.canonical, self.key, self.basename, self.version_id)
        return ShardURL, (raw, *names)

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
        bucket, name = _split_bucket(self.canonical.removeprefix("s3://"))
        if self.version_id is not None:
            name = name.removesuffix(f"?versionId={self.version_id}")
        return bucket, name

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
    if _CONTROL.search(url):
        # Replaced before redacting, or what follows a line end inside a signature would show.
        shown = redact(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", url))
        raise ConfigError(f"{shown!r} holds a control character; is a line end left in it?")
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else "file"
    scheme = _ALIASES.get(scheme, scheme)
    if scheme != "pipe" and _CHAIN.search(url):
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


def _file(url: str, path: str) -> str:
    if not path:
        raise ConfigError(f"{url!r} names no file")
    try:
        # Links and ".." stay as they are: behind a link, ".." is not what it looks like.
        return f"file://{Path(path).absolute()}"
    except FileNotFoundError as exn:
        raise ConfigError(f"{url!r} is relative to a directory that was removed") from exn


def _split_bucket(rest: str) -> tuple[str, str]:
    arn = _ARN.match(rest)
    if arn is not None:
        return arn.group(), rest[arn.end() + 1 :]
    bucket, _, name = rest.partition("/")
    return bucket, name


def _pipe(command: str) -> str:
    """A command as people may see it: its program, the URL it reads, a digest of the rest.

    Options, headers and variables are left out: what is a credential among them
    (``-u me:secret``, ``X-Api-Key: ...``) cannot be told by looking.
    """
    words = (word.rpartition("/")[2] for word in command.split() if "=" not in word)
    program = _UNSAFE.sub("_", next(words, "sh"))
    target = _TARGET.search(command)
    reads = f" {redact(target.group())}" if target else ""
    digest = hashlib.blake2b(command.encode("utf-8", "surrogateescape"), digest_size=4)
    return f"pipe:{program}{reads} #{digest.hexdigest()}"


def _s3(url: str, rest: str) -> tuple[str, str | None, str]:
    bucket, name = _split_bucket(rest)
    bucket = bucket.rpartition("@")[2]
    version_id = None
    name, query = _split_query(name)
    if query is not None:
        parameter, _, value = query.partition("=")
        if parameter == "versionId" and value and "&" not in value:
            version_id = value
        else:  # the question mark belongs to the object's own key
            name = f"{name}?{query}"
    if not bucket or not name:
        raise ConfigError(f"{redact(url)} names no object; expected s3://bucket/key")
    if ":" in bucket and not _ARN.fullmatch(bucket):
        raise ConfigError(
            f"{redact(url)}: no bucket has a colon in its name. Credentials belong into a "
            "profile, the environment or storage_options, not into the URL."
        )
    canonical = f"s3://{bucket}/{name}"
    if version_id is not None:
        canonical += f"?versionId={version_id}"
    return canonical, version_id, name


def _generic(url: str, scheme: str, rest: str) -> tuple[str, str]:
    web = scheme in _DEFAULT_PORTS
    if web:
        rest = rest.partition("#")[0]  # never sent; elsewhere a part of the object's name
        place, mark, query = rest.partition("?")
        public = _without_auth(query)
        kept = mark + public if public or public == query else ""
    else:
        place, last = _split_query(rest)
        kept = "" if last is None else f"?{last}"
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
    return f"{scheme}://{host}{slash}{path}{kept}", path or host


def _split_query(name: str) -> tuple[str, str | None]:
    """A name and the query behind its last question mark, without credentials, if any.

    Earlier question marks belong to the name, unless nothing but credentials follows.
    """
    base, mark, query = name.rpartition("?")
    if not mark:
        return name, None
    public = _without_auth(query)
    return (base, public) if public or public == query else _split_query(base)


def _web_host(url: str, scheme: str, host: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as exn:
        raise ConfigError(f"{redact(url)} is not a URL: {exn}") from exn
    if not named:
        raise ConfigError(f"{redact(url)} names no host")
    return host.lower().removesuffix(":").removesuffix(_DEFAULT_PORTS[scheme])


def _without_auth(query: str) -> str:
    """A query without credentials; to the byte what it was where it holds none."""
    pairs = [(pair.partition("=")[0].lower(), pair) for pair in query.split("&")]
    names = {name for name, _ in pairs}
    gone = _SECRETS.union(*(beside for sign, beside in _BESIDE.items() if sign in names))
    return "&".join(
        pair for name, pair in pairs if name not in gone and not name.startswith(_AUTH_PREFIXES)
    )


def _basename(name: str) -> str:
    safe = _UNSAFE.sub("_", name.rstrip("/").rpartition("/")[2])[-_MAX_BASENAME:].lstrip(".")
    return f"shard-{safe}" if safe in _RESERVED_NAMES else safe or "shard"


def redact(text: str) -> str:
    """``text`` without user names, signatures and tokens of any URL in it."""
    text = _REDACT_S3_LOGIN.sub(r"\1", text)
    text = _REDACT_NAMED_LOGIN.sub(r"\1", text)
    text = _REDACT_LOGIN.sub(r"\1", text)
    text = _REDACT_HEADER.sub(r"\1***", text)
    return _REDACT_PARAMETER.sub(r"\1***", text)


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
