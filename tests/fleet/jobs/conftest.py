"""AWS as moto plays it."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture()
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3 with one empty bucket, ``kd-test``."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    region = "eu-west-1"
    keys = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": region}
    for name, value in keys.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with moto.mock_aws():
        place = {"LocationConstraint": region}
        boto3.client("s3").create_bucket(Bucket="kd-test", CreateBucketConfiguration=place)
        yield boto3
