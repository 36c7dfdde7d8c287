"""``pipe:`` URLs."""

import os
import pickle
import signal
from pathlib import Path

import pytest

from shardcache import ConfigError, TransferError, TransferTimeoutError
from shardcache.pipe_commands import read_command
from tests.support.caches import read
from tests.support.tars import make_tar


def test_variables_tell_outputs_apart_and_credentials_do_not(make_cache, tmp_path, set_variables):
    for seed in range(3):
        (tmp_path / f"{seed}.tar").write_bytes(make_tar(seed))
    url = f"pipe:true $MYTOKEN; echo $N >> {tmp_path}/log; cat {tmp_path}/$N.tar | tail -c +1"
    for number, token, seed in (0, "a", 0), (1, "a", 1), (0, "b", 0):
        set_variables(N=number, MYTOKEN=token)
        with make_cache(allow_schemes=["pipe"]) as cache:
            assert read(cache, url) == make_tar(seed)
    assert len(list(cache.entries())) == 2 and (tmp_path / "log").read_text() == "0\n1\n"


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


def test_a_command_that_cannot_be_killed_holds_up_nothing(make_cache, monkeypatch):
    cache = make_cache(allow_schemes=["pipe"])
    shard, killpg = cache.parse("pipe:exec sleep 20"), os.killpg
    body = cache.process.origins.of(shard).open(shard, 0, None)
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", lambda *process: None)
        body.close()
    assert body._process.poll() is None
    killpg(body._process.pid, signal.SIGKILL)
    body._process.wait()


def test_a_pickled_command_is_not_run(make_cache):
    cache = make_cache(allow_schemes=["pipe"])
    shard = pickle.loads(pickle.dumps(cache.parse("pipe:echo shard | tr a b")))
    [error] = cache.prewarm([shard]).failures.values()
    assert isinstance(error, ConfigError) and "hidden, as in logs, lists and pickles" in str(error)


OTHER = ("endpoint_url", "http://h:1"), ("profile", "p"), ("region_name", "r")
ENVIRONMENT = {"TOKEN": "s3cret", "S3_ENDPOINT_URL": "http://minio:9000"}  # the latter of s5cmd
PAYER = ("requester_pays", "requester")
BEARER = ("authorization", "Bearer s3cret")
BASIC = ("authorization", "Basic bWU6czNjcmV0")


@pytest.mark.parametrize(
    ("command", "url", "options"),
    [
        ("aws --endpoint-url http://h:1 s3 cp 's3://b/a b' - --region=r --profile p --quiet",
         "s3://b/a b", OTHER),
        ("aws --cli-connect-timeout 0 s3 cp --cli-read-timeout=0 s3://b/k - --only-show-errors "
         "--no-progress --no-sign-request", "s3://b/k", (("anon", "true"),)),
        ("aws s3 cp --request-payer s3://b/k -", "s3://b/k", (PAYER,)),
        ("aws s3 cp s3://b/k - --request-payer requester", "s3://b/k", (PAYER,)),
        ("/usr/bin/aws s3 cp s3://b/k - --request-payer=requester", "s3://b/k", (PAYER,)),
        ("s5cmd --endpoint-url=http://h:1 cat s3://b/k", "s3://b/k", OTHER[:1]),
        ("s5cmd --no-sign-request -r 5 --log error cat s3://b/k", "s3://b/k",
         (("anon", "true"), ("endpoint_url", "http://minio:9000"))),
        ("gsutil -q -m cat gs://b/k", "gs://b/k", ()),
        ("gcloud storage cat gs://b/k --quiet", "gs://b/k", ()),
        ("curl -sSL -m5 --max-time 9 --retry 30 --fail --location -o - 'https://h/k.tar?a=1&b=2'",
         "https://h/k.tar?a=1&b=2", ()),
        ("curl -sLH 'Authorization: Bearer s3cret' https://h/k", "https://h/k", (BEARER,)),
        ('curl --header "authorization: Bearer $TOKEN" https://h/k', "https://h/k", (BEARER,)),
        ("wget -qO- https://h/k", "https://h/k", ()),
        ("wget -nv -O - -t 3 --header='Authorization: Bearer s3cret' https://h/k", "https://h/k",
         (BEARER,)),
        ("cat '/data/my shards/x.tar'", "/data/my shards/x.tar", ()),
        ("curl -su me:$TOKEN https://h/k", "https://h/k", (BASIC,)),
        ("aws s3 cp s3://b/k - --quiet || true", "s3://b/k", ()),
        ("""aws s3 cp 's3://b/$'"a b/"'$TOKEN' - 2>/dev/null | cat -""", "s3://b/$a b/$TOKEN", ()),
        ("aws s3 cp s3://b/k - --cli-read-timeout $SECONDS |/bin/cat || true", "s3://b/k", ()),
        ("curl -s https://h/k 2> /dev/null || true", "https://h/k", ()),
    ],
)  # fmt: skip
def test_commands_that_only_read_an_object_are_recognised(command, url, options):
    assert read_command(command, ENVIRONMENT) == (url, options)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("aws s3 cp s3://b/k /tmp/x", "form"),
        ("aws s3 cp s3://b/k - | gunzip", "'|'"),
        ("aws s3 cp s3://b/k - || cat", "'|'"),
        ("aws s3 cp s3://b/k - --sse-c AES256", "--sse-c"),
        ("aws s3 cp s3://b/$WORDS -", r"shell expands its \$WORDS"),
        ("aws s3 cp s3://b/k - --profile ${WORDS}", r"shell expands its \$WORDS"),
        ('curl -H "Authorization: $KEY" https://h/k', "variable KEY"),
        ('curl -H "Authorization: $AWS_SESSION_TOKEN" https://h/k', "AWS_SESSION_TOKEN to no"),
        ("s5cmd cat s3://b/*", r"'\*'"),
        ("gsutil cat s3://b/k", "form"),
        ("curl -H 'X: y' https://h/k", "header"),
        ("curl https://h/k?a=1&b=2", "'&'"),
        ("curl -sk https://h/k", "-k"),
        ("curl -so x https://h/k", "standard output"),
        ("curl 'https://h/k", '"\'"'),
        ("wget -q https://h/k", "standard output"),
        ("zcat /x.tar", "program"),
        ("", "program"),
    ],
)
def test_other_commands_are_left_to_a_shell(command, reason):
    with pytest.raises(ConfigError, match=reason):
        read_command(command, {"WORDS": "a b", "AWS_SESSION_TOKEN": "s3cret"})


@pytest.mark.parametrize("table", ["s3", None])
def test_a_command_of_an_s3_client_is_replaced_by_a_request_with_its_options(
    make_cache, s3, bucket, proxy, s3_environment, monkeypatch, tmp_path, table
):
    """They join those of the configuration, and its profile replaces the keys there."""
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
    own = {"key": "none", "secret": "none", "client_kwargs": {"endpoint_url": proxy.url}}
    https = {"https": {"headers": {"x": "y"}}}
    cache = make_cache(strict=True, storage_options={"s3": own, **https} if table else own | https)
    for command in (
        f"aws --profile lab --region us-east-1 s3 cp {url} -",
        f"s5cmd --endpoint-url {proxy.url} --profile lab cat '{url}'",
    ):
        assert read(cache, f"pipe:{command}") == make_tar(8)
    assert proxy.fetches() == {f"{bucket}/a.tar": 1}
    assert make_cache().path(url) is None  # the key for the endpoint of the environment


def test_a_command_whose_exit_status_is_lost_has_failed(make_cache):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        cache = make_cache(allow_schemes=["pipe"], attempts=1, timeout="4w")
        with pytest.raises(TransferError, match="Set SIGCHLD to SIG_DFL"):
            cache.fetch("pipe:head -c 1000 /dev/zero | tail -c +1; exit 7")
    finally:
        signal.signal(signal.SIGCHLD, before)
