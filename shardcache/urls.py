"""The names of a shard: its key, its file name, and the URL that logs may show.

Invariants:

* Two URLs share a key only if they name the same object. Object keys are exact
  bytes: no percent-decoding, no ``..`` or ``//`` folding, no Unicode folding.
* A web URL keeps its key when it is signed again: the parameters of a complete
  signature and the login before an ``@`` are no part of its identity. All other
  parameters are. Behind an ``s3://`` bucket, everything is the object's name,
  except a ``?versionId=`` at the end.
* Only ``ShardURL.raw`` holds a secret, and only origins read it. The canonical
  URL hides each value that may be a secret, and then ends with the key. So it
  still names exactly one shard.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

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

#: Signatures of web URLs: the parameters that make one complete, and a pattern of all that belong
#: to it. ``x-oss-process`` and the like change the bytes, so Alibaba's are listed one by one.
_SIGNATURES = (
    # AWS and Google, version 4.
    ("x-amz-algorithm x-amz-credential x-amz-signature", r"x-amz-.+"),
    ("x-goog-algorithm x-goog-credential x-goog-signature", r"x-goog-.+"),
    # AWS and Google, version 2; Alibaba, version 1.
    (
        "awsaccesskeyid|googleaccessid|ossaccesskeyid expires signature",
        r"(aws|oss)accesskeyid|googleaccessid|expires|signature|(x-amz-)?security-token",
    ),
    # CloudFront, and what Hugging Face adds about the client.
    (
        "key-pair-id signature policy|expires",
        r"key-pair-id|signature|policy|expires|hash-algorithm",
    ),
    ("key-pair-id signature x-xet-cas-uid", r"x-xet-(cas-uid|session-id)|user_id|xip"),
    # Shared access signatures of Azure.
    (
        "sig sv se|si",
        r"scid|sdd|se|ses|si|sig|sip|skdutid|ske|skoid|sks|skt|sktid|skv"
        r"|saoid|sduoid|sp|spr|sr|srt|ss|st|suoid|sv",
    ),
    # Alibaba, version 4; Tencent.
    (
        "x-oss-credential x-oss-signature",
        r"x-oss-(additional-headers|credential|date|expires|security-token|signature(-version)?)",
    ),
    (
        "q-ak q-sign-algorithm q-signature",
        r"q-.+|x-cos-security-token",
    ),
)
#: Parameters that name a version. Their values are shown, all others are hidden.
_VERSIONS = frozenset({"generation", "snapshot", "versionid"})
#: A canonical URL with hidden values, and the key that it ends with.
_MASKED = r"([^?]*\?.*\*\*\*.*)#([0-9a-f]{32})"
#: Names that stand for a secret in any text.
_SECRETS = frozenset(
    {"access_token", "api_key", "apikey", "auth_token", "authorization", "awsaccesskeyid"}
    | {"googleaccessid", "password", "secret", "security-token", "sig", "signature", "token"}
)
#: AWS's partitions besides the standard one, by the first part of their regions. A bucket name in
#: two partitions is two buckets.
PARTITIONS = r"cn|us-gov|us-iso[a-z]?|eu-isoe|eusc"
_AWS_HOST = (
    r".+\.(amazonaws\.(com|com\.cn|eu)|(c2s|csp\.hci)\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk)"
)
_AWS_REGION = rf"[.-]({PARTITIONS})-[a-z]+(-[a-z]+)*-[0-9]+\."

# Patterns are compiled when first used: `import shardcache` stays light.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*):(//)?"
_CHAIN = r"(^[A-Za-z0-9+.-]+::|::[A-Za-z0-9+.-]+:/)"
_UNSAFE = r"[^A-Za-z0-9._-]+"
_TARGET = r"[a-z][a-z0-9+.-]*://[^\s\"'|;<>()]+"
_CONTROL = r"[\x00-\x1f\x7f]"
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: 255 bytes is the limit of every common filesystem; leave room for suffixes.
_MAX_BASENAME = 120
#: An access point of S3, of S3 on Outposts or of S3 Object Lambda.
_ARN = (
    r"arn:[a-z-]+:s3[a-z-]*:[a-z0-9-]*:[0-9]{12}:(?:outpost[/:][^/:@]+[/:])?accesspoint[/:][^/:@]+"
)
#: Schemes whose canonical URL hides no value.
_NEVER_MASKED = frozenset({"file", "pipe", "s3"})
#: Files that shardcache writes beside a shard's own file; no shard gets one of these names.
SIDE_FILES = frozenset({"meta.json", "progress", "samples.idx"})

# Of these schemes a name without a password is no login.
_NAMED = "(?:abfss?|az|oci)://"
#: A web URL in a text: what precedes the query, the query, and a fragment other than a key.
_WEB = r"(?i)\b(https?://[^\s\"'<>?#]*)(\?[^\s\"'<>#]*)?(?:#(?![0-9a-f]{32}\b)[^\s\"'<>]*)?"
#: Patterns of secrets in a text, and their replacements.
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
#: Characters of a server's text that an error shows.
_SHOWN = 300
#: Characters of the shortest secret that is searched for: shorter ones are found in every text.
_SECRET = 4


@dataclass(frozen=True, slots=True)
class ShardURL:
    """One shard's names."""

    #: As it was given, secrets included; only origins read it. Empty for a pickled command.
    raw: str = field(repr=False)
    scheme: str  # lower case; ``file`` for plain paths
    canonical: str  # shown in logs and sidecars; parses to the same key, except for commands
    key: str  # 32 hexadecimal digits, blake2b-128 of the identity and endpoint
    basename: str  # a safe file name that keeps the shard's own suffix
    version_id: str | None = None  # of the object, where the URL asks for one
    #: What a command says about its client: ``endpoint_url``, ``profile``, ``region_name``.
    options: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with secrets for a process that multiprocessing is spawning, else without.

        Without secrets, a command is left out as a whole, because any part of it may be one.
        """
        from multiprocessing.context import get_spawning_popen

        raw = self.raw
        if get_spawning_popen() is None:
            raw = "" if self.scheme == "pipe" else self.canonical
        names = (self.scheme, self.canonical, self.key, self.basename, self.version_id)
        return ShardURL, (raw, *names, self.options)

    @property
    def is_masked(self) -> bool:
        """Whether `raw` lacks hidden values, so that no origin can read it."""
        return self.scheme not in _NEVER_MASKED and re.fullmatch(_MASKED, self.raw) is not None

    @property
    def is_local(self) -> bool:
        """Whether this is a path of a filesystem mounted here."""
        return self.scheme == "file"

    @property
    def local_path(self) -> Path:
        """The path of a ``file`` URL."""
        return Path(self.canonical.removeprefix("file://"))

    def bucket_and_key(self) -> tuple[str, str]:
        """Bucket and object key of an ``s3`` URL; an access point's ARN stands for a bucket."""
        bucket, name = split_bucket(self.canonical.removeprefix("s3://"))
        return bucket, name.removesuffix(f"?versionId={self.version_id}")

    def __str__(self) -> str:
        return self.canonical


def parse_url(
    url: str, *, endpoint: str | None = None, allow_schemes: Collection[str] = ()
) -> ShardURL:
    """Name the shard behind a URL or a plain path.

    Args:
        url: which.
        endpoint: the S3 endpoint in force; None means AWS's standard partition, as do its
            hosts. One bucket name at two endpoints, or in two partitions, is two buckets.
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
    version_id = key = None
    is_masked = False
    if scheme == "file":
        canonical = identity = name = _file(url, rest)
    elif scheme == "s3":
        canonical, version_id, name = _s3(url, rest)
        authority = _authority(endpoint)
        identity = f"{canonical}\0{authority}" if authority else canonical
    elif scheme == "pipe":
        # A credential may be the only difference between two commands.
        canonical, identity, name = _pipe(rest.strip()), f"pipe:{rest.strip()}", "pipe"
    else:
        if masked := re.fullmatch(_MASKED, rest):
            rest, key = masked.groups()
        canonical, identity, name = _generic(url, scheme, rest)
        is_masked = key is not None or canonical != identity
    try:
        # Paths may be any bytes; everything else is text.
        encoded = identity.encode("utf-8", "surrogateescape" if scheme == "file" else "strict")
    except UnicodeEncodeError as exn:
        raise ConfigError(f"{redact(url)!r} is not text that UTF-8 can hold") from exn
    if len(encoded) > _MAX_CANONICAL:
        raise ConfigError(
            f"{redact(url)[:80]}... has {len(encoded)} bytes; a URL may have {_MAX_CANONICAL}"
        )
    key = key or hashlib.blake2b(encoded, digest_size=16, usedforsecurity=False).hexdigest()
    if is_masked:
        canonical = f"{canonical}#{key}"
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


def split_bucket(rest: str) -> tuple[str, str]:
    """Bucket, or ARN of an access point, and object name of an ``s3`` URL without its scheme.

    A login in front of the bucket is left out.
    """
    if arn := re.fullmatch(rf"(?s)(?:[^/@]*@)?({_ARN})(?:/(.*))?", rest):
        return arn[1], arn[2] or ""
    bucket, _, name = rest.partition("/")
    return bucket.rpartition("@")[2], name


def _s3(url: str, rest: str) -> tuple[str, str | None, str]:
    bucket, name = split_bucket(rest)
    version_id = None
    # Any other question mark belongs to the object's own key.
    if versioned := re.fullmatch(r"(?s)(.*)\?versionId=([^&?]+)", name):
        name, version_id = versioned.groups()
    if not bucket or not name:
        raise ConfigError(f"{redact(url)} names no object; expected s3://bucket/key")
    if ":" in bucket and not re.fullmatch(_ARN, bucket):
        raise ConfigError(
            f"{redact(url)}: no bucket has a colon in its name. The ARN of an access point is "
            "arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME. Put credentials into a profile, the "
            "environment or storage_options, not into the URL."
        )
    query = "" if version_id is None else f"?versionId={version_id}"
    return f"s3://{bucket}/{name}{query}", version_id, name


def _generic(url: str, scheme: str, rest: str) -> tuple[str, str, str]:
    """Return the canonical URL (without a key), the identity, and the object's name."""
    web = scheme in _DEFAULT_PORTS
    if web:
        rest = rest.partition("#")[0]  # never sent; elsewhere a part of the object's name
    place, mark, query = rest.partition("?")
    if web and (unsigned := _without_signatures(query)) != query:
        mark, query = "?" if unsigned else "", unsigned
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
    base = f"{scheme}://{host}{slash}{path}{mark}"
    return f"{base}{_masked(query)}", f"{base}{query}", path or host


def _without_signatures(query: str) -> str:
    """A query without the parameters of complete signatures; unchanged if it has none."""
    pairs = [(pair, pair.partition("=")[0].lower()) for pair in query.split("&")]
    names = {name for _, name in pairs}
    signed = "|".join(
        parts
        for needed, parts in _SIGNATURES
        if all(names.intersection(each.split("|")) for each in needed.split())
    )
    return "&".join(pair for pair, name in pairs if not signed or not re.fullmatch(signed, name))


def _masked(query: str) -> str:
    """A query with ``***`` in place of each value, because any of them may be a secret."""

    def masked(found: re.Match[str]) -> str:
        name, equals, value = found[0].partition("=")
        # A value without a name: base64 ends with "=", a sentence around it with punctuation.
        if not value.strip("=.,:)"):
            name, equals, value = "", "", found[0]
        return found[0] if name.lower() in _VERSIONS else f"{name}{equals}***"

    return re.sub(r"[^?&;]+", masked, query)


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
    text = re.sub(_WEB, lambda found: found[1] + _masked(found[2] or ""), text)
    for pattern, left in _REDACTED.items():
        text = re.sub(pattern, left, text)
    return text


@functools.lru_cache(maxsize=64)
def secret_forms(*secrets: str | None) -> tuple[str, ...]:
    """Texts that an answer must not bring into an error or a sidecar, the longest first.

    Args:
        secrets: parts of the request: credentials, signatures, parameters. A server may repeat
            them percent-encoded or decoded.
    """
    stated = [text for text in secrets if text]
    forms = {form for text in stated for form in (text, quote(text, safe=""), unquote(text))}
    return tuple(sorted((f for f in forms if len(f) >= _SECRET), key=len, reverse=True))


def quoted(text: str, secrets: Iterable[str] = ()) -> str:
    """A server's text as an error may show it: without `secret_forms`, on one line, shortened."""
    for form in secrets:
        text = text.replace(form, "***")
    text = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", redact(text)).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _authority(endpoint: str | None) -> str:
    """Return what identities hold of an endpoint; nothing for AWS's standard partition."""
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    except ValueError as exn:
        raise ConfigError(f"the S3 endpoint {redact(endpoint)} is not a URL: {exn}") from exn
    host = parts.netloc.rpartition("@")[2].lower()
    host = host.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ":"))
    if re.fullmatch(_AWS_HOST, name := host.partition(":")[0]):
        if region := re.search(_AWS_REGION, name):
            return f"aws:{region[1]}"
        if name.endswith(".amazonaws.com"):
            return ""
    # http and https on one host serve one object store.
    return host + parts.path.rstrip("/")
