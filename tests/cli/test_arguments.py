"""No arguments, however wrong, end in a traceback, in a code that is not documented, or in a file.

Lists of arguments are made from what each command takes, as click knows it: a new option is tried
as soon as it is there. They run through `shardcache.cli.main.main`, as the command itself does.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import hypothesis
import pytest
from hypothesis import strategies as st

from shardcache.cache import Cache
from shardcache.cli import demorun as demo
from shardcache.cli.main import _COMMANDS, ANY, OTHER_CODES, command_line, main
from tests.support.storetools import tree
from tests.support.tars import make_tar

#: The same lists every time: a run of the tests is to find what the last one found.
steady = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(hypothesis.HealthCheck),
)

LONG = "x" * 9000
ODD = ["é", "\u202e\u0007", "\udcff", "a\nb", "\x1b[2J", "\U0001f4be", "​", LONG]
#: Nothing of these is a number, a size, a duration, a percentage, a filter or a sort order.
NOT_A_VALUE = ["", " ", "x", "--", "nan", "-1", "1e999", "inf", "-inf", "12 parsecs", "5%%", *ODD]
#: metavar of an option -> what is right, what is wrong beside `NOT_A_VALUE`.
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "N": (["1"], ["0.5", "1_000x"]),
    "SECONDS": (["0.2"], ["0", "4000", "1h"]),
    "SIZE": (["1", "800GB", "10GiB", "50%"], ["5 parsecs", "-1GB", "200%", "1e400GB"]),
    "DURATION": (["1", "90s", "1h30m", "14d"], ["1h-30m", "-1s", "soon", "1e400d"]),
    "RATE": (["1GB", "50MB/s"], ["1", "63kB", "0", "50 MB per s", "/s"]),
    "PERCENT": (["5%", "100%"], ["0%", "101%", "5", "5GB"]),
    "EXPR": (["size>1GB", "used<2d", "state=ok"], ["size>", "size~1", "weight>1", "used<2x"]),
    "FIELD[:desc]": (["size", "url:desc"], ["weight", "size:down", ":"]),
    "SPEC": (["s3://b/a.tar"], []),
    "NAME": (["lab/train:17"], []),
    "NAMES": (["a,b"], []),
    "ADDRESS": (["127.0.0.1:9"], []),
    "CPUS": (["0.5", "2"], ["two", "2000"]),
    "UID": (["1000"], ["root", "1.5"]),
    "KEY=VALUE": (["lab/gpu=yes"], []),
    "KEY[=VALUE][:EFFECT]": (["gpu", "gpu=yes:NoSchedule", "*"], []),
}
#: Of these, what is wrong depends on more than the word.
FREE = ("SPEC", "NAME", "NAMES", "ADDRESS", "KEY=VALUE", "KEY[=VALUE][:EFFECT]")
PATHS = ["missing/file", "a.tar", "folder", "folder/file", ".", "/dev/null", "/proc/self/mem"]
URLS = [
    *("s3://", "s3:///x", "s3://b", "s3://b/", "s3://b/x.tar", "s3://b/{0..3}.tar", "s3://b/{0..", "://"),
    *("file:///", "/", "..", "a.tar", "http://127.0.0.1:9/x.tar", "http://[::1", "gopher://x/y.tar"),
    *("pipe:true", "a::b::c", "s3://b/*", "*", "[", "s3://k:s@b/x", "s3://b/x?versionId=", "s3://b/%zz"),
    *(f"s3://b/{odd}.tar" for odd in ODD),
]  # fmt: skip


@dataclass
class Used:
    """A cache with one shard, beside things that are none of its business."""

    home: Path

    def outside(self) -> dict:
        """All that is there, but for the caches."""
        caches = (str(self.home / "cache"), str(self.home / "elsewhere"))
        return {name: what for name, what in tree(self.home).items() if not _below(name, caches)}


def _below(name: object, places: tuple[str, ...]) -> bool:
    return any(f"{name}/".startswith((f"{place}/", f"{Path(place).name}/")) for place in places)


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Used]:
    (tmp_path / "a.tar").write_bytes(make_tar(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("precious")
    with Cache(tmp_path / "cache", cache_local=True, min_free=0) as cache:
        cache.fetch(str(tmp_path / "a.tar"))
    monkeypatch.chdir(tmp_path)
    # Whatever a word makes of S3, nobody answers, at once.
    for name, value in {
        "SHARDCACHE_DIR": str(tmp_path / "cache"),
        "SHARDCACHE_ATTEMPTS": "1",
        "SHARDCACHE_TIMEOUT": "1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    step = demo.Step("x", 8, 1, 9, 9, 3, True, 1.5)
    monkeypatch.setattr(demo, "run", lambda **o: demo.DemoReport((step,), 16, 9, (1, 1), None))
    yield Used(tmp_path)


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a call in this process; nothing comes over stdin."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(list(words)), out.getvalue(), err.getvalue()
    finally:
        sys.stdin = before


def options_of(command: str) -> list[click.Parameter]:
    found = command_line.get_command(click.Context(command_line), command)
    assert found is not None
    # What is hidden is said by one process to another.
    hidden = {p.name for p in found.params if isinstance(p, click.Option) and p.hidden}
    return [p for p in found.params if p.name not in {"version", "help", "verbose", *hidden}]


def values_of(option: click.Parameter) -> tuple[list[str], list[str]]:
    """What an option takes, and what not."""
    if isinstance(option.type, click.Choice):
        return [str(choice) for choice in option.type.choices], NOT_A_VALUE
    metavar = option.metavar or ""
    if metavar in VALUES:
        right, wrong = VALUES[metavar]
        return right, ([] if metavar in FREE else [*NOT_A_VALUE, *wrong])
    if metavar == "URL":
        return ["s3://b/x.tar"], URLS
    assert metavar in ("FILE", "DIR", "DIRECTORY", "LIST"), f"{option.name}: what is a {metavar}?"
    return [], []  # places: see `_option`


@st.composite
def _option(draw: st.DrawFn, option: click.Option) -> list[str]:
    name = draw(st.sampled_from([*option.opts, *option.secondary_opts]))
    if option.is_flag or option.count:
        return [name] if draw(st.integers(0, 9)) else [f"{name}={draw(st.sampled_from(ODD[:6]))}"]
    right, wrong = values_of(option)
    if option.name == "dir":
        right, wrong = ["elsewhere", "cache"], ["a.tar", "folder", "", "folder/file", LONG]
    elif option.name == "output":
        right, wrong = [], ["missing/file", "a.tar/x", "", "/dev/full", LONG]
        wrong += ["folder"] if option.metavar == "FILE" else ["a.tar"]
    elif not right:
        right, wrong = PATHS[1:3], [*PATHS, "", *ODD]
    value = draw(st.sampled_from([*right, *wrong]))
    return [f"{name}={value}"] if name.startswith("--") and draw(st.booleans()) else [name, value]


@st.composite
def lists(draw: st.DrawFn, command: str) -> list[str]:
    """Options right and wrong, known and unknown, and words, in any order."""
    # `--ray` asks for a cluster.
    own = [p for p in options_of(command) if isinstance(p, click.Option) and p.name != "ray"]
    word = st.sampled_from([*URLS, *PATHS, *NOT_A_VALUE])
    argument = next((p for p in options_of(command) if isinstance(p, click.Argument)), None)
    if argument is not None and isinstance(argument.type, click.Choice):
        word = st.one_of(st.sampled_from([str(c) for c in argument.type.choices]), word)
    unknown = st.sampled_from([["--nothing"], ["-x"], ["-"], ["--no"], ["--d", "1"], ["--=1"]])
    each = st.one_of(
        st.sampled_from(own).flatmap(_option),
        word.map(lambda w: [w]),
        word.map(lambda w: [w]),
        unknown,
    )
    found = [w for words in draw(st.lists(each, max_size=5)) for w in words]
    if command == "top":  # it would go on for ever
        found = ["--count", "1", "--interval", "0.2", *found]
    if command == "report":  # where it writes is another test's question
        found = ["--output", "elsewhere.html", *found] if "--json" not in found else found
    return found


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_no_list_of_arguments_ends_in_a_traceback_or_touches_what_is_not_the_caches(
    used: Used, command: str
) -> None:
    codes = {*ANY, *OTHER_CODES.get(command, ())}
    before = used.outside()

    @steady
    @hypothesis.given(lists(command))
    def check(words: list[str]) -> None:
        code, out, err = call(command, *words)
        assert code in codes - {130, 143}, (words, code, err)
        assert "Traceback" not in err and "Traceback" not in out
        assert not code or err.strip() or out.strip(), (words, code)
        assert "\x1b[2J" not in out + err and "\x07" not in out + err, words
        (used.home / "elsewhere.html").unlink(missing_ok=True)
        (used.home / "shardcache-report.html").unlink(missing_ok=True)
        assert used.outside() == before, words

    check()


WRONG = [
    (command, option, value)
    for command in _COMMANDS
    for option in options_of(command)
    if isinstance(option, click.Option) and not option.is_flag and not option.count
    for value in values_of(option)[1]
    if option.metavar != "URL"
]


def test_a_wrong_value_of_an_option_is_refused_by_its_name(used: Used) -> None:
    before = tree(used.home)
    assert len(WRONG) > 400
    for command, option, value in WRONG:
        name = option.opts[-1]
        code, out, err = call(
            command,
            f"{option.opts[0]}={value}"
            if len(option.opts[0]) > 2
            else f"{option.opts[0]}{value}"
            if value
            else f"{name}=",
        )
        asked = (command, name, value[:40])
        assert (code, out) == (2, ""), (*asked, code, out, err)
        assert any(each in err for each in (name, option.opts[0])), (*asked, err)
        assert err.startswith("error: ") and len(err.strip().splitlines()) == 1, (*asked, err)
    assert tree(used.home) == before


@pytest.mark.parametrize(
    "line",
    [
        "clean --all --max-size 1",
        "clean --all --orphans",
        "clean --all",
        "verify -n",
        "stats --zero --by rank",
        "stats --format prometheus --since 1h",
        "stats --format prometheus --zero",
        "top --json --count 2",
        "recipe cron --prewarm s3://b/x",
        "prewarm",
        "rm",
        "pin",
        "path a b",
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_touched(
    used: Used, line: str
) -> None:
    before = tree(used.home)
    code, out, err = call(*shlex.split(line))
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert tree(used.home) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ls --limit x", "--limit"),
        ("--dir a.tar ls", "a.tar"),
        ("--dir folder ls", "folder"),
        ("--config folder ls", "folder"),
        ("prewarm -f folder", "folder"),
        ("recipe k8s -o missing", "missing"),
        ("lss", "Did you mean ls?"),
    ],
)
def test_as_a_process_too(used: Used, line: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardcache", *shlex.split(line)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["path", "rm -y", "pin", "unpin", "prewarm -n"])
def test_a_url_that_is_none_is_named(used: Used, command: str) -> None:
    before = tree(used.home)
    for url, said in {
        "gopher://x/y.tar": "gopher",
        "s3:///x": "s3:///x",
        "s3://": "s3://",
        "pipe:true": "pipe:",
        "http://[::1": "http://[",
        "": "empty",
    }.items():
        code, out, err = call(*command.split(), url)
        assert (code, out) == (2, ""), (url, err)
        assert err.startswith("error: ") and said in err, (url, err)
    assert tree(used.home) == before


# -- help ----------------------------------------------------------------------------------


def examples(command: str) -> list[list[str]]:
    """The command lines of a command's help, as a shell would hand them over."""
    found = command_line.get_command(click.Context(command_line), command)
    assert found is not None and found.epilog is not None
    parsed = []
    for line in found.epilog.split("Examples:")[1].strip().splitlines():
        words = shlex.split(line.replace("$(", " ").replace(')"', " ").replace('"', " "))
        begin = next(i for i, w in enumerate(words) if w.endswith("shardcache"))
        rest = words[begin + 1 :]
        end = next((i for i, w in enumerate(rest) if w in ("|", ">", "&&")), len(rest))
        parsed.append(rest[:end])
    return parsed


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_every_command_has_help_with_examples_that_parse(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "Usage: shardcache" in out and "Examples:" in out
    lines = examples(command)
    assert any(command in words for words in lines)
    for words in lines:
        with command_line.make_context("shardcache", list(words)) as outer:
            name, inner, rest = command_line.resolve_command(
                outer, outer._protected_args + outer.args
            )
            assert name is not None and inner is not None
            if name == "recipe" and "-o" in rest:
                rest[rest.index("-o") + 1] = "/"  # where systemd is, there is the other one
            inner.make_context(name, rest, parent=outer).close()
