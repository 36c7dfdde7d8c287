"""``shardcache prewarm``: its list of shards, its options, and what it suggests."""

from __future__ import annotations

import json


def test_a_list_holds_what_the_command_line_takes(run, bucket, data, s3_environment, tmp_path):
    specs = {
        f"s3://{bucket}/train-{{0000..0001}}.tar": 2,
        f"s3://{bucket}/*-0002.tar": 1,
        f"s3://{bucket}/": 4,
        f"  s3://{bucket}/train-0003.tar": 1,
    }
    for spec, count in specs.items():
        (tmp_path / "list").write_text(f"# a remark\n\n{spec}\n")
        asked = ["-f", tmp_path / "list"], [spec.strip()]
        found = [json.loads(run("prewarm", "-n", "--json", *each)[1])["shards"] for each in asked]
        assert found[0] == found[1] and len(found[0]) == count
    assert not (tmp_path / "cache").exists()
    (tmp_path / "list").write_bytes(b"\xff\xfe\x00")
    code, _, err = run("prewarm", "-f", tmp_path / "list")
    assert (code, "not UTF-8" in err) == (2, True)


def test_max_size_is_what_the_cache_may_hold(run, spec, data):
    size = len(data["train-0000.tar"])
    assert run("prewarm", spec, "--max-size", f"{2 * size}B")[0] == 5
    assert run("prewarm", spec, "--max-size", f"{2 * size}B", "--best-effort")[0] == 0
    assert "2 cached, 2 to fetch" in run("prewarm", spec, "--check")[1]
    assert run("prewarm", spec, "--max-size", f"{4 * size}B")[0] == 0


def test_a_prefix_without_its_slash_is_suggested_with_it(run, s3, bucket, s3_environment):
    for name in "ab":
        s3.put(bucket, f"train/{name}.tar", b"")
    code, _, err = run("prewarm", f"s3://{bucket}/train", f"s3://{bucket}/absent")
    assert code == 3
    assert f"2 shards below s3://{bucket}/train/" in err and err.count("did you mean") == 1
    _, out, err = run("prewarm", f"s3://{bucket}/train", "-n")  # nobody has asked for it yet
    assert "(sizes unknown)" in out and not out.endswith("ok\n")
    assert f"2 shards below s3://{bucket}/train/" in err
