"""Starts a small model from the layers of a big one of its family, in closed form, before any training.

Families (:mod:`~kd.distill.inherit.families`): plain vision transformers (timm's ``VisionTransformer`` and ``Eva``:
EVA-02, DINOv3, Perception Encoder; below), ConvNeXts (:mod:`~kd.distill.inherit.convnext`) and ResNets
(:mod:`~kd.distill.inherit.resnet`), which keep some of their teacher's channels.

Of vision transformers three published ideas meet here: a student may take a part of its teacher's weights (weight
selection, Xu et al., arXiv 2311.18823); a transformer's residual stream can be rotated and cut to its leading
directions, because a LayerNorm only sees the direction of the centred stream (SliceGPT, Ashkboos et al., arXiv
2401.15024); and what was cut is made good, layer by layer, by least squares against the teacher's own activations (as
in FitNets' hints, arXiv 1412.6550, but solved instead of trained).

The algorithm, from top to bottom (:func:`inherit_together`); it takes a few hundred pictures without labels:

1. Refuse pairs that have a part for which there is no formula (:mod:`~kd.distill.inherit.pair`).
   A student of its teacher's own architecture, size and input takes its weights as they are, and nothing is fitted.
2. Run the teacher on the pictures, cut into the student's patches (:mod:`~kd.distill.inherit.measured`).
3. Make ``M``, (student's width, teacher's width), which maps the teacher's stream onto the student's
   (:mod:`~kd.distill.inherit.stream`): first the directions that the teacher's classifier reads, then the stream's
   leading ones; never the student's all-ones direction, which its LayerNorms would subtract.
4. Map patches, class token and positions by M, and run the student up to its first block
   (:mod:`~kd.distill.inherit.layers`, as all that follows).
5. For each block of the student, from first to last, take the teacher's block that it follows (evenly spaced), keep the
   heads and hidden units that write most into the stream (heads of another size: :mod:`~kd.distill.inherit.heads`), and
   fit its layers in the order in which they run. Each is the ridge regression (:mod:`~kd.distill.inherit.ridge`) that
   makes of *the student's own* activations what the teacher's layer gives, so that it also mends what the layers
   before it have lost; it is drawn towards the teacher's weights, cut by M. The student then runs up to the next block.
6. Fit an attention pooling like a block (:mod:`~kd.distill.inherit.pooling`), then the classifier to the teacher's
   logits.
7. Multiply the stream, by all that writes into it, so that it enters the first block with a root mean square of 1 or
   more. No answer changes, as norms see no length; but Adam and its kin move every weight by about the learning rate,
   however small it is. The stream of a teacher with layer scales (DINOv2) has 0.1 there: its layers would be moved by ten
   times the share of what they are, and a start be lost in a few steps (``scripts/bench/log/start.md``).
"""

from kd.distill.inherit.families import check_pair, inherit_together
from kd.distill.inherit.pair import matching_patches
from kd.distill.inherit.relative import relative_of

__all__ = ["check_pair", "inherit_together", "matching_patches", "relative_of"]
