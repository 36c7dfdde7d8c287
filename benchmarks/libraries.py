"""The Python libraries among the peers: ``python -m benchmarks.libraries NAME PLAN RESULT``.

Each run is a fresh process. An adapter imports its library, makes a client, and returns a function
that downloads objects. The process then

1. downloads one small object, so that the library makes its connections, and
2. downloads the objects of the plan. Only this step counts as the transfer.

The import and the first object are reported separately. An adapter does what a user of the library
would do who wants many objects fast: it keeps the defaults, and adds a pool of threads if the
library has none. Every library finds the credentials through the ordinary chain of its SDK.
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

#: ``destination``, ``endpoint`` and ``authority`` of the run, the ``keys`` of its objects, and the
#: key of a small object (``warm``).
Plan = Mapping[str, Any]
#: Downloads objects, and returns the file of each key.
Download = Callable[[list[str]], dict[str, str]]
#: Objects downloaded at the same time, by libraries that leave this to their caller.
_THREADS = 8
_PART = 16 * MIB


def _each(plan: Plan, one: Callable[[str, str], object]) -> Download:
    """Return a function that calls ``one(key, path)`` for each object in a pool of threads."""

    def download(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(one, keys, files.values()):
                pass
        return files

    return download


def _files(plan: Plan, keys: list[str]) -> dict[str, str]:
    """Return the file of each key, and make their directories."""
    home = Path(plan["destination"])
    files = {key: home / key for key in keys}
    for folder in {path.parent for path in files.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    return {key: str(path) for key, path in files.items()}


def _shardcache(plan: Plan) -> Download:
    from shardcache import Cache

    cache = Cache(plan["destination"])

    def download(keys: list[str]) -> dict[str, str]:
        urls = {key: f"s3://{BUCKET}/{key}" for key in keys}
        report = cache.prewarm(list(urls.values()))
        if report.fetched + report.cached != len(urls):
            raise RuntimeError(f"prewarm: {[r for r in report.results if r.error][:3]}")
        return {key: str(cache.path(url)) for key, url in urls.items()}

    return download


def _shardcache_fetch(plan: Plan) -> Download:
    from shardcache import Cache

    cache = Cache(plan["destination"])
    return lambda keys: {key: str(cache.fetch(f"s3://{BUCKET}/{key}").data) for key in keys}


def _obstore(plan: Plan) -> Download:
    import obstore
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=plan["endpoint"],
        region="us-east-1",
        credential_provider=Boto3CredentialProvider(),
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    pool = ThreadPoolExecutor(_THREADS)

    def part(key: str, start: int, stop: int, fd: int) -> None:
        os.pwrite(fd, obstore.get_range(store, key, start=start, end=stop), start)

    def one(key: str, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            first = obstore.get(store, key, options={"range": (0, _PART)})
            size = first.meta["size"]
            rest = [
                pool.submit(part, key, start, min(size, start + _PART), fd)
                for start in range(_PART, size, _PART)
            ]
            os.pwrite(fd, first.bytes(), 0)
            for each in rest:
                each.result()
        finally:
            os.close(fd)

    return _each(plan, one)


def _boto3_crt(plan: Plan) -> Download:
    # This is the transfer manager that boto3 uses with ``preferred_transfer_client="crt"``. boto3
    # cannot tell it that an endpoint has no TLS, and then hangs.
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

    def download(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        for each in [manager.download(BUCKET, key, path) for key, path in files.items()]:
            each.result()
        # A result may be ready before its file has been renamed.
        while not all(map(os.path.exists, files.values())):
            time.sleep(0.0005)
        return files

    return download


def _s3fs(plan: Plan) -> Download:
    import s3fs

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])

    def download(keys: list[str]) -> dict[str, str]:
        files = _files(plan, keys)
        filesystem.get([f"{BUCKET}/{key}" for key in keys], list(files.values()))
        return files

    return download


def _msc(plan: Plan) -> Download:
    from multistorageclient import StorageClient, StorageClientConfig

    place = {"base_path": BUCKET, "endpoint_url": plan["endpoint"], "region_name": "us-east-1"}
    profile = {"storage_provider": {"type": "s3", "options": place}}
    config = StorageClientConfig.from_dict({"profiles": {"bench": profile}}, profile="bench")
    return _each(plan, StorageClient(config).download_file)


ADAPTERS: dict[str, Callable[[Plan], Download]] = {
    "shardcache": _shardcache,
    "shardcache-fetch": _shardcache_fetch,
    "obstore": _obstore,
    "boto3-crt": _boto3_crt,
    "s3fs": _s3fs,
    "msc": _msc,
}


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Run one library once."""
    name, plan_file, result = sys.argv[1:]
    plan = json.loads(Path(plan_file).read_text("utf-8"))
    download = ADAPTERS[name](plan)
    ready = time.perf_counter()
    download([plan["warm"]])
    warm, cpu = time.perf_counter(), _cpu_seconds()
    files = download(plan["keys"])
    figures = {
        "seconds": time.perf_counter() - warm,
        "cpu_seconds": _cpu_seconds() - cpu,
        "first_object_seconds": warm - ready,
        "files": files,
    }
    Path(result).write_text(json.dumps(figures), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # some native libraries hang or crash while they end their threads


if __name__ == "__main__":
    main()
