"""Settings that are read without botocore equal those that botocore reads."""

import itertools
import os
import random
from pathlib import Path

import botocore.session
import pytest

from shardcache.origins.aws import s3_region, written_keys

_KEYS = "aws_access_key_id = {0}\naws_secret_access_key = {0}secret\n"
_CONFIGS = (
    None,
    "[default]\nregion = eu-west-1\noutput = json\n",
    "[profile lab]\nregion = us-east-2\n[profile other]\nrole_arn = r\nsource_profile = lab\n",
    '[profile "lab"]\nregion = us-west-1\n[default]\nregion = eu-west-3\ns3 =\n  a = 1\n',
    "[profile lab]\ncredential_process = echo\n[services x]\n",
    "[default]\naws_session_token = from-config\nca_bundle = /x.pem\n",
    "[default\n",
)
_CREDENTIALS = (
    None,
    f"[default]\n{_KEYS.format('A')}",
    f"[default]\n{_KEYS.format('A')}aws_session_token = T\n[lab]\n{_KEYS.format('B')}",
    f"[lab]\n{_KEYS.format('B')}region = ap-south-1\n",
    "[default]\naws_access_key_id = A\n[lab]\naws_secret_access_key = S\n",
    f"[default]\n{_KEYS.format('A')}aws_account_id = 1\n",
)
_VARIABLES = {
    "AWS_ACCESS_KEY_ID": ("E", ""),
    "AWS_SECRET_ACCESS_KEY": ("Esecret", ""),
    "AWS_SESSION_TOKEN": ("Etoken",),
    "AWS_SECURITY_TOKEN": ("old",),
    "AWS_PROFILE": ("lab", "default", "other", "missing", ""),
    "AWS_DEFAULT_PROFILE": ("lab",),
    "AWS_REGION": ("ca-central-1",),
    "AWS_DEFAULT_REGION": ("sa-east-1", ""),
    "AWS_CA_BUNDLE": ("/bundle.pem",),
    "AWS_CREDENTIAL_EXPIRATION": ("2050-01-01T00:00:00Z",),
}
_PROFILES = (None, "lab", "default", "missing")


def test_settings_equal_those_of_botocore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, known = random.Random(0), 0
    files = list(itertools.product(_CONFIGS, _CREDENTIALS, _PROFILES))
    for config, credentials, profile in files * 4:
        with monkeypatch.context() as patch:
            for name, text in (("CONFIG", config), ("SHARED_CREDENTIALS", credentials)):
                path = tmp_path / name
                path.unlink(missing_ok=True)
                if text is not None:
                    path.write_text(text)
                patch.setenv(f"AWS_{name}_FILE", str(path))
            for name, values in _VARIABLES.items():
                if chance.random() < 0.15:
                    patch.setenv(name, chance.choice(values))
            if (found := written_keys({"profile": profile})) is None:
                continue
            known += 1
            session = botocore.session.Session(profile=profile)
            keys = session.get_credentials().get_frozen_credentials()
            assert tuple(found) == (keys.access_key, keys.secret_key, keys.token or "")
            region = session.get_config_variable("region") or "us-east-1"
            assert s3_region({"profile": profile}, "https://store") == region
            bundle = session.get_config_variable("ca_bundle")
            assert bundle == os.environ.get("AWS_CA_BUNDLE")
            for name in ("use_fips_endpoint", "use_dualstack_endpoint"):
                assert not session.get_config_variable(name)
            assert "s3" not in session.get_scoped_config()
    assert known > 50
