"""``Shards`` has moved to :mod:`kd.data.sources`; configurations of earlier runs name it here."""

from kd.data.sources.shards import Shards

__all__ = ["Shards"]
