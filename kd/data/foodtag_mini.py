"""FoodTag-mini: procedurally drawn food photographs, a data set that needs no download.

A picture is a function of its label and a seed alone. Within a class the shape, colours, dish, background,
light, pose and clutter vary; between classes the colours overlap, and several classes are each other's
look-alikes (donut and bagel, soup and ramen, pizza and fruit tart, dumplings and taco).
"""

import hashlib
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from filelock import FileLock
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

VERSION = "v1"  # Part of the data folder's name; to be raised whenever a change alters the pictures

SIZE = 80  # Side of a picture in pixels: room for random crops, small enough to draw thousands in seconds

_CANVAS = 2 * SIZE
_SPREAD = 0.2  # how far pose, light, focus and clutter vary, 0 .. 1; low, so that a small ViT learns in two minutes
_SUMS = "SHA256SUMS"
_TURNS = {
    steps: [(t, math.cos(t), math.sin(t)) for t in (2 * math.pi * i / steps for i in range(steps))]
    for steps in (12, 36)
}
_ROWS, _COLUMNS = np.mgrid[:_CANVAS, :_CANVAS].astype(np.float32)
_HEIGHTS, _WIDTHS = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j].astype(np.float32)
_VAL_SEED = 1_000_000

Colour = tuple[int, ...]
Point = tuple[float, float]

# Lowest and highest hue (degrees), saturation and value (per cent) of the colours that the foods share.
_COLOURS = {
    "any": (0, 360, 35, 90, 55, 100),
    "baked": (20, 42, 40, 80, 50, 95),
    "broth": (24, 40, 50, 90, 60, 95),
    "cheese": (38, 54, 35, 85, 80, 100),
    "chocolate": (14, 28, 40, 75, 25, 50),
    "cream": (25, 60, 2, 22, 82, 100),
    "green": (75, 135, 45, 90, 35, 80),
    "metal": (30, 220, 0, 12, 55, 90),
    "pink": (325, 350, 25, 70, 80, 100),
    "plum": (265, 300, 35, 70, 30, 60),
    "red": (-10, 20, 55, 92, 55, 95),
    "seaweed": (90, 180, 10, 50, 12, 28),
    "skin": (12, 28, 25, 60, 35, 95),
    "yolk": (30, 52, 60, 95, 80, 100),
}
_SAUCES = ("broth", "cheese", "chocolate", "green", "red")


def shade(colour: Colour, light: float) -> Colour:
    """The colour, lighter (``light`` > 1) or darker (< 1); channels stay at most 255."""
    return tuple(min(255, int(channel * light)) for channel in colour)


def arc(
    radius: float, start: float, stop: float, squash: float = 1.0, steps: int = 30
) -> list[Point]:
    """Points along an elliptic arc around the origin."""
    turns = [start + (stop - start) * i / steps for i in range(steps + 1)]
    return [(radius * math.cos(t), radius * squash * math.sin(t)) for t in turns]


def box(x0: float, y0: float, x1: float, y1: float) -> list[Point]:
    """The corners of a rectangle, in order around it."""
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


class Pen:
    """Draws in a frame of its own, in which the dish is the unit disc, on a picture it shares with other pens.

    Args:
        image: the canvas.
        rng: the only source of chance.
        matrix: (a, b, c, d, e, f): the point (x, y) of the frame is the pixel (ax + by + c, dx + ey + f).
    """

    def __init__(self, image: Image.Image, rng: random.Random, matrix: Sequence[float]) -> None:
        self.image, self.rng, self.matrix = image, rng, matrix
        self.canvas = ImageDraw.Draw(image, "RGBA")
        self.scale = math.sqrt(abs(matrix[0] * matrix[4] - matrix[1] * matrix[3]))

    def at(
        self, x: float, y: float, scale: float = 1.0, turn: float = 0.0, squash: float = 1.0
    ) -> "Pen":
        """A pen whose frame lies at (x, y) of this one, scaled, turned and flattened."""
        a, b, c, d, e, f = self.matrix
        p, q = scale * math.cos(turn), -scale * squash * math.sin(turn)
        r, s = scale * math.sin(turn), scale * squash * math.cos(turn)
        top = (a * p + b * r, a * q + b * s, a * x + b * y + c)
        return Pen(self.image, self.rng, (*top, d * p + e * r, d * q + e * s, d * x + e * y + f))

    def pick(self, *names: str) -> Colour:
        """A random colour of one of the named kinds, RGB in 0..255."""
        h0, h1, s0, s1, v0, v1 = _COLOURS[self.rng.choice(names)]
        hue, saturation = self.rng.uniform(h0, h1) / 60, self.rng.uniform(s0, s1) / 100
        value, parts = 2.55 * self.rng.uniform(v0, v1), [(n + hue) % 6 for n in (5, 3, 1)]
        return tuple(int(value * (1 - saturation * max(0, min(k, 4 - k, 1)))) for k in parts)

    def pixels(self, points: Sequence[Point]) -> list[Point]:
        """Points of the frame as pixels of the canvas."""
        a, b, c, d, e, f = self.matrix
        return [(a * x + b * y + c, d * x + e * y + f) for x, y in points]

    def shape(self, points: Sequence[Point], fill: Colour) -> None:
        """A filled polygon."""
        self.canvas.polygon(self.pixels(points), fill=fill)

    def line(self, points: Sequence[Point], width: float, fill: Colour) -> None:
        """A line; its width is in units of the frame."""
        self.canvas.line(self.pixels(points), fill, max(1, round(width * self.scale)), "curve")

    def blob(
        self,
        x: float,
        y: float,
        rx: float,
        fill: Colour,
        ry: float = 0,
        turn: float = 0,
        wobble: float = 0.04,
    ) -> None:
        """An ellipse with an irregular outline; a circle without ``ry``."""
        (p, a), (q, b), (o, c) = [
            (self.rng.uniform(0, 7), self.rng.uniform(0, wobble)) for _ in range(3)
        ]
        cos, sin, points, ry, wave = math.cos(turn), math.sin(turn), [], ry or rx, math.sin
        for t, x_of, y_of in _TURNS[12 if rx * self.scale < 8 else 36]:
            r = (
                1 + (a * wave(2 * t + p) + b * wave(3 * t + q) + c * wave(5 * t + o))
                if wobble
                else 1.0
            )
            u, v = rx * r * x_of, ry * r * y_of
            points.append((x + u * cos - v * sin, y + u * sin + v * cos))
        self.shape(points, fill)

    def ball(
        self, x: float, y: float, rx: float, fill: Colour, ry: float = 0, turn: float = 0
    ) -> None:
        """A rounded body: dark at the rim, light towards one side."""
        ry = ry or rx
        for k, light in ((1.0, 0.74), (0.88, 0.92), (0.66, 1.04), (0.36, 1.14)):
            off = (1 - k) * 0.16
            self.blob(
                x - off * rx, y - 2 * off * ry, rx * k, shade(fill, light), ry * k, turn, 0.03
            )

    def spots(self, count: int, reach: float, inner: float = 0.0) -> list[Point]:
        """``count`` random places between the radii ``inner`` and ``reach``, evenly over the area."""
        polar = [
            (self.rng.uniform(inner**2, reach**2) ** 0.5, self.rng.uniform(0, 7))
            for _ in range(count)
        ]
        return [(r * math.cos(t), r * math.sin(t)) for r, t in polar]

    def bits(
        self,
        count: int,
        reach: float,
        size: float,
        *fills: Colour,
        inner: float = 0.0,
        slim: float = 0.6,
    ) -> None:
        """Crumbs, herbs, seeds, grains of rice: small blobs of any of the colours, between two radii."""
        for x, y in self.spots(count, reach, inner):
            r, fill = size * self.rng.uniform(0.6, 1.3), self.rng.choice(fills)
            light, turn = self.rng.uniform(0.8, 1.12), self.rng.uniform(0, 3)
            self.blob(x, y, r, shade(fill, light), r * slim, turn, 0.1)

    def bowl(self, fill: Colour) -> None:
        """A bowl filled to its rim."""
        rim = self.pick("cream", "cream", "chocolate", "metal")
        for y, r, colour in (
            (0.08, 1.08, shade(rim, 0.6)),
            (0, 1.06, rim),
            (0.02, 0.96, shade(rim, 0.7)),
        ):
            self.blob(0, y, r, colour, wobble=0)
        self.blob(0, 0.04, 0.92, fill, wobble=0.01)
        self.blob(-0.05, 0, 0.75, shade(fill, 1.07), wobble=0.06)


class Food(NamedTuple):
    """A class of the set: its name, its drawing, and the kcal of a usual portion."""

    name: str
    draw: Callable[[Pen], None]
    kcal: int


FOODS: list[Food] = []


def food(kcal: int, most: int = 1, spin: float = 3.2) -> Callable[[Callable[[Pen], None]], None]:
    """Registers a drawing; one that is drawn up to ``most`` times, each turned by up to ``spin``, fills the dish."""

    def register(draw_one: Callable[[Pen], None]) -> None:
        def draw_all(pen: Pen) -> None:
            count, start, style = (
                pen.rng.randint(1, most),
                pen.rng.uniform(0, 7),
                pen.rng.getrandbits(32),
            )
            size = (0.95, 0.62, 0.52, 0.47, 0.44, 0.42)[count - 1]
            for i in range(count):
                t = start + 2 * math.pi * i / count + pen.rng.uniform(-0.25, 0.25)
                away = 0.0 if count == 1 else 0.98 - size
                turn, scale = pen.rng.uniform(-spin, spin), size * pen.rng.uniform(0.85, 1.1)
                here = pen.at(away * math.cos(t), away * math.sin(t), scale, turn)
                here.blob(0.08, 0.1, 0.95, (20, 16, 14, 70), 0.9 if spin > 1 else 0.5)
                here.rng = random.Random(style)
                draw_one(here)

        FOODS.append(Food(draw_one.__name__, draw_all if most > 1 else draw_one, kcal))

    return register


@food(280, 2)
def bagel(pen: Pen) -> None:
    """A shiny ring of dough, plain or with seeds; on some a filling shows at the rim."""
    base, hole = pen.pick("baked"), pen.rng.uniform(0.2, 0.32)
    if pen.rng.random() < 0.4:
        pen.blob(0.02, 0.08, 0.98, pen.pick("cream", "green", "any"), wobble=0.06)
    for r, light in ((0.95, 0.68), (0.9, 0.85), (0.82, 1.0), (0.68, 1.12), (0.54, 1.0)):
        pen.blob(-0.02, -0.03, r, shade(base, light), wobble=0.03)
    pen.line(arc(0.66, 3.5, 4.4), 0.12, shade(base, 1.35))
    if pen.rng.random() < 0.6:
        pen.bits(34, 0.8, 0.06, pen.pick("cream", "seaweed"), inner=hole + 0.12)
    pen.blob(0, 0, hole + 0.08, shade(base, 0.7))
    pen.blob(0.02, 0.03, hole, pen.pick("chocolate", "metal"))


@food(560)
def bibimbap(pen: Pen) -> None:
    """Rice under sectors of vegetables, an egg or sauce in the middle."""
    rng, rice, count, start = (
        pen.rng,
        pen.pick("cream"),
        pen.rng.randint(4, 7),
        pen.rng.uniform(0, 6),
    )
    pen.bowl(rice)
    pen.bits(40, 0.85, 0.05, rice)
    for i in range(count):
        t0, t1 = start + 6.283 * i / count, start + 6.283 * (i + rng.uniform(0.75, 1)) / count
        fill = pen.pick("green", "green", "red", "chocolate", "cream", "cheese")
        pen.shape([(0.0, 0.0), *arc(0.8, t0, t1)], shade(fill, 0.85))
        for r, t in [(rng.uniform(0.35, 0.7), rng.uniform(t0, t1)) for _ in range(9)]:
            strip = pen.at(r * math.cos(t), r * math.sin(t), 0.14, t + rng.uniform(-0.5, 0.5))
            strip.line([(0, 0), (1, 0)], 0.4, shade(fill, rng.uniform(0.8, 1.2)))
    if rng.random() < 0.75:
        pen.blob(0, 0, rng.uniform(0.3, 0.4), pen.pick("cream"), wobble=0.1)
    pen.ball(0, 0, 0.2, pen.pick("yolk", "yolk", "red"))
    pen.bits(rng.randint(0, 16), 0.5, 0.035, (245, 235, 205))


@food(540)
def burger(pen: Pen) -> None:
    """Seen from the side: bun, fillings in any order, bun."""
    rng, bun, y = pen.rng, pen.pick("baked"), 0.62
    tall, high, seeds = rng.uniform(0.14, 0.2), rng.uniform(0.5, 0.85), rng.random() < 0.6
    pen.shape(box(-0.8, 0.4, 0.8, 0.7) + arc(0.72, 0, math.pi, 0.4), shade(bun, 0.8))
    pen.shape(box(-0.8, 0.4, 0.8, 0.72), shade(bun, 0.9))
    for kind in rng.sample(("meat", "leaf", "cheese", "slice"), rng.randint(2, 4)):
        y -= tall
        if kind == "leaf":
            edge = [(-0.9 + 0.12 * i, y + tall * (0.9 if i % 2 else 1.5)) for i in range(16)]
            pen.shape([(0.85, y), (-0.85, y), *edge], pen.pick("green"))
        elif kind == "cheese":
            corners = [(0.5, y + tall * 2), (0.1, y + tall), (-0.6, y + tall * 1.7)]
            pen.shape([(-0.86, y + 0.02), (0.86, y + 0.02), *corners], pen.pick("cheese"))
        else:
            fill = (
                pen.pick("chocolate") if kind == "meat" else pen.pick("red", "cream", "chocolate")
            )
            pen.blob(0, y + tall / 2, 0.84, fill, tall * 0.75)
            pen.blob(0, y + tall / 3, 0.8, shade(fill, 1.2), tall * 0.4)
    dome = pen.at(0, y + 0.06)
    for k, light in ((1.0, 0.82), (0.9, 1.0), (0.6, 1.12)):
        dome.shape(arc(0.84 * k, math.pi, 2 * math.pi, high), shade(bun, light))
    for x, v in dome.spots(14 if seeds else 0, 0.6):
        dome.blob(x, -abs(v) * high - 0.06, 0.045, (248, 236, 205), 0.028)


@food(410)
def cake_slice(pen: Pen) -> None:
    """A wedge from the side: layers of sponge and cream, icing, something on top."""
    rng, layers = pen.rng, 2 * pen.rng.randint(1, 3) + 1
    tall, back = rng.uniform(0.6, 0.95), rng.uniform(0.35, 0.6)
    sponge, cream = pen.pick("baked", "chocolate", "red"), pen.pick("cream")
    icing = pen.pick("cream", "chocolate", "pink")
    side = rng.choice((-1, 1))
    tip, near, far = (-0.9 * side, -0.05), (0.6 * side, 0.1), (0.85 * side, -back)
    for i in range(layers):
        for (x0, y0), (x1, y1), fill in (
            (tip, near, cream if i % 2 else sponge),
            (near, far, shade(icing, 0.8)),
        ):
            low, high = tall * i / layers, tall * (i + 1) / layers
            pen.shape([(x0, y0 + low), (x1, y1 + low), (x1, y1 + high), (x0, y0 + high)], fill)
    pen.shape([tip, near, far], icing)
    pen.shape([tip, near, (near[0], near[1] + 0.08), (tip[0], tip[1] + 0.08)], shade(icing, 0.9))
    for _ in range(rng.randint(0, 3)):
        x, y, r = side * rng.uniform(-0.1, 0.6), rng.uniform(-0.37, -0.22), rng.uniform(0.1, 0.2)
        pen.ball(x, y, r, pen.pick("red", "plum"))
    pen.at(0.2 * side, -0.15, 1, 0, 0.5).bits(
        rng.randint(0, 12), 0.4, 0.04, pen.pick("any"), pen.pick("chocolate")
    )


@food(220, 3)
def cookie(pen: Pen) -> None:
    """A flat disc with chips and cracks."""
    base = pen.pick("baked")
    for x, r, light in ((0.0, 1.0, 0.72), (-0.03, 0.93, 1.0), (-0.06, 0.6, 1.1)):
        pen.blob(x, 1.3 * x, r, shade(base, light), wobble=0.06)
    for x, y in pen.spots(pen.rng.randint(2, 5), 0.6):
        pen.at(x, y, 0.4, pen.rng.uniform(0, 6)).line([(0, 0), (1, 0)], 0.1, shade(base, 0.7))
    pen.bits(pen.rng.randint(8, 14), 0.8, 0.16, pen.pick("chocolate", "chocolate", "cream", "red"))


@food(270, 2, spin=0.5)
def croissant(pen: Pen) -> None:
    """A bent roll in segments, thick in the middle."""
    base, bend, parts = pen.pick("baked"), pen.rng.uniform(0.3, 1.25), pen.rng.randint(5, 8)
    for u in sorted((2 * i / (parts - 1) - 1 for i in range(parts)), key=lambda u: -abs(u)):
        x, y, size = (
            0.76 * math.sin(u * 1.25),
            bend * (u * u - 0.4) * 0.62,
            0.44 - 0.24 * abs(u) ** 1.5,
        )
        fill = shade(base, pen.rng.uniform(0.92, 1.08))
        pen.ball(x, y, size * 0.62, fill, size, u * bend * 0.7)
        pen.line(
            [(x - 0.04, y - size * 0.7), (x + 0.02, y), (x - 0.04, y + size * 0.7)],
            0.03,
            shade(base, 0.72),
        )


@food(620)
def curry_rice(pen: Pen) -> None:
    """Half rice, half curry with chunks."""
    rng, rice, curry = pen.rng, pen.pick("cream"), pen.pick("broth", "chocolate")
    pen.bowl(curry)
    half, edge = pen.at(0, 0, 1, rng.uniform(0, 6)), rng.uniform(-0.1, 0.25)
    heap = half.at(-0.3 - edge / 2, 0, 0.56 - edge / 2)
    heap.blob(0, 0, 1.0, shade(rice, 0.8), 1.5, 0, 0.08)
    heap.blob(0, 0, 0.92, rice, 1.4, 0, 0.08)
    heap.bits(45, 0.9, 0.08, rice)
    chunks = [pen.pick("red"), pen.pick("cheese"), shade(curry, 0.55), pen.pick("green")]
    for _ in range(rng.randint(5, 10)):
        x, y, size = (
            rng.uniform(edge + 0.05, 0.62),
            rng.uniform(-0.55, 0.55),
            rng.uniform(0.08, 0.15),
        )
        half.ball(x, y, size, rng.choice(chunks), size * 0.8, rng.uniform(0, 3))
    pen.bits(rng.randint(0, 8), 0.6, 0.05, pen.pick("green"))


@food(300, 2)
def donut(pen: Pen) -> None:
    """A ring under wavy icing, with sprinkles or stripes."""
    base, icing = pen.pick("baked"), pen.pick("pink", "pink", "chocolate", "cream", "any")
    sweets = [pen.pick("any") for _ in range(3)]
    hole, style = pen.rng.uniform(0.22, 0.34), pen.rng.choice(("sprinkles", "stripes", "plain"))
    for r, fill in (
        (1.0, shade(base, 0.72)),
        (0.94, base),
        (0.82, shade(icing, 0.88)),
        (0.76, icing),
    ):
        pen.blob(0.03 * r - 0.03, 0.04 * r - 0.04, r, fill, wobble=0.05 if r < 0.9 else 0.02)
    pen.line(arc(0.6, 3.4, 4.6), 0.1, shade(icing, 1.25))
    if style == "sprinkles":
        pen.bits(26, 0.74, 0.075, *sweets, inner=hole + 0.1, slim=0.4)
    elif style == "stripes":
        pen.line([(0.7 * math.cos(k * 2.5), -0.66 + 0.13 * k) for k in range(11)], 0.06, sweets[0])
    pen.blob(0, 0, hole + 0.06, shade(base, 0.85))
    pen.blob(0.02, 0.02, hole, pen.pick("chocolate", "metal"))


@food(330, 3, spin=0.5)
def dumplings(pen: Pen) -> None:
    """A half moon of pale or fried dough with pleats."""
    dough, pleats, pen = pen.pick("cream", "cream", "baked"), pen.rng.randint(5, 9), pen.at(0, 0.3)
    for r, light in ((1.0, 0.75), (0.94, 1.0)):
        body = arc(r, math.pi, 2 * math.pi, 0.9) + arc(r, 0, math.pi, 0.2)
        pen.shape(body, shade(dough, light))
    pen.blob(0, -0.26, 0.62, shade(dough, 1.1), 0.3)
    for t in (math.pi * (1 + (i + 0.5) / pleats) for i in range(pleats)):
        pleat = [
            (r * math.cos(t + s), r * math.sin(t + s) * 0.88)
            for r, s in ((1.0, 0), (0.82, 0.06), (0.66, 0.02))
        ]
        pen.line(pleat, 0.06, shade(dough, 0.7))
    if pen.rng.random() < 0.5:
        pen.blob(0, 0.02, 0.72, pen.pick("baked"), 0.13)


@food(190, 2, spin=0.5)
def fried_egg(pen: Pen) -> None:
    """A ragged white with one or two shiny yolks."""
    rng, white, yolk = pen.rng, pen.pick("cream"), pen.pick("yolk")
    pen.blob(
        0, 0, 0.96, pen.pick("baked") if rng.random() < 0.5 else shade(white, 0.8), wobble=0.13
    )
    pen.blob(0, 0, 0.86, white, wobble=0.13)
    for x, y in pen.spots(rng.choice((1, 1, 1, 2)), 0.35):
        pen.ball(x, y, rng.uniform(0.3, 0.4), yolk)
        pen.blob(x - 0.1, y - 0.12, 0.07, (255, 252, 235))
    pen.bits(rng.randint(0, 16), 0.7, 0.04, (40, 36, 34), pen.pick("green"))


@food(360)
def fruit_tart(pen: Pen) -> None:
    """A crimped shell, custard, and fruit laid in rings."""
    rng, base, n = pen.rng, pen.pick("baked"), pen.rng.randint(16, 30)
    rim = [(0.93 + 0.07 * (i % 2), math.pi * i / n) for i in range(2 * n)]
    pen.shape([(r * math.cos(t), r * math.sin(t)) for r, t in rim], shade(base, 0.75))
    pen.blob(0, 0, 0.9, base)
    pen.blob(0, 0, 0.8, pen.pick("cream", "cheese"))
    fruits = [pen.pick("red", "red", "plum", "green", "broth") for _ in range(2)]
    size, slim = rng.uniform(0.13, 0.2), rng.uniform(0.55, 1.0)
    for ring, reach in enumerate((0.66, 0.36, 0.0)):
        count = max(1, int(math.pi * reach / (size * slim * rng.uniform(1, 1.3))))
        for t in (2 * math.pi * i / count + ring for i in range(count)):
            pen.ball(
                reach * math.cos(t), reach * math.sin(t), size, fruits[ring % 2], size * slim, t
            )


@food(250)
def ice_cream(pen: Pen) -> None:
    """One to three scoops in a cone or a cup."""
    rng, base = pen.rng, pen.pick("baked", "baked", "baked", "pink")
    count, wide = rng.randint(1, 3), rng.uniform(0.34, 0.46)
    tip = rng.choice((0.0, 0.0, 0.7)) * wide
    pen.shape([(-wide, 0), (wide, 0), (tip, 1 - tip / 2), (-tip, 1 - tip / 2)], base)
    for k in () if tip else (-0.6, -0.2, 0.2, 0.6):
        for lean in (-0.25, 0.25):
            stop = k * wide * 0.4 + lean * (1 - abs(k)) * wide
            pen.line([(k * wide, 0), (stop, 0.55)], 0.03, shade(base, 0.7))
    pen.shape(box(-wide * 1.08, -0.02, wide * 1.08, 0.12), shade(base, 0.8))
    places = (
        ((0.0, -0.2),),
        ((0.0, -0.16), (0.03, -0.68)),
        ((-0.28, -0.16), (0.28, -0.16), (0.0, -0.62)),
    )
    for x, y in places[count - 1]:
        flavour = pen.pick("pink", "pink", "cream", "chocolate", "green", "any")
        pen.blob(x, y + wide * 0.62, wide * 1.05, shade(flavour, 0.9), wide * 0.3, 0, 0.2)
        pen.ball(x, y, wide, flavour)
        pen.at(x, y, wide).bits(
            rng.choice((0, 8)), 0.8, 0.1, pen.pick("any"), pen.pick("chocolate")
        )


@food(380, 5)
def kimbap(pen: Pen) -> None:
    """A slice of a seaweed roll: dark rim, rice, a colourful middle."""
    rng, rim, rice, fills = (
        pen.rng,
        pen.pick("seaweed"),
        pen.pick("cream"),
        ("red", "green", "baked", "cheese"),
    )
    pen.blob(0.04, 0.1, 0.95, shade(rim, 0.7), 0.92)
    pen.blob(0, 0, 0.95, rim, 0.92)
    pen.blob(0, 0, 0.83, rice, 0.8)
    pen.bits(24, 0.76, 0.07, rice)
    for x, y in pen.spots(rng.randint(4, 7), 0.34):
        pen.at(x, y, rng.uniform(0.13, 0.22), rng.uniform(0, 3)).shape(
            box(-1, -1, 1, 1), pen.pick(*fills)
        )


@food(520)
def pancakes(pen: Pen) -> None:
    """A stack of discs, with syrup and butter or berries on top."""
    rng, base, count = pen.rng, pen.pick("baked"), pen.rng.randint(2, 6)
    step, flat, syrup = (
        rng.uniform(0.12, 0.18),
        rng.uniform(0.4, 0.75),
        pen.pick("chocolate", "broth", "red"),
    )
    layers = (
        (0.8, 1, shade(base, 0.62)),
        (0.3, 1, (222, 206, 168)),
        (0, 1, base),
        (0, 0.88, shade(base, 0.9)),
    )
    for y in (step * (count / 2 - i) for i in range(count)):
        x, r = rng.uniform(-0.06, 0.06), rng.uniform(0.78, 0.9)
        for down, k, fill in layers:
            pen.blob(x, y + step * down, r * k, fill, r * k * flat)
    top = pen.at(0, step * (1 - count / 2))
    if rng.random() < 0.7:
        top.blob(0, 0, 0.5, syrup, 0.5 * flat, 0, 0.2)
        for x in (rng.uniform(-0.7, 0), rng.uniform(0, 0.7)):
            top.line(
                [(x * 0.5, 0), (x, 0.5 * flat), (x, 0.5 * flat + rng.uniform(0.1, 0.4))], 0.1, syrup
            )
    if rng.random() < 0.7:
        butter = top.at(rng.uniform(-0.15, 0.15), -0.08, 0.2, rng.uniform(-0.5, 0.5))
        butter.shape(box(-1, -0.6, 1, 0.8), (214, 178, 84))
        butter.shape(box(-0.95, -0.6, 0.95, 0.3), (250, 226, 130))
    else:
        top.at(0, 0, 1, 0, flat).bits(
            rng.randint(4, 9), 0.45, 0.13, pen.pick("red", "plum"), slim=1.2
        )


@food(700)
def pizza(pen: Pen) -> None:
    """Crust, sauce, melted cheese and toppings; whole, cut, or with slices gone."""
    rng, base, meat, size = pen.rng, pen.pick("baked"), pen.pick("red"), pen.rng.uniform(0.09, 0.16)
    start, gone = rng.uniform(0, 6), rng.choice((0.0, 0.0, 0.8, 1.6, 5.2))
    layers = (
        (1.0, shade(base, 0.8)),
        (0.96, base),
        (0.84, pen.pick("red")),
        (0.8, pen.pick("cheese")),
    )
    for radius, fill in layers:
        pen.shape([(0.0, 0.0)] * (gone > 0) + arc(radius, start + gone, start + 2 * math.pi), fill)
    kinds = rng.sample(("disc", "leaf", "olive", "patch"), 2)
    for _ in range(rng.randint(9, 18)):
        r, t, kind = (
            0.72 * rng.random() ** 0.5,
            rng.uniform(start + gone + 0.1, start + 6.2),
            rng.choice(kinds),
        )
        top = pen.at(r * math.cos(t), r * math.sin(t), size, t)
        if kind == "disc":
            top.ball(0, 0, 1, meat)
        elif kind == "leaf":
            top.blob(0, 0, 1.2, pen.pick("green"), 0.5)
        elif kind == "olive":
            top.blob(0, 0, 0.6, (45, 40, 45))
            top.blob(0, 0, 0.25, (170, 140, 90))
        else:
            top.blob(0, 0, 1.3, pen.pick("cream"), 1, 0, 0.15)
    for t in (start + gone + k * (6.283 - gone) / 8 for k in range(rng.choice((0, 8)))):
        pen.line([(0, 0), (math.cos(t), math.sin(t))], 0.025, shade(base, 0.6))


@food(550)
def ramen(pen: Pen) -> None:
    """Wavy noodles in broth with egg, seaweed or meat."""
    rng, noodle, centre = pen.rng, pen.pick("cream", "cheese"), pen.rng.uniform(0, 6)
    pen.bowl(pen.pick("broth", "broth", "chocolate", "red"))
    for x, y in pen.spots(rng.randint(12, 20), 0.4):
        bend, here = rng.uniform(0.04, 0.12), pen.at(x, y, 1, centre + rng.uniform(-0.6, 0.6))
        wave = [(-0.42 + 0.07 * i, bend * math.sin(i * 1.1)) for i in range(13)]
        here.line(wave, 0.075, shade(noodle, 0.7))
        here.line(wave, 0.045, noodle)
    for i, kind in enumerate(rng.sample(("egg", "nori", "meat"), rng.randint(0, 3))):
        t = centre + 2.1 * i
        extra = pen.at(0.55 * math.cos(t), 0.55 * math.sin(t), rng.uniform(0.23, 0.32), t)
        if kind == "egg":
            extra.blob(0, 0, 1, pen.pick("cream"), 0.78)
            extra.blob(0, 0, 0.52, pen.pick("yolk"))
        elif kind == "nori":
            extra.shape(box(-0.8, -0.7, 1.2, 0.7), pen.pick("seaweed"))
        else:
            extra.ball(0, 0, 1, pen.pick("skin"), 0.65)
    pen.bits(rng.randint(0, 14), 0.6, 0.06, pen.pick("green"))


@food(240)
def salad(pen: Pen) -> None:
    """Torn leaves with slices and wedges in between."""
    rng = pen.rng
    if rng.random() < 0.5:
        pen.bowl(shade(pen.pick("green"), 0.7))
    for x, y in pen.spots(rng.randint(16, 26), 0.7):
        fill = (
            shade(pen.pick("green"), rng.uniform(0.7, 1.3))
            if rng.random() < 0.8
            else pen.pick("plum", "chocolate")
        )
        leaf = pen.at(x, y, rng.uniform(0.18, 0.34), rng.uniform(0, 6))
        leaf.blob(0, 0, 1, fill, 0.6, 0, 0.2)
        leaf.line([(-0.9, 0), (0.9, 0)], 0.1, shade(fill, 1.35))
    for x, y in pen.spots(rng.randint(3, 9), 0.6):
        here = pen.at(x, y, rng.uniform(0.14, 0.24), rng.uniform(0, 6))
        kind, fill = rng.randint(0, 2), pen.pick("red", "green")
        if kind == 0:
            here.shape(arc(1, 0, math.pi), fill)
            here.shape(arc(0.6, 0.3, math.pi - 0.3), shade(fill, 1.3))
        elif kind == 1:
            here.shape(box(-1, -0.8, 1, 0.8), pen.pick("cream", "baked"))
        else:
            here.blob(0, 0, 1, fill)
            here.blob(0, 0, 0.8, pen.pick("cream") if rng.random() < 0.5 else shade(fill, 1.15))


@food(210)
def soup(pen: Pen) -> None:
    """Smooth liquid with a swirl of cream, croutons, herbs or drops of oil."""
    rng, fill, bread = pen.rng, pen.pick("red", "broth", "green", "cheese"), pen.pick("baked")
    pen.bowl(fill)
    if rng.random() < 0.65:
        turn, steps = rng.uniform(0, 6), rng.randint(15, 36)
        swirl = [(0.3 * i, 0.3 * i + turn) for i in range(2, steps)]
        cream = pen.pick("cream") if rng.random() < 0.6 else shade(fill, 0.6)
        pen.line(
            [(0.055 * r * math.cos(t), 0.055 * r * math.sin(t)) for r, t in swirl], 0.07, cream
        )
    for x, y in pen.spots(rng.choice((0, rng.randint(3, 8))), 0.55):
        cube = pen.at(x, y, 0.11, rng.uniform(0, 3))
        cube.shape(box(-1, -1, 1, 1.3), shade(bread, 0.75))
        cube.shape(box(-1, -1, 1, 0.7), bread)
    pen.bits(rng.choice((0, rng.randint(5, 16))), 0.7, 0.06, pen.pick("green"))
    pen.bits(rng.choice((0, rng.randint(5, 12))), 0.75, 0.08, shade(fill, 1.3), shade(fill, 0.75))


@food(400)
def sushi(pen: Pen) -> None:
    """Nigiri: pads of rice under fish, side by side."""
    rng, count, tilt, belt = (
        pen.rng,
        pen.rng.randint(2, 4),
        pen.rng.uniform(-0.4, 0.4),
        pen.rng.random() < 0.3,
    )
    fish, rice, wide = (
        [pen.pick("red"), pen.pick("cream", "cheese", "red")],
        pen.pick("cream"),
        0.68 / count,
    )
    for i in range(count):
        x, y, turn = (
            (i - (count - 1) / 2) * 1.72 / count,
            rng.uniform(-0.06, 0.06),
            tilt + rng.uniform(-0.15, 0.15),
        )
        here, fill = pen.at(x, y, 1, turn), fish[rng.random() < 0.4]
        here.blob(0.03, 0.1, wide * 1.08, shade(rice, 0.6), 0.66)
        here.blob(0, 0.06, wide, rice, 0.62)
        here.blob(0, -0.04, wide * 1.05, shade(fill, 0.8), 0.55)
        here.blob(-0.02, -0.07, wide * 0.95, fill, 0.5)
        for v in (-0.45 + 0.2 * k for k in range(rng.randint(0, 5))):
            here.line(
                [(-wide * 0.8, v), (0, v + 0.1), (wide * 0.8, v - 0.02)], 0.035, shade(fill, 1.3)
            )
        if belt:
            here.shape(box(-wide, -0.1, wide, 0.08), (34, 42, 40))


@food(450, 2, spin=0.3)
def taco(pen: Pen) -> None:
    """A folded shell with a filling along the open edge."""
    rng, shell, pen = pen.rng, pen.pick("baked"), pen.at(0, 0.3)
    fills = [
        pen.pick(name) for name in rng.sample(("green", "red", "chocolate", "cream", "cheese"), 3)
    ]
    pen.shape(arc(1.0, math.pi, 2 * math.pi, 0.95), shade(shell, 0.7))
    for t in (math.pi * (1 + i / 18) for i in range(19)):
        r, size = rng.uniform(0.86, 1.02), rng.uniform(0.1, 0.19)
        pen.blob(r * math.cos(t), r * math.sin(t) * 0.92, size, rng.choice(fills), 0.1, t, 0.15)
    pen.shape(arc(0.92, math.pi, 2 * math.pi, 0.85), shell)
    pen.shape(arc(0.7, math.pi, 2 * math.pi, 0.7), shade(shell, 1.1))
    for _ in range(7):
        pen.blob(rng.uniform(-0.6, 0.6), rng.uniform(-0.5, -0.05), 0.05, shade(shell, 0.75))


CLASSES = tuple(food.name for food in FOODS)
_PORTIONS = (0.55, 1.05)  # sides of portions, of the usual one's


def _clouds(chance: np.random.RandomState, cells: int, rows: int = 0) -> np.ndarray:
    """Smooth noise of about ±1 over the canvas; with fewer ``rows`` than cells it is drawn out into bands."""
    coarse = chance.standard_normal((rows or cells, cells)).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((_CANVAS, _CANVAS), Image.Resampling.BICUBIC))


def _table(rng: random.Random, chance: np.random.RandomState) -> Image.Image:
    """Wood, cloth, marble, tiles, speckled stone or a plain table."""
    base = Pen(Image.new("RGB", (1, 1)), rng, (1, 0, 0, 0, 1, 0)).pick(
        "metal", "metal", "skin", "chocolate", "any"
    )
    y, x = _ROWS, _COLUMNS
    t, pitch = rng.uniform(0, math.pi), rng.uniform(12, 40)
    u, v = x * math.cos(t) + y * math.sin(t), y * math.cos(t) - x * math.sin(t)
    kind = rng.choice(("wood", "cloth", "stripes", "marble", "tiles", "stone", "plain"))
    if kind == "wood":
        field = 0.1 * np.sin(v / 2.2 + 3 * _clouds(chance, 5)) + 0.08 * _clouds(chance, 24, 4)
        field -= 0.35 * (v % (pitch + 14) < 2)
    elif kind == "cloth":
        field = 0.16 * (np.sign(np.sin(u * 6.28 / pitch)) + np.sign(np.sin(v * 6.28 / pitch)))
    elif kind == "stripes":
        field = rng.uniform(0.1, 0.35) * np.sign(np.sin(u * 6.28 / pitch))
    elif kind == "marble":
        field = -0.4 * np.exp(-6 * np.abs(_clouds(chance, 6) + 0.4 * _clouds(chance, 14)))
    elif kind == "tiles":
        field = 0.3 * ((u % pitch < 2.5) | (v % pitch < 2.5)) * rng.choice(
            (-1, 1)
        ) + 0.05 * _clouds(chance, 10)
    else:
        field = (0.13 if kind == "stone" else 0.03) * _clouds(chance, 70) + 0.08 * _clouds(
            chance, 6
        )
    lit = np.array(base, np.float32) * (1 + _SPREAD * field[..., None])
    return Image.fromarray(np.clip(lit, 0, 255).astype(np.uint8))


def _dish(pen: Pen) -> None:
    """What the food lies on: a plate, a board, a tray or nothing."""
    fill, size = (
        pen.pick("cream", "cream", "cream", "chocolate", "metal", "any"),
        pen.rng.uniform(1.12, 1.45),
    )
    kind = pen.rng.choice(("none", "plate", "plate", "plate", "board", "tray"))
    if kind == "plate":
        for r, light in ((1.0, 0.78), (0.97, 1.0), (0.76, 0.86), (0.74, 0.97)):
            pen.blob(0, 0, size * r, shade(fill, light), wobble=0)
    elif kind != "none":
        here = pen.at(0, 0, size, pen.rng.uniform(-0.5, 0.5), pen.rng.uniform(0.7, 1))
        for r, light in (
            ((1.0, 0.8), (0.95, 1.0)) if kind == "board" else ((1.0, 1.0), (0.9, 0.8), (0.86, 0.9))
        ):
            here.shape(box(-r, -r, r, r), shade(fill, light))


def _clutter(pen: Pen) -> None:
    """Something in front: cutlery, chopsticks, leaves, drops of sauce, fingers or a napkin."""
    rng = pen.rng
    kind = rng.choice(("fork", "sticks", "leaf", "sauce", "hand", "napkin", "none", "none"))
    here = pen.at(0, 0, 1, rng.uniform(0, 6.28)).at(rng.uniform(0.25, 0.75), 0)
    if kind == "fork":
        metal = pen.pick("metal")
        here.line([(0.3, -0.1), (2.5, 0.15)], 0.1, metal)
        for k in (-1, 0, 1):
            here.line([(-0.15, 0.09 * k - 0.12), (0.32, 0.07 * k - 0.1)], 0.045, metal)
    elif kind == "sticks":
        for v in (-0.1, 0.1):
            here.line([(-0.4, v), (2.5, 2.2 * v)], 0.07, pen.pick("chocolate", "red", "baked"))
    elif kind == "leaf":
        here.bits(rng.randint(1, 4), 0.6, 0.24, pen.pick("green"), slim=0.45)
    elif kind == "sauce":
        here.bits(rng.randint(1, 4), 0.6, 0.16, pen.pick(*_SAUCES), slim=0.9)
    elif kind == "hand":
        skin = pen.pick("skin")
        for k in range(rng.randint(1, 3)):
            here.line([(0.2 + 0.05 * k, 0.25 * k), (2.5, 0.1 + 0.3 * k)], 0.24, shade(skin, 0.85))
            here.ball(0.2 + 0.05 * k, 0.25 * k, 0.13, skin)
    elif kind == "napkin":
        here.shape([(0.35, -1.5), (2.5, -1.2), (2.5, 1.6), (0.2, 1.1)], pen.pick("any"))


def _photograph(
    image: Image.Image, rng: random.Random, chance: np.random.RandomState
) -> Image.Image:
    """Light and camera: focus, colour temperature, vignette, a cast shadow, noise."""
    image = image.filter(
        ImageFilter.GaussianBlur(rng.choice((0.0, 0.0, 1.8 * _SPREAD * rng.random())))
    )
    image = ImageEnhance.Color(image.reduce(2)).enhance(1 + 0.5 * _SPREAD * rng.uniform(-1, 0.5))
    y, x = _HEIGHTS, _WIDTHS
    t, warm, noise = (
        rng.uniform(0, 6.28),
        0.22 * _SPREAD * rng.uniform(-1, 1),
        0.05 * _SPREAD * rng.random(),
    )
    side = x * math.cos(t) + y * math.sin(t)
    light = 1 + _SPREAD * (rng.uniform(0, 0.35) * side - rng.uniform(0, 0.35) * (x * x + y * y))
    light += _SPREAD * rng.uniform(0, 0.12) * _clouds(chance, 6)[::2, ::2]
    if rng.random() < 0.3 * _SPREAD:
        light *= np.where(side > rng.uniform(-0.6, 0.6), rng.uniform(0.45, 0.8), 1)
    bright = 1.05 + 0.3 * _SPREAD * rng.uniform(-1, 1)
    gain = bright * np.array((1 + warm, 1 + rng.uniform(-0.06, 0.06), 1 - warm), np.float32)
    pixels = np.asarray(image, dtype=np.float32) / 255 * light[..., None] * gain
    pixels = np.clip(pixels, 0, 1) ** (0.95 + 0.25 * _SPREAD * rng.uniform(-1, 1))
    pixels += noise * chance.standard_normal(pixels.shape).astype(np.float32)
    return Image.fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8))


def portion_of(label: int, seed: int) -> float:
    """The side of a portion, of the usual one's, in a set that varies it."""
    return random.Random(f"{VERSION}/portion/{label}/{seed}").uniform(*_PORTIONS)


def calories_of(label: int, seed: int) -> float:
    """Of such a portion, in kcal: the food's calories times the area that it covers."""
    return FOODS[label].kcal * portion_of(label, seed) ** 2


def draw(label: int, seed: int, portion: float = 1.0) -> Image.Image:
    """One photograph of a food.

    Args:
        label: index into :data:`CLASSES`.
        seed: the same (label, seed, portion) gives the same pixels, whoever else draws random numbers.
        portion: size of the dish, 1 is the usual one.
    """
    rng = random.Random(f"{VERSION}/{label}/{seed}")
    chance = np.random.RandomState(rng.getrandbits(32))
    image, size = _table(rng, chance), _CANVAS * (0.42 + 0.12 * _SPREAD * rng.uniform(-1, 0.5))
    left, top = (_CANVAS * (0.5 + 0.14 * _SPREAD * rng.uniform(-1, 1)) for _ in range(2))
    frame = Pen(image, rng, (size, 0, left, 0, size, top))
    if rng.random() < 0.3 * _SPREAD:  # the neighbour's plate, cut off by the edge
        t, fill = rng.uniform(0, 6.28), frame.pick("any", "cream")
        for r in (0.7, 0.55):
            frame.blob(1.9 * math.cos(t), 1.9 * math.sin(t), r, shade(fill, 1.3 - r / 2))
    shadow, dx, dy = Image.new("L", image.size, 0), rng.uniform(-0.2, 0.2), rng.uniform(0.0, 0.25)
    ends = frame.pixels([(dx - 1.1, dy - 1.0), (dx + 1.1, dy + 1.0)])
    ImageDraw.Draw(shadow).ellipse(ends, fill=rng.randint(40, 150))
    image.paste((20, 16, 14), (0, 0), shadow.filter(ImageFilter.BoxBlur(8)))
    turn, lean, squash = rng.uniform(-0.3, 0.3), rng.uniform(-0.45, 0.45), rng.uniform(0, 0.32)
    view = frame.at(0, 0, 1, _SPREAD * turn, 1 - _SPREAD * squash).at(0, 0, 1, _SPREAD * lean)
    _dish(view)
    FOODS[label].draw(view if portion == 1.0 else view.at(0, 0, portion))
    if rng.random() < _SPREAD:
        _clutter(frame)
    return _photograph(image, rng, chance)


def _jobs(train_per_class: int, val_per_class: int) -> list[tuple[str, int, int]]:
    """(split, label, seed) of every picture of a set; a larger set holds a smaller one."""
    seeds = {"train": range(train_per_class), "val": range(_VAL_SEED, _VAL_SEED + val_per_class)}
    return [
        (split, label, seed)
        for split in seeds
        for label in range(len(CLASSES))
        for seed in seeds[split]
    ]


def _draw_share(
    root: str, train_per_class: str, val_per_class: str, share: str, shares: str, portions: str
) -> None:
    """One worker's share of the pictures; prints each one's line for the list of sums."""
    for split, label, seed in _jobs(int(train_per_class), int(val_per_class))[
        int(share) :: int(shares)
    ]:
        name = f"{split}/{CLASSES[label]}/{seed:07d}.jpg"
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        draw(label, seed, portion_of(label, seed) if portions else 1.0).save(file, quality=90)
        try:
            print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}", flush=True)
        except BrokenPipeError:  # nobody waits for the pictures any more
            os._exit(1)


def _fill(root: Path, train_per_class: int, val_per_class: int, portions: bool) -> None:
    """Draws every picture below ``root``, over the cores this process may use, and writes the list of sums."""
    from kd.machine import cores  # the drawing processes run this file alone
    from kd.progress import bar

    total = len(_jobs(train_per_class, val_per_class))
    shares, lines = max(1, min(cores(), total // 20)), []
    # This file as a program of its own: a fork could inherit a held lock, and spawn would run the caller's
    # main module and import torch again in every worker.
    command = [sys.executable, "-P", __file__, str(root), str(train_per_class), str(val_per_class)]
    workers = [
        subprocess.Popen(
            [*command, str(i), str(shares), "portions" * portions],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(shares)
    ]

    def follow(worker: subprocess.Popen[str]) -> None:
        for line in worker.stdout or ():
            lines.append(line)
            drawn.update()

    try:
        with (
            bar(total=total, label="drawing FoodTag-mini") as drawn,
            ThreadPoolExecutor(shares) as threads,
        ):
            list(threads.map(follow, workers))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if len(lines) != total:
        raise RuntimeError(f"FoodTag-mini: {len(lines)} of {total} pictures were drawn in {root}")
    (root / _SUMS).write_text("".join(sorted(lines, key=lambda line: line[66:])))


def _first_bad(root: Path) -> str | None:
    """The first path that is missing, changed or extra, or None for an intact set."""
    try:
        sums = {line[66:]: line[:64] for line in (root / _SUMS).read_text().splitlines()}
    except (OSError, UnicodeDecodeError):
        sums = {}
    if not sums:
        return _SUMS
    folders = {str(parent) for name in sums for parent in PurePosixPath(name).parents}
    there = {path.relative_to(root).as_posix() for path in root.rglob("*")} - folders - {_SUMS}
    odd = sums.keys() ^ there
    names = sorted(sums.keys() | there)
    return next(
        (
            n
            for n in names
            if n in odd or hashlib.sha256((root / n).read_bytes()).hexdigest() != sums[n]
        ),
        None,
    )


def check(**counts: int) -> None:
    """Checks numbers of pictures a class, by the settings' names.

    Raises:
        ValueError: one below 1, or so large that training and validation seeds would meet.
    """
    for name, value in counts.items():
        if not 1 <= value <= _VAL_SEED:
            raise ValueError(f"{name} must be between 1 and {_VAL_SEED}, got {value}")


def build(
    cache_dir: Path, train_per_class: int, val_per_class: int, portions: bool = False
) -> Path:
    """Makes sure that the data set lies below ``cache_dir``, intact, and returns its folder."""
    check(train_per_class=train_per_class, val_per_class=val_per_class)
    cache_dir = Path(cache_dir).absolute()
    root = (
        cache_dir
        / f"foodtag-mini-{VERSION}-{train_per_class}x{val_per_class}{'-portions' * portions}"
    )
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.lock"):
        if root.exists():
            bad = _first_bad(root)
            if bad is None:
                return root
            print(f"FoodTag-mini is damaged ({root / bad}): drawing it again", file=sys.stderr)
            shutil.rmtree(root)
        for left in cache_dir.glob(f"{root.name}.tmp-*"):  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = cache_dir / f"{root.name}.tmp-{os.getpid()}"
        try:
            _fill(work, train_per_class, val_per_class, portions)
            work.rename(root)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return root


if __name__ == "__main__":
    _draw_share(*sys.argv[1:])
