"""Parse a shard's URL into its names: the key, the file name, and the URL that logs may show.

* Two URLs share a key only if they name the same object. Names of objects are exact bytes, without
  percent-decoding and without normalising ``..``, ``//`` or Unicode.
* A web URL that is signed again keeps its key: the parameters of a complete signature and a login
  are no part of it; all other parameters are. In an ``s3://`` URL, everything after the bucket is
  the object's name, except a final ``?versionId=``.
* Only ``raw`` and ``options`` of a `ShardURL` contain secrets. The canonical URL hides each value
  that may be a secret, and then ends with the key, so that it still names exactly one shard.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from shardcache.errors import ConfigError
from shardcache.units import similar


class Scheme(NamedTuple):
    """The properties of a scheme; by default, those of an object store that fsspec reads."""

    #: The class in `shardcache.origins` that reads its shards, a `base.Origin`.
    origin: str = "filesystem.FsspecOrigin"
    is_allowed: bool = True  #: whether users need not allow it
    is_web: bool = False  #: whether its URLs follow the rules of the web
    names_server: bool = False  #: whether its URLs name the server; if not, the key has an endpoint
    hides_values: bool = True  #: whether a canonical URL hides the values of query parameters
    #: What precedes an ``@``. The name of an account is a login if a password follows it.
    user: Literal["name", "account", "login"] = "name"
    has_program: bool = False  #: whether WebDataset reads it by a program with its own credentials


_LOGIN = Scheme(is_allowed=False, user="login")
_WEB = Scheme("http.WebOrigin", is_web=True, names_server=True, user="login")
SCHEMES = {
    "file": Scheme(names_server=True, hides_values=False),
    "memory": Scheme(),
    # It runs a shell, so users must allow it.
    "pipe": Scheme("command.PipeOrigin", is_allowed=False, names_server=True, hides_values=False),
    "s3": Scheme("s3.S3Origin", hides_values=False),
    **dict.fromkeys(("abfs", "abfss", "az", "oci"), Scheme(user="account")),
    **dict.fromkeys(("ftp", "sftp", "smb", "ssh", "webdav", "webdavs"), _LOGIN),
    **dict.fromkeys(("gs", "hf"), Scheme(has_program=True)),
    **dict.fromkeys(("http", "https"), _WEB),
}
ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_ALLOWED = sorted(name for name, scheme in SCHEMES.items() if scheme.is_allowed)

#: Maximum length of a URL in bytes. S3 keys have up to 1 KiB; servers refuse more than 8 KiB.
_MAX_CANONICAL = 8192

#: Query parameters of signed URLs: those that a complete signature must have, and a pattern of all
#: that belong to it. Alibaba's are listed singly, because ``x-oss-process`` changes the bytes.
_SIGNATURES = {
    # Signature version 4 of AWS and of Google.
    "x-amz-algorithm x-amz-credential x-amz-signature": r"x-amz-.+",
    "x-goog-algorithm x-goog-credential x-goog-signature": r"x-goog-.+",
    # Signature version 2 of AWS and of Google, and version 1 of Alibaba.
    "awsaccesskeyid|googleaccessid|ossaccesskeyid expires signature": (
        r"(aws|oss)accesskeyid|googleaccessid|expires|signature|(x-amz-)?security-token"
    ),
    # CloudFront, and the parameters that Hugging Face adds to its signed URLs for the client.
    "key-pair-id signature policy|expires": (
        r"key-pair-id|signature|policy|expires|hash-algorithm"
    ),
    "key-pair-id signature x-xet-cas-uid": r"x-xet-(cas-uid|session-id)|user_id|xip",
    # Azure's shared access signatures.
    "sig sv se|si": (
        r"scid|sdd|se|ses|si|sig|sip|skdutid|ske|skoid|sks|skt|sktid|skv"
        r"|saoid|sduoid|sp|spr|sr|srt|ss|st|suoid|sv"
    ),
    # Signature version 4 of Alibaba, and the signature of Tencent.
    "x-oss-credential x-oss-signature": (
        r"x-oss-(additional-headers|credential|date|expires|security-token|signature(-version)?)"
    ),
    "q-ak q-sign-algorithm q-signature": r"q-.+|x-cos-security-token",
}
#: Query parameters that name a version. The canonical URL shows their values and hides all others.
_VERSIONS = frozenset({"generation", "snapshot", "versionid"})
#: A canonical URL with hidden values (group 1), and the key at its end (group 2).
_MASKED = r"([^?]*\?.*\*\*\*.*)#([0-9a-f]{32})"
#: Prefixes of the regions in AWS's other partitions, which may repeat names of buckets.
PARTITIONS = r"cn|us-gov|us-iso[a-z]?|eu-isoe|eusc"
_AWS_TOP = r"amazonaws\.(com(\.cn)?|eu)|(c2s|csp\.hci)\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk"
_AWS_REGION = rf"[.-]({PARTITIONS})-[a-z]+(-[a-z]+)*-[0-9]+\."

#: A variable as a shell writes it, and the names of variables that may hold credentials.
VARIABLE = r"(?a)\$(?:(\w+)|\{(\w+)\})"
CREDENTIAL = r"(?i)key|token|secret|pass|_pwd|cred|auth|cookie|signature|(^|_)(jwt|pat|sas)(_|$)"
# Patterns are compiled on first use, to keep `import shardcache` fast.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*):(//)?"
_FSSPEC = r"^shardcache:(:|//(?=[A-Za-z][A-Za-z0-9+.-]*://))"  # both forms of our fsspec names
#: Several URLs in one text. One space or comma may be a part of an object's name.
_SEVERAL = r"(?i)^[a-z0-9+.-]+::|::[a-z0-9+.-]+:/|^[^?]*[\s,](\w+://|pipe:)|\.t(ar|gz)\s+/"
#: Assignments to variables, and the program of a command. Only a shell can read other beginnings.
_PROGRAM = r"(?a)\s*(?:\w+=(?:'[^']*'|\"[^\"`$\\]*\"|[\w./:@%+,-])*\s+)*([\w./+-]+)(?=[\s;|&<>]|\Z)"
#: The parts of a command that choose a server: URLs without their logins, and options.
_ADDRESS = r"(?:://(?:[^/\s]*@)?|--(?:endpoint-url|region)[= ])([^\s|;<>]*)"
_CONTROL = r"[\x00-\x1f\x7f]"
_NOT_TEXT = r"[\x00-\x1f\x7f\ud800-\udfff]"  # also the bytes that are not UTF-8
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_BASENAME = 120  #: filesystems allow 255 bytes; temporary names are longer
#: The ARN of an access point of S3, of S3 on Outposts or of S3 Object Lambda.
_ARN = (
    r"arn:[a-z-]+:s3[a-z-]*:[a-z0-9-]*:[0-9]{12}:(?:outpost[/:][^/:@]+[/:])?accesspoint[/:][^/:@]+"
)
#: Files that shardcache writes next to the data file of a shard. A data file has no such name.
SIDE_FILES = frozenset({"meta.json", "progress", "samples.idx"})
_ACCOUNTS = "|".join(name for name, scheme in SCHEMES.items() if scheme.user == "account")
#: A web URL in a text: address (group 1), query (group 2), and a fragment unless it is a key.
_WEB_URL = r"(?i)\b(https?://[^\s\"'<>?#]*)(\?[^\s\"'<>#]*)?(?:#(?![0-9a-f]{32}\b)[^\s\"'<>]*)?"
#: Patterns of secrets in a text, and the replacements.
_REDACTIONS = {
    # Logins. AWS's secret keys may contain slashes, and so may the logins of malformed URLs.
    r"(?i)\b(https?:/+)[^\s\"'/@:\[]*:(?!\d+/)[^\s\"'@]*@": r"\1",
    r"(?i)\b(s3[an]?://)[^\s\"'/@]*:[^\s\"'@]*@": r"\1",
    rf"(?i)\b((?:{_ACCOUNTS})://)[^/\s@\"':]*:[^/\s@\"']*@": r"\1",
    rf"(?i)\b(?!(?:{_ACCOUNTS})://)([a-z][a-z0-9+.-]*://)[^/\s@\"']+@": r"\1",
    # Headers and parameters.
    r"(?i)\b((?:proxy-)?authorization:\s*(?:[a-z]+\s+)?)[^\s\"']+": r"\1***",
    r"(?i)\b((?:x-(?:amz|goog|oss|cos)-[a-z0-9-]+|key-pair-id|policy|access_token|api_?key|auth_token|"
    r"authorization|awsaccesskeyid|googleaccessid|password|secret|security-token|sig(?:nature)?|"
    r"token)=)[^&\s\"'<>]+": r"\1***",
}
_MAX_QUOTED = 300  #: maximum number of characters of a server's text in an error
_MIN_SECRET = 4  #: minimum length of a secret that is removed: any text may contain shorter ones


@dataclass(frozen=True, slots=True)
class ShardURL:
    """The parsed URL of a shard."""

    #: The URL as the user wrote it, with secrets. Empty for a ``pipe:`` command that was unpickled.
    raw: str = field(repr=False)
    scheme: str  #: the scheme in lower case; ``file`` for plain paths
    canonical: str  #: the URL for logs and metadata; parses to the same key, except for commands
    key: str  #: 32 hexadecimal digits, the blake2b-128 of the shard's identity and its endpoint
    basename: str  #: a safe file name with the suffix of the shard
    version_id: str | None = None  #: the object's version that the URL names, if any
    #: The client options that a ``pipe:`` command sets; see `pipe_commands.read_command`.
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: The host of the S3 endpoint, "" for AWS; for other schemes, the options that name a server or
    #: an account, None without such options. A part of the key.
    endpoint: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL, with secrets only while multiprocessing is spawning a process."""
        from multiprocessing.context import get_spawning_popen

        raw, options = self.raw, self.options
        if get_spawning_popen() is None:  # any part of a command may be a secret
            raw = "" if self.scheme == "pipe" else self.canonical
            options = tuple((k, "***" if k == "authorization" else v) for k, v in options)
        names = (self.scheme, self.canonical, self.key, self.basename, self.version_id)
        return ShardURL, (raw, *names, options, self.endpoint)

    def __deepcopy__(self, memo: object) -> ShardURL:
        return self  # with the secrets: the copy stays in this process

    @property
    def is_masked(self) -> bool:
        """Whether secrets that an origin needs to read the shard are missing from this URL."""
        masked = find_scheme(self.scheme).hides_values and re.fullmatch(_MASKED, self.raw)
        # A pickled command is empty.
        return bool(masked) or not self.raw or ("authorization", "***") in self.options

    @property
    def is_local(self) -> bool:
        """Whether this is a path on a mounted filesystem."""
        return self.scheme == "file"

    @property
    def local_path(self) -> Path:
        return Path(self.canonical.removeprefix("file://"))

    def bucket_and_key(self) -> tuple[str, str]:
        """Return the bucket (or ARN of an access point) and the object key of an ``s3`` URL."""
        bucket, name = split_bucket(self.canonical.removeprefix("s3://"))
        return bucket, name.removesuffix(f"?versionId={self.version_id}")

    def __str__(self) -> str:
        return self.canonical


def find_scheme(name: str) -> Scheme:
    """Return the properties of a scheme, which may be unknown."""
    return SCHEMES.get(name) or Scheme(is_allowed=False)


def server_of(url: str) -> str:
    """Return the start of a canonical URL, up to its bucket, access point or host."""
    match = re.match(rf"s3://{_ARN}|[^/]*(?://[^/]*)?", url)
    return match[0] if match else ""


def unexpanded(shard: ShardURL) -> ConfigError | None:
    """Return the error for a wildcard or a prefix that was opened as if it were one shard."""
    if not shard.key or not re.match(r"[^?]*[*{]|s3.*/$", shard.raw):  # a listing has no key
        return None
    return ConfigError(
        f"{shard}: not found, and a prefix, `*` or `{{` is not expanded here. Pass the URLs that "
        "shardcache.expand(SPEC) returns.",
        url=str(shard),
    )


def advise_scheme(shard: ShardURL, otherwise: str = "") -> str:
    """Return advice for a relative path without a file: it may be an object of S3."""
    is_path = re.match(r"[/.]|file:|[^/]*$", shard.raw)
    if not shard.is_local or is_path or shard.local_path.exists():
        return otherwise
    name = re.sub(r"^s3/+", "", redact(shard.raw))  # the colon may be missing
    return f"If it is an object, write s3://{name}."


def refuse_in_place(shard: ShardURL, cache_local: bool) -> None:
    """Raise ConfigError for a local file, unless the option ``cache_local`` is set."""
    if shard.is_local and not cache_local:
        path, text = shard.local_path, "is a local file, which is read in place and not cached."
        advice = "Set cache_local = true (SHARDCACHE_CACHE_LOCAL=1) to cache slow mounts."
        if re.search(r"\.(txt|list|lst|csv|json)\Z", str(path)):
            advice = "To read a list of shards from it, pass it after -f (prewarm)."
        elif not (path.exists() or shard.canonical.endswith("/")):
            text, advice = "is no file of this machine.", "Write the whole URL of the shard."
        raise ConfigError(f"{path} {text} {advise_scheme(shard, advice)}", url=str(shard))


def advise_name(text: str) -> str:
    """Return advice for a name that nothing has: brackets are a pattern in shells, but not here."""
    if text[-1:].isspace():
        return " It ends with a space."
    return " Brackets are no pattern: write {a,b} or {0..9}." if re.search(r"\[.+\]", text) else ""


def parse_url(
    url: str,
    *,
    endpoint: str | None = None,
    servers: Mapping[str, str] | None = None,
    allow_schemes: Collection[str] = (),
) -> ShardURL:
    """Parse the URL or the plain path of a shard; raise ConfigError if it is not valid.

    ``endpoint`` is the S3 endpoint in use, a part of the key of ``s3`` URLs; None stands for AWS's
    standard partition; ``servers`` are those of `Config.servers`. ``allow_schemes`` are allowed in
    addition to those of `SCHEMES`. Each ``pipe:`` command is a shard of its own.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a shard URL must be a string, not {type(url).__name__}")
    # Lists may have 100,000 URLs, so cheap tests of the text come before searches.
    if url.startswith("shardcache:"):
        url = re.sub(_FSSPEC, "", url)
    if not url:
        raise ConfigError("a shard URL must not be empty")
    refuse_control(url)
    if url[0].isspace():
        raise ConfigError(f"{shown_url(url)!r} begins with a space. Remove it.")
    match = re.match(_SCHEME, url)
    scheme = match.group(1).lower() if match else "file"
    scheme = ALIASES.get(scheme, scheme)
    if scheme != "pipe" and ("::" in url or " " in url or "," in url) and re.search(_SEVERAL, url):
        advice = "Separate shards by ::, or pass several words or a list. Do not chain filesystems."
        raise ConfigError(f"{shown_url(url)} has several URLs. {advice}")
    kind = find_scheme(scheme)
    if not kind.is_allowed and scheme not in allow_schemes:
        # Show nothing of a command, because any part of it may be a secret.
        subject = "'pipe:' URLs run a shell command" if scheme == "pipe" else redact(url)
        known, meant = ", ".join(_ALLOWED), similar(scheme, _ALLOWED)
        hint = f"Did you mean {meant}://? If not, set" if meant else "Set"
        raise ConfigError(
            f"{subject}: the scheme {scheme!r} is not one of {known}. {hint} "
            f"allow_schemes=[{scheme!r}] in code, or SHARDCACHE_ALLOW_SCHEMES={scheme}, if you "
            "trust the authors of all shard lists."
        )
    rest = url[match.end() if match else 0 :]
    version_id = key = authority = None
    if scheme == "file":
        canonical = identity = name = _file(url, rest)
    elif scheme == "s3":
        canonical, version_id, name = _s3(url, rest)
        identity, authority = canonical, _authority(endpoint)
    elif scheme == "pipe":
        canonical, identity, name = name_command(rest.strip()), _pipe(rest.strip()), "pipe"
    else:
        if masked := re.fullmatch(_MASKED, rest):
            rest, key = masked.groups()
        canonical, identity, name = _generic(url, scheme, rest)
        authority = (servers or {}).get(scheme)
    hides = kind.hides_values and (key is not None or canonical != identity)
    identity += f"\0{authority}" if authority else ""
    encoded = b""
    with contextlib.suppress(UnicodeEncodeError):  # it would quote the URL
        # Paths may contain arbitrary bytes, but all other URLs must be text.
        encoded = identity.encode("utf-8", "surrogateescape" if scheme == "file" else "strict")
    if not encoded:
        raise ConfigError(f"{shown_url(url)!r} cannot be encoded as UTF-8")
    if len(encoded) > _MAX_CANONICAL:
        excess = f"has {len(encoded)} bytes; the limit is {_MAX_CANONICAL}"
        raise ConfigError(f"{shown_url(url)[:80]}... {excess}")
    key = key or _key_of(encoded)
    basename = re.sub(r"[^A-Za-z0-9._-]+", "_", name.rstrip("/").rpartition("/")[2])
    basename = basename[-_MAX_BASENAME:].lstrip(".") or "shard"
    basename = f"shard-{basename}" if basename in SIDE_FILES else basename
    names = (scheme, f"{canonical}#{key}" if hides else canonical, key, basename, version_id)
    return ShardURL(url, *names, endpoint=authority)


def _key_of(identity: bytes) -> str:
    return hashlib.blake2b(identity, digest_size=16, usedforsecurity=False).hexdigest()


def refuse_control(url: str) -> None:
    """Raise ConfigError for a URL with characters that `_replaced` replaces."""
    # `redact` would show what follows a newline in a signature.
    if not url.isprintable() and (name := _replaced(url)) != url:
        what = "contains a control character" if re.search(_CONTROL, url) else "is not UTF-8"
        raise ConfigError(f"{shown_url(name)!r} {what}. Strip line ends from URLs, or rename it.")


def _replaced(url: str) -> str:
    """Replace control characters and, unless it is a path, bytes that are not UTF-8."""
    is_path = "://" not in url or url.lower().startswith("file:")
    return re.sub(_CONTROL if is_path else _NOT_TEXT, "\N{REPLACEMENT CHARACTER}", url)


def parse_listed(parse: Callable[[str], ShardURL], url: str) -> ShardURL:
    """Parse a URL from a listing. `refuse_control` refuses it if a download begins."""
    shard = parse(name := _replaced(url))
    return shard if name == url else replace(shard, raw=url, key=_key_of(os.fsencode(url)))


def _file(url: str, path: str) -> str:
    if url.lower().startswith("file://localhost/"):
        path = path[len("localhost") :]
    if not path:
        raise ConfigError(f"{url!r} names no file")
    if url[0] in "\"'":
        raise ConfigError(f"{redact(url)} begins with a quote. Remove the quotes around it.")
    if url[:2] == "~/":
        raise ConfigError(f"{url}: no shell has expanded the ~. Write the whole path.")
    return f"file://{absolute(path)}"  # with "..", which follows symbolic links


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raise ConfigError if the working directory was removed."""
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        text = f"{path} is relative to the working directory, which was removed. Give an absolute "
        raise ConfigError(f"{text}path, or change to another directory.") from None


def shown_url(url: str) -> str:
    """Return a URL without secrets, and the name of a command. The URL may be malformed."""
    match = re.match(r"(?is)((?:.*?(?:::|://|[\s,]))?)pipe:(.*)", url)
    return redact(match[1]) + name_command(match[2].strip()) if match else redact(url)


def name_command(command: str) -> str:
    """Return a name of a command for logs: the program, the URL that it reads, and a digest.

    All other parts may be credentials (``-u me:secret``, ``X-Api-Key: ...``).
    """
    program = match[1].rpartition("/")[2] if (match := re.match(_PROGRAM, command)) else "sh"
    target = re.search(r"[a-z][a-z0-9+.-]*://[^\s\"'|;<>()]+", command)
    reads = f" {redact(target.group())}" if target else ""
    digest = hashlib.blake2b(command.encode("utf-8", "surrogatepass"), digest_size=4)
    return f"pipe:{program}{reads} #{digest.hexdigest()}"


def _pipe(command: str) -> str:
    """Return a command's identity: its text, and the values of variables without credentials."""
    for name in map("".join, re.findall(VARIABLE, " ".join(re.findall(_ADDRESS, command)))):
        if re.search(CREDENTIAL, name):
            raise ConfigError(
                f"{name_command(command)}: ${name} may hold a credential, which must not be part "
                "of an address. Send it in a header, or rename the variable."
            )
    names = sorted(set(map("".join, re.findall(VARIABLE, command))))
    public = [n for n in names if n in os.environ and not re.search(CREDENTIAL, n)]
    return "\0".join((f"pipe:{command}", *(f"{name}={os.environ[name]}" for name in public)))


def split_bucket(rest: str) -> tuple[str, str]:
    """Split an ``s3`` URL without scheme into bucket (or ARN) and object. A login is dropped."""
    if arn := re.fullmatch(rf"(?s)(?:[^/@]*@)?({_ARN})(?:/(.*))?", rest):
        return arn[1], arn[2] or ""
    bucket, _, name = rest.partition("/")
    return bucket.rpartition("@")[2], name


def _s3(url: str, rest: str) -> tuple[str, str | None, str]:
    bucket, name = split_bucket(rest)
    version_id = None
    # Any other question mark is part of the object's key.
    if versioned := re.fullmatch(r"(?s)(.*)\?versionId=([^&?]+)", name):
        name, version_id = versioned.groups()
    if not bucket or not name:
        text = "names no object; expected s3://bucket/key, or s3://bucket/ for all shards"
        raise ConfigError(f"{redact(url)} {text}")
    if ":" in bucket and not re.fullmatch(_ARN, bucket):
        raise ConfigError(
            f"{redact(url)}: the name of a bucket has no colon. The ARN of an access point is "
            "arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME. Put credentials into a profile, the "
            "environment or storage_options, not into the URL."
        )
    query = "" if version_id is None else f"?versionId={version_id}"
    return f"s3://{bucket}/{name}{query}", version_id, name


def _generic(url: str, scheme: str, rest: str) -> tuple[str, str, str]:
    """Return the canonical URL (without the key), the identity, and the object's name."""
    kind = find_scheme(scheme)
    if kind.is_web:
        rest = rest.partition("#")[0]  # a fragment is never sent; other schemes allow # in names
    address, mark, query = rest.partition("?")
    if kind.is_web and query and (unsigned := _without_signatures(query)) != query:
        mark, query = "?" if unsigned else "", unsigned
    netloc, slash, path = address.partition("/")
    user, at, host = netloc.rpartition("@")
    if kind.is_web:
        host, slash = _web_host(url, scheme, netloc), "/"
    elif at and kind.user != "login":
        if ":" in user:
            raise ConfigError(
                f"{redact(url)}: a {scheme}:// URL may not contain a password before an @. Put "
                "credentials into storage_options."
            )
        host = netloc
    if not (host or path):
        raise ConfigError(f"{redact(url)} names no object")
    base = f"{scheme}://{host}{slash}{path}{mark}"
    return f"{base}{query and _masked(query)}", f"{base}{query}", path or host


def is_signed(query: str) -> bool:
    """Return whether a query has a complete signature."""
    return _without_signatures(query) != query


def _without_signatures(query: str) -> str:
    """Return a query without the parameters of complete signatures."""
    pairs = [(pair, pair.partition("=")[0].lower()) for pair in query.split("&")]
    names = {name for _, name in pairs}
    signed = "|".join(
        parts
        for needed, parts in _SIGNATURES.items()
        if all(names.intersection(choice.split("|")) for choice in needed.split())
    )
    return "&".join(pair for pair, name in pairs if not signed or not re.fullmatch(signed, name))


def _masked(query: str) -> str:
    """Return a query with ``***`` in place of each value, because any value may be a secret."""

    def masked(match: re.Match[str]) -> str:
        name, equals, value = match[0].partition("=")
        # If only base64 padding or punctuation follows the "=", the text is a value without a name.
        if not value.strip("=.,:)"):
            name, equals, value = "", "", match[0]
        return match[0] if name.lower() in _VERSIONS else f"{name}{equals}***"

    return re.sub(r"[^?&;]+", masked, query)


def _web_host(url: str, scheme: str, netloc: str, what: str = "") -> str:
    """Return the host and the port of ``netloc`` without a login, in their shortest form."""
    reason = ""
    try:
        parts = urlsplit(f"{scheme}://{netloc}")
        if not parts.hostname or parts.port == 0:
            reason = "names no host"
    except ValueError:  # it may quote a part of a password, so it is no context of the error
        reason = "is not a URL: check its host and port"
    if reason:
        raise ConfigError(f"{what}{redact(url)} {reason}")
    host = netloc.rpartition("@")[2].lower().removesuffix(":")
    return host.removesuffix(_DEFAULT_PORTS.get(scheme, ":"))


def redact(text: str) -> str:
    """Return ``text`` without the logins, signatures and tokens in its URLs and headers."""
    text = re.sub(_WEB_URL, lambda match: match[1] + _masked(match[2] or ""), text)
    for pattern, replacement in _REDACTIONS.items():
        text = re.sub(pattern, replacement, text)
    return text


@functools.lru_cache(maxsize=64)
def secret_forms(*secrets: str | None) -> tuple[str, ...]:
    """Return the forms in which a server may repeat secrets (percent-encoded), longest first."""
    texts = [text for text in secrets if text]
    forms = {form for text in texts for form in (text, quote(text, safe=""), unquote(text))}
    return tuple(sorted((f for f in forms if len(f) >= _MIN_SECRET), key=len, reverse=True))


def quoted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a server's text for an error message: on one line, shortened, and without secrets."""
    for form in secrets:
        text = text.replace(form, "***")
    text = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", redact(text)).split())
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _authority(endpoint: str | None) -> str:
    """Return the endpoint as a part of an identity, or "" for AWS's standard partition."""
    if not endpoint:
        return ""
    scheme, _, rest = endpoint.rpartition("://")
    netloc, slash, path = re.split("[?#]", rest)[0].partition("/")
    host = _web_host(endpoint, scheme.lower() or "https", netloc, "the S3 endpoint ")
    if re.fullmatch(rf".+\.({_AWS_TOP})", name := host.partition(":")[0]):
        if region := re.search(_AWS_REGION, name):
            return f"aws:{region[1]}"
        if name.endswith(".amazonaws.com"):
            return ""
    # The scheme is dropped: http and https at the same host and port are the same object store.
    return f"{host}{slash}{path}".rstrip("/")
