"""``SegmentationFolder`` has moved to :mod:`kd.data.sources`; configurations of earlier runs name it here."""

from kd.data.sources.segmentation import SegmentationFolder

__all__ = ["SegmentationFolder"]
