"""The advice in an error works: a user who follows it literally no longer gets the error."""

import re
import shlex

import pytest

from shardcache.cache import Cache
from shardcache.errors import ShardCacheError

#: A command, the advice in its message, and the command that follows the advice (@), also with a
#: variable in front. Words in capital letters are those of `names`.
COMMANDS = [
    ("prewarm PIPE", r"SHARDCACHE_ALLOW_SCHEMES=\w+", "@ prewarm PIPE"),
    ("prewarm FILE", r"SHARDCACHE_CACHE_LOCAL=1", "@ prewarm FILE"),
    ("run --env -o max_size=800", r"(?<=Write )\w+", "run --env -o max_size=@"),
    ("prewarm URL --limit-rate 1000", r"(?<=Write )\w+", "prewarm URL --limit-rate @"),
    ("prewarm URL --deadline 90", r"90m", "prewarm URL --deadline @"),
    ("pin URL --for 3", r"3s", "pin URL --for @"),
    ("clean --max-age 14", r"14d", "clean --max-age @"),
    ("prewarm FOLDER/train-{0000-0003}.tar", r"{0000..0003}", "prewarm FOLDER/train-@.tar"),
    ("path FOLDER/train-{0000...0003}.tar", r"{0000\.\.0003}", "path FOLDER/train-@.tar"),
    ("path FOLDER/train-{0000.0003}.tar", r"{0000\.\.0003}", "path FOLDER/train-@.tar"),
    ("path --no-sign-request --fetch FOLDER/none.tar", r"(?<=omit anon \()--no-sign-request",
     "expand @ URL"),
    ("expand 'FOLDER/${X}'", r"WDS_X(?=: set it)", "@=x.tar expand 'FOLDER/${X}'"),
    ("path FOLDER/absent.tar", r"(?<=Pass )--fetch", "path @ FOLDER/train-0001.tar"),
    ("clean --all", r"(?<=pass )-y", "clean --all @"),
    ("prewarm URL --node-rank 0 --node-count 1", r"(?<=need )--shard-by-node",
     "prewarm URL --node-rank 0 --node-count 1 @"),
    ("prewarm URL --shard-by-node", r"--node-rank and --node-count",
     "prewarm URL --shard-by-node --node-rank 0 --node-count 1"),
    ("stats --format json", r"(?<=Pass )--json", "stats @"),
    ("doctor URL", r"(?<=Pass )--url", "doctor @ URL"),
    ("report -o -", r"(?<=Write )/dev/stdout", "report -o @"),
    ("prewrm URL", r"(?<=Did you mean ')\w+", "@ URL"),
    ("--config FILE config", r"name another with --config", "--config /dev/null config"),
    ("stats --dir FILE", r"(?<=Check dir \()--dir", "stats @ CACHE"),
    ("AWS_ACCESS_KEY_ID= AWS_SECRET_ACCESS_KEY= PUBLIC", "--no-sign-request", "PUBLIC @"),
    ("AWS_ACCESS_KEY_ID= AWS_SECRET_ACCESS_KEY= PUBLIC", r"\w+STORAGE_OPTIONS='.*?'", "@ PUBLIC"),
]  # fmt: skip
#: A URL, arguments of `Cache`, the advice in the message, and the arguments that follow it (@).
PYTHON = [
    ("zip://a.tar", "", r"allow_schemes=\[.*?\]", "@"),
    ("FILE", "", r"cache_local", "@=True"),
    ("URL", "", r"storage_options={.*?}", "@"),
    ("URL", "max_sice='1GB'", r"(?<=Did you mean )\w+", "@='1GB'"),
]


@pytest.fixture
def names(bucket, data, warm, tmp_path, files):
    file, folder = tmp_path / "x.tar", f"s3://{bucket}"
    files.files["/lab/a.tar"] = data["train-0000.tar"]
    file.write_bytes(data["train-0000.tar"])
    names = {"FILE": file, "FOLDER": folder, "URL": f"{folder}/train-0000.tar"}
    names["PUBLIC"] = f"path --endpoint-url {files.url} --fetch s3://lab/a.tar"
    return {**names, "PIPE": f"'pipe:head -c 1GB {file}'", "CACHE": tmp_path / "cache"}


@pytest.mark.parametrize(("before", "advice", "after"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_the_advice_of_a_command_works(run, names, monkeypatch, before, advice, after):
    def shell(line):
        line = re.sub(rf"\b({'|'.join(names)})\b", lambda name: str(names[name[0]]), line)
        words = shlex.split(line)
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        return run(*words)

    code, out, err = shell(before)
    found = re.search(advice, err)
    assert code and found, err
    assert code == 1 or (not out and len(err.splitlines()) == 1)  # a usage error is one sentence
    code, _, err = shell(after.replace("@", found[0]))
    assert not re.search(advice, err) and code in (0, 3), err


@pytest.mark.parametrize(("url", "before", "advice", "after"), PYTHON)
def test_the_advice_of_an_error_works(names, monkeypatch, tmp_path, url, before, advice, after):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    url = shlex.split(str(names.get(url, url)))[0]

    def error(arguments):
        try:
            options = eval(f"dict({arguments})")  # noqa: S307 - our own
            Cache(tmp_path / "other", **{"min_free": 0, **options}).fetch(url)
        except ShardCacheError as exn:
            return str(exn)
        return ""

    found = re.search(advice, text := error(before))
    assert found, text
    assert not re.search(advice, error(after.replace("@", found[0])))
