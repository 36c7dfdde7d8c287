"""Recognise ``pipe:`` commands that only read an object, such as ``aws s3 cp s3://bucket/a.tar -``.

shardcache requests such an object itself. It adopts the options that affect the access to the
object, such as a profile, and ignores those for speed, timeouts, retries and messages.
"""

from __future__ import annotations

import base64
import getopt
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from shardcache.errors import ConfigError
from shardcache.urls import VARIABLE


class Program(NamedTuple):
    """A program that can write an object to its standard output."""

    words: tuple[str, ...]  #: the arguments without options; ``{}`` stands for the object
    target: str  #: a regular expression that the URL or path of the object must match
    short: str = ""  #: the accepted one-letter options, in the format of `getopt`
    long: str = ""  #: the accepted long options, in the format of `getopt`, separated by spaces


_S3, _GS, _WEB = r"s3://[^/]+/.+", r"gs://[^/]+/.+", r"https?://.+"
#: The options of all programs that shardcache adopts, and its names for them.
_ADOPTED = {
    "--endpoint-url": "endpoint_url",
    "--no-sign-request": "anon",
    "--profile": "profile",
    "--region": "region_name",
    "--request-payer": "requester_pays",
    **dict.fromkeys(("-H", "--header", "-u", "--user"), "authorization"),
}
#: The options that name the output. Their value must be ``-``. wget needs one.
_OUTPUTS = ("-o", "--output", "-O", "--output-document")

#: The programs by name. docs/integrations.md lists the same options; a test compares the two lists.
PROGRAMS = {
    "aws": Program(
        ("s3", "cp", "{}", "-"),
        _S3,
        long="endpoint-url= no-sign-request profile= region= request-payer= cli-connect-timeout= "
        "cli-read-timeout= no-cli-pager no-progress only-show-errors quiet",
    ),
    "s5cmd": Program(
        ("cat", "{}"),
        _S3,
        short="r:",
        long="endpoint-url= no-sign-request profile= request-payer= concurrency= log= "
        "numworkers= part-size= retry-count=",
    ),
    "gsutil": Program(("cat", "{}"), _GS, short="mq"),
    "gcloud": Program(("storage", "cat", "{}"), _GS, "q", "no-user-output-enabled quiet"),
    "curl": Program(
        ("{}",),
        _WEB,
        short="H:LNSfgm:o:su:y:Y:",
        long="header= output= location no-buffer show-error fail globoff max-time= silent "
        "speed-time= speed-limit= connect-timeout= user= no-progress-meter retry= "
        "retry-all-errors retry-connrefused retry-delay= retry-max-time=",
    ),
    "wget": Program(
        ("{}",),
        _WEB,
        short="O:T:n:qt:",
        long="header= output-document= connect-timeout= no-verbose quiet read-timeout= "
        "retry-connrefused timeout= tries= waitretry=",
    ),
    "cat": Program(("{}",), r".+"),
}

#: Endings that do not change what a command reads, so they are removed. Even after ``|| true``, a
#: missing object raises an error, so that the pipeline's handler decides as for any other shard.
_ENDINGS = r"(\s*(2>\s*/dev/null|\|\|\s*(true|:)|\|\s*(\S*/)?cat(\s+-)?))+\s*\Z"
#: The AWS CLI accepts this option with its only value, ``requester``, or without a value.
_PAYER = r"(?<=\s)--request-payer(?:[= ]requester)?(?=\s|\Z)"
#: The parts of a command: blanks, quoted text, plain text, and characters special to a shell.
_PART = r"""(?sx)
    (?P<blank> [ \t]+)
  | '(?P<single> [^']*)'
  | "(?P<double> (?: [^"$`\\] | \$\w+ | \$\{\w+\} )*)"
  | (?P<plain> (?: [^\s'"$`\\*\[\]{}~\#!|&;<>()] | \$\w+ | \$\{\w+\} )+)
  | (?P<other> .)
"""
#: A variable in a word of `_words`, because a dollar sign in single quotes is no variable.
_MARKED = r"\0(\w+)\0"
_AUTHORIZATION = r"(?i)authorization:\s*(\S.*)"


def read_command(
    command: str, environ: Mapping[str, str] = os.environ
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the URL or path that a command (the text after ``pipe:``) reads, and its options.

    The options are sorted pairs of a name and a value: ``anon``, ``authorization`` (the value of
    the header, which alone may refer to variables), ``endpoint_url``, ``profile``,
    ``region_name``, ``requester_pays``. Raises ConfigError with the reason if it takes a shell.
    """
    command = re.sub(_PAYER, "--request-payer=requester", re.sub(_ENDINGS, "", command.strip()))
    name, *words = _words(command) or [""]
    program = PROGRAMS.get(name.rpartition("/")[2])
    if program is None:
        raise ConfigError("shardcache does not know the program")
    try:
        pairs, arguments = getopt.gnu_getopt(words, program.short, program.long.split())
    except getopt.GetoptError as exn:
        raise ConfigError(f"shardcache does not know its {exn.msg.split(' not ')[0]}") from None
    targets = [word for word in arguments if re.fullmatch(program.target, word)]
    if not targets or arguments != [word.format(targets[0]) for word in program.words]:
        raise ConfigError(f"it is not of the form {' '.join((name, *program.words))}")
    outputs = [value for option, value in pairs if option in _OUTPUTS]
    if set(outputs) - {"-"} or (program is PROGRAMS["wget"] and not outputs):
        raise ConfigError("it does not write to the standard output")
    options = {}
    for option, value in pairs:
        if (adopted := _ADOPTED.get(option)) == "authorization":
            value = re.sub(_MARKED, partial(_value, environ), value)
            if option in ("-u", "--user"):
                value = f"Authorization: Basic {base64.b64encode(value.encode()).decode()}"
            if (header := re.fullmatch(_AUTHORIZATION, value)) is None:
                raise ConfigError("it sends a header that is not Authorization")
            value = header[1]
        if adopted is not None:
            options[adopted] = value or "true"
    if variable := re.search(_MARKED, " ".join((targets[0], *options.values()))):
        raise ConfigError(f"only a shell expands its ${variable[1]}")
    if program is PROGRAMS["s5cmd"] and (endpoint := environ.get("S3_ENDPOINT_URL")):
        options.setdefault("endpoint_url", endpoint)
    return targets[0], tuple(sorted(options.items()))


def _value(environ: Mapping[str, str], match: re.Match[str]) -> str:
    name = match[1]
    if name.startswith("AWS_"):  # a secret that signs requests, which no server needs to see
        raise ConfigError(f"shardcache sends the variable {name} to no server")
    if name not in environ:
        raise ConfigError(f"the variable {name} is not set")
    return environ[name]


def _words(command: str) -> list[str]:
    """Split a command into words as a shell does. Raise ConfigError if that takes a real shell."""
    words, is_new = list[str](), True
    for part in re.finditer(_PART, command):
        kind = part.lastgroup or ""
        if kind == "other":
            raise ConfigError(f"only a shell understands its {part[0]!r}")
        if kind != "blank":
            marked = re.sub(VARIABLE, "\0\\1\\2\0", part[kind])
            words += [""] if is_new else []
            words[-1] += part[kind] if kind == "single" else marked
        is_new = kind == "blank"
    return words
