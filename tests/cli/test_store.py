"""Options and variables for the store, on commands, and the advice of errors to set them."""

import re
import shlex

import pytest

from tests.support.tars import make_tar
from tests.support.webservers import Files, running

SHARD, URL = make_tar(3), "s3://lab/a.tar"


@pytest.fixture
def store():
    """The URL of a store with one shard, and the heads of the requests to it."""
    server = Files()
    server.files = {"/lab/a.tar": SHARD}
    with running(server):
        yield server


def advised(text, monkeypatch):
    """Set the variable that an error advises to set."""
    (assignment,) = re.findall(r"SHARDCACHE_\w+=(?:'[^']*'|\w+)", text)
    name, _, value = shlex.split(assignment)[0].partition("=")
    monkeypatch.setenv(name, value)


@pytest.mark.parametrize("form", ["option", "variable"])
def test_a_public_bucket_is_read_as_the_error_advises(run, store, form, monkeypatch):
    command = "path", "--fetch", "--endpoint-url", store.url, URL
    code, _, err = run(*command)
    assert code == 1 and "--no-sign-request" in err
    if form == "option":
        command += ("--no-sign-request",)
    else:
        advised(err, monkeypatch)
    assert run(*command)[0] == 0


def test_a_command_is_run_as_the_error_advises(run, tmp_path, monkeypatch):
    (tmp_path / "a.tar").write_bytes(SHARD)
    command = "path", "--fetch", f"pipe:cat {tmp_path}/a.tar | tail -c +1"
    code, _, err = run(*command)
    assert code == 2
    advised(err, monkeypatch)
    assert run(*command)[0] == 0
    code, _, err = run("path", "--fetch", "ss3://lab/a.tar")
    assert code == 2 and "Did you mean s3://?" in err


def test_profile_and_region_sign_the_requests(run, store, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        "[lab]\naws_access_key_id = AK\naws_secret_access_key = SK\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    options = "--endpoint-url", store.url, "--profile", "lab", "--region", "eu-north-1"
    for command in ("prewarm", "doctor --url"):
        assert run(*command.split(), URL, *options)[0] == 0
        run("clean", "-y", "--all")
    asked = [head for head in store.heads if " /lab" in head]  # others see whether it answers
    assert asked and all(re.search(r"AK/\d{8}/eu-north-1/s3/", head) for head in asked)
