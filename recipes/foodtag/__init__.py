"""FoodTag-mini: procedurally drawn food photographs, a data set that needs no download.

A picture is a function of its label and a seed alone. Within a class the shape, colours, dish, background,
light, pose and clutter vary; between classes the colours overlap, and several classes are each other's
look-alikes (donut and bagel, soup and ramen, pizza and fruit tart, dumplings and taco).

:mod:`~foodtag.pen` draws shapes, :mod:`~foodtag.dishes` the 20 foods,
:mod:`~foodtag.photograph` the whole picture, and :mod:`~foodtag.folder` writes the set. Nothing here
imports torch: the pictures are drawn while a run's other imports are under way.
"""

from .dishes import CLASSES, FOODS
from .folder import build, check
from .photograph import SIZE, VERSION, calories_of, draw, portion_of

__all__ = [
    "CLASSES",
    "FOODS",
    "SIZE",
    "VERSION",
    "build",
    "calories_of",
    "check",
    "draw",
    "portion_of",
]
