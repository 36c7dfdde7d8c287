"""``shardcache run``: programs that do not import shardcache."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.clitools import SHARDS, Command, run_process
from tests.support.disktools import disk, needs_root, remount
from tests.support.storetools import PATIENCE
from tests.support.tars import make_tar
from tests.support.trainingtools import programs

#: The import of torch takes seconds.
WITHOUT_TORCH = """
import sys; sys.modules["torch"] = None
import webdataset as wds
"""
#: Reads all samples of its shards.
SAMPLES = f"{WITHOUT_TORCH}\nprint(len(list(wds.WebDataset(sys.argv[1], shardshuffle=False))))\n"
#: Reads them twice in each of two workers, which build the pipeline and skip errors, as in timm.
WORKERS = f"""{WITHOUT_TORCH}
import multiprocessing, os
def read(worker):
    os.environ |= {{"WORKER": f"{{worker}}", "NUM_WORKERS": "2"}}
    samples = wds.tarfile_to_samples(handler=wds.ignore_and_continue)
    dataset = wds.DataPipeline(wds.SimpleShardList(sys.argv[1]), wds.split_by_worker, samples)
    sys.stdout.write(f"{{len(list(dataset))}} {{len(list(dataset))}}\\n")  # at once
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    workers = [context.Process(target=read, args=(worker,)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(7)
"""
#: Reads and writes a file, reads a shard and the output of a command.
FILES = f"""{WITHOUT_TORCH}
import mark
other, first = sys.argv[1:]
print(wds.gopen(first.replace("train-0000.tar", "_info.json")).read(), mark.here)
with wds.TarWriter(other) as writer:
    writer.write(dict(__key__="a", txt="b"))
assert wds.gopen(other).name == other.replace("x.tar", "new/x.tar")
assert wds.gopen("pipe:echo hello").read() == b"hello\\n"
shard = wds.gopen(first.replace("s3://", "cloud://"))
assert shard.name == first and shard.read()
standard_input = next(wds.tariterators.url_opener([{{"url": "-"}}]))["stream"]
assert standard_input is sys.stdin.buffer
try:
    wds.gopen("ftp://host/_info.json")
except ValueError as exn:
    print(exn)
"""


@pytest.fixture
def launch(tmp_path):
    """Run a program with the command; returns exit code, stdout and stderr."""
    program = tmp_path / "train.py"

    def launch(text, *arguments, flag="--", **options):
        program.write_text(text)
        return run_process("run", flag, sys.executable, program, *arguments, **options)

    return launch


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_through_the_cache(method, launch, spec, proxy, tmp_path):
    code, out, err = launch(WORKERS, spec, method)
    assert (code, out) == (7, "40 40\n" * 2), err
    assert [*proxy.fetches().values()] == [1] * SHARDS
    last = f"{2 * SHARDS} shards opened, {SHARDS} of them from the cache in /"
    assert last in err


def test_the_last_line_counts_the_opens_of_this_run_only(launch, spec, bucket):
    other = "import sys, shardcache; shardcache.Cache().open(sys.argv[1]).read()"
    text = f"{WITHOUT_TORCH}\nimport os, subprocess\nos.environ.pop('SHARDCACHE_RUN')\n"
    text += f"subprocess.run([sys.executable, '-c', {other!r}, sys.argv[1]], check=True)"
    code, _, err = launch(text, f"s3://{bucket}/train-0000.tar")
    assert code == 0 and "no shard was opened through the cache" in err, err


@pytest.mark.parametrize(
    ("shards", "directory", "samples", "line", "last"),
    [
        (None, "/proc/c", 40, "no shard will be cached", "last second may be missing"),
        (None, "/etc", 40, "no shard will be cached", "8 shards opened, 0 of them from the cache"),
        ("s3://nowhere/{0..9}.tar", "c", 0, "s3://nowhere/", "; 20 could not be opened"),
        ("pipe:true {0..9} | cat", "c", 0, "and WebDataset reads it", "; 10 shards not cached"),
    ],
)
def test_a_fault_is_logged_once(shards, directory, samples, line, last, launch, spec, tmp_path):
    code, out, err = launch(WORKERS, shards or spec, "fork", directory=tmp_path / directory)
    assert (code, out) == (7, f"{samples} {samples}\n" * 2)
    assert err.count(line) == 1, err  # two epochs of two workers
    assert last in err.splitlines()[-1] and "streamed, not cached" not in err


def test_a_repeated_order_is_named_once_and_v_logs_more(launch, spec):
    code, out, err = launch(2 * SAMPLES.replace("shuffle=False", "shuffle=100"), spec, flag="-v")
    assert (code, out) == (0, "80\n80\n") and err.count("the same order of shards") == 1, err
    assert err.count("from its origin in") == SHARDS


@needs_root
def test_a_read_only_cache_is_named_by_prewarm_and_once_by_run(launch, spec, run, tmp_path):
    with disk(tmp_path / "disk", "size=8m") as path:
        prewarm = "--dir", path / "c", "prewarm", spec.replace("0003", "0001")
        run.out(*prewarm)
        remount(path, "ro")
        error = run.err(*prewarm, code=2)
        code, out, err = launch(WORKERS, spec, "fork", directory=path / "c")
    assert "Read-only file system" in error and "remount,rw" in error
    assert (code, out) == (7, "40 40\n" * 2)
    assert err.lower().count("read-only") == 1 and "counts nothing" in err, err
    assert "8 shards opened, 4 of them from the cache" in err.splitlines()[-1]


def test_only_reads_of_shards_use_the_cache(launch, s3, bucket, spec, tmp_path):
    s3.put(bucket, "_info.json", b'{"splits": {}}')  # timm's
    (tmp_path / "sitecustomize.py").write_text("import mark; mark.here = 'customized', __file__")
    (tmp_path / "mark.py").touch()
    (tmp_path / "new").mkdir()
    environment = {
        "GOPEN_REWRITE": f"cloud://=s3://;{tmp_path}/={tmp_path}/new/",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    files = tmp_path / "x.tar", f"s3://{bucket}/train-0000.tar"
    code, out, err = launch(FILES, *files, environment=environment)
    assert code == 0, err
    assert "splits" in out and "no gopen handler" in out and "not cached" not in err
    assert f"'customized', '{tmp_path}/sitecustomize.py'" in out
    assert len(list((tmp_path / "cache").glob("v1/objects/*/*/*/*.tar"))) == 1


@pytest.mark.parametrize(
    ("form", "opened", "reason"),
    [
        ("s3://{}/shard-00000", 2, None),
        ("pipe:aws s3 cp --no-progress s3://{}/a.tar - 2>/dev/null || true", 2, None),
        ("pipe:aws s3 cp s3://{}/a.tar - --sse-c AES256", 0, "shardcache does not know"),
        ("pipe:cat shard | tail -c +1", 0, "only a shell understands its '|'"),
        ("pipe:aws s3 cp s3://nowhere/b.tar - --no-sign-request", 0, "access denied"),
        ("pipe:gsutil cat gs://nowhere/b.tar", 0, "gs:// cannot be read here"),
        ("pipe:cat shard", 0, "it is a local file, which is read in place. Set cache_local"),
    ],
)
def test_the_last_line_tells_what_was_read(form, opened, reason, launch, put, bucket, tmp_path):
    for name in ("a.tar", "shard-00000"):
        put(name, make_tar(1))
    (tmp_path / "shard").write_bytes(make_tar(1))
    cat = f"exec cat {tmp_path}/shard"  # what the clients would read with other credentials
    environment = {"PATH": programs(tmp_path / "bin", aws=cat, gsutil=cat)}
    options = {"environment": environment, "cwd": tmp_path}
    code, out, err = launch(2 * SAMPLES, form.format(bucket), **options)
    assert (code, out) == (0, "4\n4\n"), err
    *_, last = err.splitlines()
    assert f"{opened} shards opened" in last if opened else "no shard was opened" in last
    assert "replace PYTHONPATH?" not in last
    assert (reason is None) == ("not cached" not in last) and (reason or "") in last
    is_refused = reason is not None and "in place" not in reason
    assert err.count("and WebDataset reads it") == is_refused
    assert "could not be opened" not in last


@pytest.mark.parametrize(
    ("command", "temporary"),
    [
        ("echo x > ${SHARDCACHE_RUN#*:}", "/tmp"),
        ("rm -r $(dirname ${SHARDCACHE_RUN#*:})", "/tmp"),
        ("true", "/proc"),
    ],
)
def test_the_file_of_a_run_may_be_damaged_or_missing(run, monkeypatch, command, temporary):
    monkeypatch.setattr("tempfile.tempdir", temporary)
    code, _, err = run("run", "--", "sh", "-c", f"{command}; exit 7")
    assert code == 7 and "no shard is known" in err and "Traceback" not in err


HIDDEN = "import sys; sys.modules['shardcache'] = None; import webdataset"
WORDS = ["-v", "--config", "train.yaml", "--dir", "X", "--", "--json"]


@pytest.mark.parametrize(
    ("words", "code", "out", "message"),
    [
        (["-c", "import sys; print(sys.argv[1:])", *WORDS], 0, f"{WORDS}\n", "no shard was opened"),
        (["-I", "-c", ""], 0, "", "replace PYTHONPATH?"),
        (["-c", HIDDEN], 1, "", f"shardcache is not installed for {sys.executable}"),
    ],
)
def test_the_program_gets_its_words_and_an_explanation(words, code, out, message):
    done = run_process("run", sys.executable, *words)
    assert done[:2] == (code, out) and message in done[2], done


def test_signals_pass_through_except_those_that_nohup_ignores():
    text = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)"
    words = "run", "--", sys.executable, "-c", f"{text}; signal.pause()"
    with Command(*words, python=["nohup", sys.executable, "-m", "shardcache"]) as command:
        assert command.process.stdout.readline() == "True\n"
        command.process.send_signal(signal.SIGTERM)
        assert command.end()[0] == 128 + signal.SIGTERM


def test_a_signal_that_comes_before_the_program_reaches_it(run, monkeypatch):
    real, started = subprocess.Popen, []

    def start(*args, **options):
        started.append(real(*args, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    code, *_ = run("run", "--", sys.executable, "-c", "import signal; signal.pause()")
    (child,) = started
    try:
        assert (code, child.wait(PATIENCE)) == (128 + signal.SIGTERM, -signal.SIGTERM)
    finally:
        child.kill()


def test_the_program_may_change_its_directory(launch, spec, tmp_path, monkeypatch):
    (tmp_path / "shardcache.toml").write_text('dir = "here"\nmax_size = "1GB"\n')
    (tmp_path / "elsewhere").mkdir()
    moved = f"import os; os.chdir({str(tmp_path / 'elsewhere')!r})\n{SAMPLES}"
    moved += "import shardcache; print(shardcache.default_cache().config.max_size)"
    for directory in "", "given":
        environment = {"SHARDCACHE_CONFIG": "", "SHARDCACHE_DIR": directory}
        environment["SHARDCACHE_TIERS"] = f"t=1GB,{tmp_path}/u=1GB"
        code, out, err = launch(moved, spec, environment=environment, cwd=tmp_path)
        assert (code, out.split()) == (0, ["80", "1GB"]), err
        assert f"{SHARDS} shards opened" in err
        assert (tmp_path / (directory or "here") / "manifest.json").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_env_prints_directory_and_configuration_of_the_command(run, spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shardcache.toml").write_text("[")  # is not read
    (tmp_path / "good.toml").touch()
    options = "--config=good.toml", "--dir=~/c"
    out = run.out(*options, "run", "-o", "min_free=0", "--env")
    (tmp_path / "train.py").write_text(SAMPLES)
    (tmp_path / "job.sh").write_text(f"{out}\nexec {sys.executable} train.py '{spec}'")
    process = run_process(python=["sh", tmp_path / "job.sh"])
    assert process[:2] == (0, "80\n"), process[2]
    assert run.out(*options, "ls").count("train-") == SHARDS
