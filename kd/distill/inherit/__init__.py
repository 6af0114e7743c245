"""Starts a small vision transformer from the layers of a big one, in closed form, before any training.

Three published ideas meet here: a student may take a part of its teacher's weights (weight selection, Xu et al.,
arXiv 2311.18823); a transformer's residual stream can be rotated and cut to its leading directions, because a
LayerNorm only sees the direction of the centred stream (SliceGPT, Ashkboos et al., arXiv 2401.15024); and what was
cut is made good, layer by layer, by least squares against the teacher's own activations (as in FitNets' hints,
arXiv 1412.6550, but solved instead of trained).

How: ``M``, (student width, teacher width), maps the teacher's centred stream onto the student's. Its rows span the
directions that the teacher's classifier reads, then the stream's leading ones on sample pictures, and leave out the
student's all-ones direction, which its LayerNorms would subtract. Then, from the first block to the last, each linear
layer of the student is fitted so that what it computes *from the student's own activations* comes closest to the
teacher's. Heads and hidden units that the student has no room for are chosen by what they contribute.
"""

from kd.distill.inherit.pair import check_pair, matching_patches
from kd.distill.inherit.start import inherit_together

__all__ = ["check_pair", "inherit_together", "matching_patches"]
