"""``pipe:`` URLs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardcache import ConfigError, TransferError, TransferTimeoutError
from shardcache.origins.command import PipeOrigin
from shardcache.urls import parse_url, read_command
from tests.support.tars import make_tar


def test_a_command_runs_once_and_its_output_is_cached(make_cache, tmp_path):
    (tmp_path / "a.tar").write_bytes(make_tar(8))
    cache = make_cache(allow_schemes=["pipe"])
    for _ in range(3):
        with cache.open(f"pipe: echo ran >> {tmp_path}/log; cat {tmp_path}/a.tar") as stream:
            assert stream.read() == make_tar(8)
    assert (tmp_path / "log").read_text() == "ran\n"


def test_output_that_is_too_long_for_the_cache_is_streamed(make_cache, tmp_path):
    (tmp_path / "a.tar").write_bytes(make_tar(8, members=20, size=100_000))
    url = f"pipe:cat {tmp_path}/a.tar"
    with make_cache(allow_schemes=["pipe"], max_size="1MB") as cache, cache.open(url) as stream:
        assert stream.read() == make_tar(8, members=20, size=100_000)
        assert url not in cache


@pytest.mark.parametrize(
    ("options", "command", "error"),
    [
        ({"max_size": 1, "deadline": 1}, "while :; do echo x; sleep 0.1; done", TransferError),
        ({"timeout": 1}, "exec sleep 3600", TransferTimeoutError),
    ],
)
def test_a_command_ends_with_its_reader(make_cache, tmp_path, options, command, error):
    with make_cache(allow_schemes=["pipe"], attempts=1, **options) as cache, pytest.raises(error):
        cache.fetch(f"pipe:echo $$ > {tmp_path}/pid; {command}")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_pickled_command_is_not_run():
    shard = parse_url("pipe:cat /etc/passwd", allow_schemes=["pipe"])
    with pytest.raises(ConfigError, match="pickling removed"):
        PipeOrigin(1.0).open(pickle.loads(pickle.dumps(shard)), 0, None)


OTHER = ("endpoint_url", "http://h:1"), ("profile", "p"), ("region_name", "r")


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("aws s3 cp s3://b/k.tar -", ("s3://b/k.tar", ())),
        ("aws --endpoint-url http://h:1 s3 cp 's3://b/a b' - --region=r --profile p --quiet",
         ("s3://b/a b", OTHER)),
        ("s5cmd --endpoint-url=http://h:1 cat s3://b/k", ("s3://b/k", OTHER[:1])),
        ("gsutil -q cat gs://b/k", ("gs://b/k", ())),
        ("curl -sLf 'https://h/k.tar?a=1&b=2'", ("https://h/k.tar?a=1&b=2", ())),
        ("curl -s -L https://h/k.tar", ("https://h/k.tar", ())),
        *((command, None) for command in (
            "aws s3 cp s3://b/k /tmp/x", "aws s3 cp s3://b/k - | gunzip", "aws s3 ls s3://b/k",
            "aws s3 cp s3://b/k - --sse-c AES256", "aws s3 cp s3://b/$KEY -", "aws s3 cp - s3://b/k",
            "s5cmd cat s3://b/*", "s5cmd cat s3://b/a s3://b/b", "gsutil cat s3://b/k",
            "curl -H 'X: y' https://h/k", "curl https://h/k?a=1&b=2", "curl -sk https://h/k",
            "curl 'https://h/k", "cat /x.tar", "", "aws",
        )),
    ],
)  # fmt: skip
def test_commands_that_only_read_a_url_are_recognised(command, read):
    assert read_command(f"pipe:{command}") == read


def test_a_command_of_an_s3_client_is_replaced_by_a_request(
    make_cache, s3, bucket, proxy, s3_environment, monkeypatch, tmp_path
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # no server listens
    keys = (s3_environment.pop(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    text = "[profile lab]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format(*keys)
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))  # no aws command
    s3.put(bucket, "a.tar", make_tar(8))
    url = f"s3://{bucket}/a.tar"
    client = f"--endpoint-url {proxy.endpoint_url} --profile lab"
    cache = make_cache(strict=True)
    for command in (f"aws {client} s3 cp {url} -", f"s5cmd {client} cat '{url}'"):
        with cache.open(f"pipe:{command}") as stream:
            assert stream.read() == make_tar(8)
    assert proxy.summary()[f"{bucket}/a.tar"].object_fetches == 1
    assert cache.path(url) is None  # the key for the endpoint of the environment
