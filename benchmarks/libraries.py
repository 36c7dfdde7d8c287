"""Peers that are Python libraries: ``python -m benchmarks.libraries NAME PLAN RESULT``.

A fresh process for each run. An adapter imports its library and makes its client when it is
called, and returns a function that brings objects to a directory; the process then

1. imports and sets up, and fetches one small object, which opens what is opened lazily;
2. fetches the objects of the plan: only this is timed.

The rest is reported as start-up and first object. Adapters do what a user of the library
would who wants many objects fast: its defaults, and a pool of threads where it has none.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, MIB

__all__ = ["ADAPTERS", "Fetch", "Plan"]

#: What the process is told: destination, endpoint, key to URL, authority, warm-up key.
Plan = Mapping[str, Any]
#: Brings objects to the destination, returns where each is.
Fetch = Callable[[list[str]], dict[str, str]]
#: Objects at a time, for libraries that leave it to the caller.
_THREADS = 8
_PART = 16 * MIB


def _each(plan: Plan, one: Callable[[str, str], object], threads: int = _THREADS) -> Fetch:
    """Fetch every object by itself, some at a time."""

    def fetch(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(one, keys, files.values()):
                pass
        return files

    return fetch


def _files(plan: Plan, keys: list[str]) -> dict[str, str]:
    home = Path(plan["destination"])
    files = {key: home / key for key in keys}
    for folder in {path.parent for path in files.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    return {key: str(path) for key, path in files.items()}


def _shardcache(plan: Plan) -> Fetch:
    from shardcache import Cache

    cache = Cache(plan["destination"], min_free=0)

    def fetch(keys: list[str]) -> dict[str, str]:
        urls = {key: f"s3://{BUCKET}/{key}" for key in keys}
        report = cache.prewarm(list(urls.values()))
        if report.fetched + report.cached != len(urls):
            raise RuntimeError(f"prewarm: {[r for r in report.results if r.error][:3]}")
        return {key: str(cache.path(url)) for key, url in urls.items()}

    return fetch


def _shardcache_fetch(plan: Plan) -> Fetch:
    from shardcache import Cache

    cache = Cache(plan["destination"], min_free=0)
    return lambda keys: {key: str(cache.fetch(f"s3://{BUCKET}/{key}").data) for key in keys}


def _obstore(plan: Plan) -> Fetch:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=plan["endpoint"],
        region="us-east-1",
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    pool = ThreadPoolExecutor(_THREADS)

    def part(key: str, start: int, stop: int, fd: int) -> None:
        os.pwrite(fd, obstore.get_range(store, key, start=start, end=stop), start)

    def one(key: str, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            found = obstore.get(store, key, options={"range": (0, _PART)})
            size = found.meta["size"]
            rest = [
                pool.submit(part, key, start, min(size, start + _PART), fd)
                for start in range(_PART, size, _PART)
            ]
            os.pwrite(fd, found.bytes(), 0)
            for each in rest:
                each.result()
        finally:
            os.close(fd)

    return _each(plan, one)


def _boto3(plan: Plan) -> Fetch:
    import boto3
    from botocore.config import Config

    # A pool for all transfers at a time, each with the ten threads of its default.
    client = boto3.client("s3", config=Config(max_pool_connections=10 * _THREADS))
    return _each(plan, lambda key, path: client.download_file(BUCKET, key, path))


def _boto3_crt(plan: Plan) -> Fetch:
    # The transfer manager that boto3 takes with ``preferred_transfer_client="crt"``. Made
    # here, since boto3 gives no way to tell it that an endpoint has no TLS, and then hangs.
    import botocore.session
    from s3transfer import crt

    session = botocore.session.get_session()
    credentials = crt.BotocoreCRTCredentialsWrapper(session.get_credentials())
    client = crt.create_s3_crt_client(
        "us-east-1",
        crt_credentials_provider=credentials.to_crt_credentials_provider(),
        use_ssl=plan["endpoint"].startswith("https:"),
        verify=plan["authority"],
    )
    place = {"region_name": "us-east-1", "endpoint_url": plan["endpoint"]}
    manager = crt.CRTTransferManager(client, crt.BotocoreCRTRequestSerializer(session, place))

    def fetch(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        for each in [manager.download(BUCKET, key, path) for key, path in files.items()]:
            each.result()
        # The result may be there before the file has its name.
        while not all(map(os.path.exists, files.values())):
            time.sleep(0.0005)
        return files

    return fetch


def _awscrt(plan: Plan) -> Fetch:
    from awscrt import auth, http, io, s3

    group = io.EventLoopGroup()
    bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
    provider = auth.AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    secure = plan["endpoint"].startswith("https:")
    trust = None
    if secure:
        options = io.TlsContextOptions()
        options.override_default_trust_store_from_path(ca_filepath=plan["authority"])
        trust = io.ClientTlsContext(options).new_connection_options()
    client = s3.S3Client(
        bootstrap=bootstrap,
        region="us-east-1",
        signing_config=s3.create_default_s3_signing_config(
            region="us-east-1", credential_provider=provider
        ),
        tls_mode=s3.S3RequestTlsMode.ENABLED if secure else s3.S3RequestTlsMode.DISABLED,
        tls_connection_options=trust,
    )
    host = plan["endpoint"].partition("://")[2]

    def fetch(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        requests = [
            client.make_request(
                type=s3.S3RequestType.GET_OBJECT,
                request=http.HttpRequest(
                    "GET", f"/{BUCKET}/{key}", http.HttpHeaders([("host", host)])
                ),
                recv_filepath=path,
            )
            for key, path in files.items()
        ]
        for request in requests:
            request.finished_future.result()
        return files

    return fetch


def _s3fs(plan: Plan) -> Fetch:
    import s3fs

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])

    def fetch(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        filesystem.get([f"{BUCKET}/{key}" for key in keys], list(files.values()))
        return files

    return fetch


def _msc(**options: Any) -> Callable[[Plan], Fetch]:
    def adapter(plan: Plan) -> Fetch:
        from multistorageclient import StorageClient, StorageClientConfig

        place = {"base_path": BUCKET, "endpoint_url": plan["endpoint"], "region_name": "us-east-1"}
        keys = {
            "access_key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
        profile = {
            "storage_provider": {"type": "s3", "options": {**place, **options}},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        config = StorageClientConfig.from_dict({"profiles": {"bench": profile}}, profile="bench")
        return _each(plan, StorageClient(config).download_file)

    return adapter


ADAPTERS: dict[str, Callable[[Plan], Fetch]] = {
    "shardcache": _shardcache,
    "shardcache-fetch": _shardcache_fetch,
    "obstore": _obstore,
    "boto3": _boto3,
    "boto3-crt": _boto3_crt,
    "awscrt": _awscrt,
    "s3fs": _s3fs,
    "msc": _msc(),
    "msc-rust": _msc(rust_client={"allow_http": True}),
}


def _cpu() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Run one peer once."""
    name, plan_file, result = sys.argv[1:]
    plan = json.loads(Path(plan_file).read_text("utf-8"))
    begun = time.perf_counter()
    fetch = ADAPTERS[name](plan)
    ready = time.perf_counter()
    fetch([plan["warm"]])
    warm, before = time.perf_counter(), _cpu()
    files = fetch(plan["keys"])
    seconds, cpu = time.perf_counter() - warm, _cpu() - before
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "import_seconds": ready - begun,
        "first_object_seconds": warm - ready,
        "files": files,
    }
    Path(result).write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    # Threads of native libraries need not end in order for the figures to be right.
    os._exit(0)


if __name__ == "__main__":
    main()
