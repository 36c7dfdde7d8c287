"""The frame of the command line: options, help, exit codes, errors and their advice, signals."""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from functools import partial

import pytest

import shardcache
from shardcache.cli.main import _COMMANDS, ExitCode, command_line
from shardcache.units import format_bytes
from tests.support.clitools import Command, run_process
from tests.support.disktools import disk, needs_root
from tests.support.proxy import Answer, Fault, Rule
from tests.support.storetools import PATIENCE, taken, tree, wait_until
from tests.support.tars import make_tar


def test_version_and_help(run):
    assert run() == run("--help")
    version = (0, f"shardcache {shardcache.__version__}\n", "")
    assert run("--version") == run("ls", "--version") == version
    code, out, _ = run("--help")
    assert code == 0 and "Exit codes:\n    0    done" in out
    assert all(re.search(rf"^  {name} +\S", out, re.M) for name in _COMMANDS)


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_every_command_has_help_with_examples_that_parse(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards.txt").touch()
    code, out, _ = run(command, "-h")
    assert code == 0 and "Usage: shardcache" in out and "--dir DIR" in out
    lines = out.split("Examples:\n")[1].partition("\n\n")[0].replace("\\\n", "").splitlines()
    assert any(command in line.split() for line in lines)
    for line in lines:
        line = line.replace("$(", " ").replace(')"', " ").replace('"', " ")
        words = shlex.split(re.split(r" [|>] ", line)[0])
        begin = next(n for n, word in enumerate(words) if word.endswith("shardcache"))
        with command_line.make_context("shardcache", words[begin + 1 :]) as outer:
            left = [*outer._protected_args, *outer.args]
            name, inner, rest = command_line.resolve_command(outer, left)
            assert name is not None and inner is not None
            inner.make_context(name, rest, parent=outer).close()


NEED_A_CACHE = (
    *("ls", "ls --partial", "rm -y x.tar", "stats", "top --count 1", "report -o r", "verify"),
    *("clean -q", "unpin x.tar"),
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("path --fetch ss3://b/a.tar", "Did you mean s3://?"),
        ("prewarm b/a.tar", "If it is an object, write s3://b/a.tar"),
        ("stats --format tsv", "tsv"),
        ("prewarm --max-size 0 s3://b/a", "'0' is not above 0"),
        ("pin --for '12 parsecs' s3://b/a", "--for"),
        ("pin \"'s3://b/a.tar'\"", "'s3://b/a.tar' begins with a quote."),
        ("pin '~/a.tar'", "~/a.tar: no shell has expanded the ~."),
        ("top --interval \x1b[2J", "--interval"),
        ("--config folder ls", "folder"),
        ("--dir folder ls", "folder is not a shardcache directory, and it has other files in it"),
        *(
            (f"--dir {name} {line}", f"{name} is not a shardcache directory{reason}")
            for name, reason in (("absent", ""), ("half", " (it has no manifest"))
            for line in NEED_A_CACHE
        ),
        ("--dir folder/file pin s3://b/a.tar", "is not a directory. Point dir"),
        ("--dir folder prewarm s3://b/a -n", "other files in it (file). Give the cache a"),
        ("clean --all --max-size 1B", "--all"),
        ("doctor --url s3://b/{0,1}.tar", "takes the URL of one shard"),
        ("import folder s3://b/train-*.tar", "PREFIX is the place of the files"),
        ("import folder s3://b/a.tar", "PREFIX is the place of the files"),
        ("import folder/file s3://b/", "folder/file is not a directory"),
        ("import '' s3://b/", "'' is not a directory"),
        ("import folder s3://b/", "no tar files"),
        ("index s3://b/a.tar -o pipe", "pipe is no regular file"),
        ("index s3://b/a.tar -o -", "- is not the name of a file"),
        ("index -o x.json", "No shards given"),
        ("index s3://a/b.tar -o x --check", "omit SPEC"),
        ("run --env --json", "omit --json"),
        ("run", "Give a program"),
        ("run -o max_size=many -- touch folder/x", "max_size (argument): 'many'"),
        ("run -o max_size -- touch folder/x", "NAME=VALUE"),
        ("verify -n", "--repair"),
        ("verify --sample 5%", "It was removed. Name some"),
        ("verify --remote", "It was removed. `prewarm --refresh -n`"),
        ("stats --zero --by rank", "--zero"),
        ("stats --format prometheus --since 1h", "prometheus"),
        ("recipe cron", "It was removed. Copy a file from the folder examples"),
        ("demo", "It was removed. Run examples/demo.py"),
        ("pin", "SPEC"),
        ("prewarm", "No shards given"),
        ("prewarm -f folder/file", "The list contains no shards"),
        ("prewarm s3://b/x --shard-by-node --node-rank 0", "go together"),
        ("prewarm s3://b/x --ray --shard-by-node --node-rank 0 --node-count 2", "With --ray"),
        ("prewarm s3://b/x --ray", "pip install 'shardcache[ray]'"),
        *(
            (f"--{name} prewarm s3://b/a.tar", "Write it after the command, such as prewarm.")
            for name in ("profile x", "region x", "endpoint-url http://h", "no-sign-request")
        ),
        ("--dir '' clean --all -y", "'--dir': It is empty."),
        ("--config '' clean --all -y", "'--config': It is empty."),
    ],
)
def test_a_usage_error_is_a_sentence_and_changes_nothing(run, tmp_path, monkeypatch, line, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("# precious")
    (tmp_path / "half" / "v1").mkdir(0o700, parents=True)  # the manifest comes last
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    before = tree(tmp_path / "folder")
    code, out, err = run(*shlex.split(line))
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert message in err
    assert tree(tmp_path / "folder") == before and not (tmp_path / "cache").exists()
    assert (tmp_path / "pipe").is_fifo()


#: Command line -> exit code, and start of the message. Other tests expect the codes 0, 2, 3 and 4.
ENDS = {
    "prewarm s3://{}/nothing-*.tar": (ExitCode.FAILED, "s3://"),
    "path --fetch s3://{}/train-0000.tar": (ExitCode.FULL, "s3://"),
    "report -o /dev/full": (ExitCode.FULL, "/dev/full: No space left"),
    "report -o /nowhere/x": (ExitCode.FAILED, "/nowhere/x: No such file"),
    "index s3://{}/a.tar -o /nowhere/x": (ExitCode.FAILED, "there is no directory /nowhere. Make "),
    "clean --no-wait": (ExitCode.BUSY, ""),
    "run -- nosuchprogram": (127, "nosuchprogram cannot be started: "),
    "run -- /etc/passwd": (126, "/etc/passwd cannot be started: "),
}


@pytest.mark.parametrize("line", ENDS)
def test_exit_codes_and_error_messages(run, spec, bucket, layout, monkeypatch, line):
    monkeypatch.setenv("SHARDCACHE_MAX_SIZE", "1kB")
    lock, (code, message) = taken(layout.named_lock("clean")), ENDS[line]
    ended, out, err = run(*line.format(bucket).split())
    assert (ended, out) == (code, "") and err.startswith(f"error: {message}"), err
    assert "Traceback" not in err
    lock.release()


def test_options_select_the_log_level(run, spec, bucket, proxy):
    shown = {}
    for number, option in enumerate(("-q", "--no-progress", "-v", "-vv")):
        proxy.script(Rule(Fault(answer=Answer(500, [], b"", "Trouble"))))
        url = f"s3://{bucket}/train-{number:04d}.tar"
        shown[option] = run.err(option, "path", "--fetch", url, code=0)
    assert shown["-q"] == shown["--no-progress"] == ""
    for line in (r"^info: .*fetched", r"^warning: .*attempt 1 of 5"):
        assert re.search(line, shown["-v"], re.M)
    assert "debug: " not in shown["-v"] and "debug: " in shown["-vv"]
    assert run("path", "--fetch", f"s3://{bucket}/none.tar", "-vv")[2].count("Traceback") == 1


@needs_root
def test_a_disk_that_cannot_be_used_is_explained(run, tmp_path):
    pin = "pin", "s3://b/x.tar", "--dir"
    why = "error: /proc/x/cache: no directory can be made in /proc\n"
    assert run.err(*pin, "/proc/x/cache") == why
    with disk(tmp_path / "disk", "size=1m") as path:
        with contextlib.suppress(OSError):
            (path / "others").write_bytes(bytes(2 << 20))
        err = run.err(*pin, path / "cache", code=5)
    assert err.startswith(f"error: {path}/cache/v1/") and "Make room" in err


def test_config_and_dir_commands(run, tmp_path, monkeypatch, set_variables):
    (file := tmp_path / "job.toml").write_text('storage_options = {secret = "hush"}\n')
    set_variables(SHARDCACHE_MAX_SIZE="5GB", AWS_ENDPOINT_URL="http://me:hush@h:1")
    set_variables(AWS_ACCESS_KEY_ID="hush", AWS_SECRET_ACCESS_KEY="hush")
    code, out, _ = run("config", "--config", file)
    *rows, access, last = out.splitlines()
    assert code == 0 and "hush" not in out and last.endswith(" options, 4 set")
    assert {"max_size\t5GB\tenvironment SHARDCACHE_MAX_SIZE", "attempts\t5\tdefault"} < {*rows}
    assert access == "S3: endpoint http://h:1, credentials from env"
    found = run.json("config", "--config", file)
    assert found["s3"] == {"endpoint": "http://h:1", "credentials": "env", "problem": ""}
    assert "hush" not in str(found)
    assert run("dir") == (0, f"{tmp_path / 'cache'}\n", "")
    assert run("--dir", "/elsewhere", "dir") == (0, "/elsewhere\n", "")
    monkeypatch.delenv("SHARDCACHE_DIR")
    assert run("dir") == (0, f"{tmp_path}/user/shardcache\n", "")
    hints = [run("pin", "s3://b/x.tar")[2] for _ in range(2)]  # no hint once the cache exists
    assert hints[0].startswith(f"Using {tmp_path}/user/shardcache; --dir") and not hints[1]


def written(run):
    out = run("ls", "--partial", "--json")[1]  # empty before the cache exists
    return json.loads(out)["summary"]["written_bytes"] if out else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_leaves_partials_that_are_resumed(slow, proxy, run, number):
    with Command("prewarm", slow, "-j", "2") as command:
        wait_until(lambda: written(run) >= 3 << 20)
        command.process.send_signal(number)
        ended, out, err = command.end()
    assert ended == 128 + number and "Traceback" not in err
    assert "3 not done because the run was interrupted" in out
    assert "Run the same command" in err
    kept = run.json("ls", "--partial")
    assert {partial["state"] for partial in kept["partials"]} == {"resumable"}
    assert "Warmed 0 of 3 shards (0 B, " in out and " received) in " in out
    on_disk = format_bytes(kept["summary"]["written_bytes"])
    assert f", {on_disk} of it on disk); free " in run("prewarm", "-n", slow)[1]
    proxy.resume()
    found = run.json("prewarm", slow)
    total = sum(shard["size"] for shard in found["shards"])
    blocks = sum(partial["written_bytes"] >> 20 << 20 for partial in kept["partials"])
    assert found["summary"]["received_bytes"] <= total - blocks < total


def test_the_second_signal_ends_at_once(slow, run):
    script = """if True:
        import runpy, sys
        from shardcache.download.download import Download
        Download.cancel = lambda self: print("calling off", file=sys.stderr, flush=True)
        runpy.run_module("shardcache", run_name="__main__")
    """
    words = ["prewarm", slow, "-j", "1", "--no-progress"]
    with Command(*words, python=[sys.executable, "-c", script]) as command:
        wait_until(lambda: written(run))
        command.process.send_signal(signal.SIGINT)
        assert "calling off" in command.process.stderr.readline()
        command.process.send_signal(signal.SIGTERM)
        code, out, err = command.end()
    assert code == 143
    assert "Warmed" not in out and "Run the same command" not in err


def test_an_ignored_signal_stays_ignored(slow, proxy, run):
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    words = ["prewarm", slow, "--no-progress"]
    with Command(*words, preexec_fn=ignore) as command:
        wait_until(lambda: written(run))
        command.process.send_signal(signal.SIGINT)
        proxy.resume()
        assert command.end()[0] == 0


def test_dir_and_help_import_nothing_heavy():
    """Jobs run `dir` at their start."""
    code = (
        "import sys; from shardcache.cli.main import main; main(['dir']); main(['--help'])\n"
        "heavy = {'botocore', 's3fs', 'webdataset', 'torch', 'rich', 'fsspec', 'filelock'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    assert run_process(python=[sys.executable, "-c", code])[::2] == (0, "[]\n")


def test_closed_and_full_streams(warm, tmp_path):
    with Command("ls") as command:
        command.process.stdout.close()
        assert command.process.wait(PATIENCE) == 0
        assert command.process.stderr.read() == ""
    start = f"exec {sys.executable} -m shardcache --dir {tmp_path / 'cache'}"
    for line, code in ("ls >&- 2>&-", 0), ("ls >/dev/full", 5), ("prewarm -f - <&-", 2):
        ended, _, err = run_process(python=["sh", "-c", f"{start} {line}"])
        assert ended == code and "Traceback" not in err


def test_profile_and_region_sign_the_requests(run, files, tmp_path, monkeypatch):
    files.files["/lab/a.tar"] = make_tar(3)
    keys = "[lab]\naws_access_key_id = AK\naws_secret_access_key = SK\n"
    (tmp_path / "credentials").write_text(keys)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    options = "--endpoint-url", files.url, "--profile", "lab", "--region", "eu-north-1"
    for command in ("prewarm", "doctor --url"):
        run.out(*command.split(), "s3://lab/a.tar", *options)
    asked = [head for head in files.heads if " /lab" in head]  # others see whether it answers
    assert asked and all(re.search(r"AK/\d{8}/eu-north-1/s3/", head) for head in asked)
