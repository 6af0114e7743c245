"""What the foods are drawn with: colours, outlines, and a pen that draws in a frame of its own."""

import math
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

Colour = tuple[int, ...]
"""Red, green, blue and perhaps alpha, each in 0..255."""
Point = tuple[float, float]
"""x (to the right) and y (downwards) in a pen's frame, where the dish is the unit disc."""

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


def _unit_circle(steps: int) -> list[tuple[float, float, float]]:
    """``steps`` points of the unit circle: angle in radians, x, y."""
    angles = [2 * math.pi * i / steps for i in range(steps)]
    return [(angle, math.cos(angle), math.sin(angle)) for angle in angles]


_COARSE_CIRCLE = _unit_circle(12)
_FINE_CIRCLE = _unit_circle(36)
_FINE_FROM = 8  # pixels: blobs of a smaller radius have the coarse outline


def pick_colour(rng: random.Random, *names: str) -> Colour:
    """A random colour of one of the kinds ``names`` (of ``_COLOURS``; one named twice is twice as likely), RGB in 0..255."""
    name = rng.choice(names)
    low_hue, high_hue, low_saturation, high_saturation, low_value, high_value = _COLOURS[name]
    hue = rng.uniform(low_hue, high_hue) / 60
    saturation = rng.uniform(low_saturation, high_saturation) / 100
    value = 2.55 * rng.uniform(low_value, high_value)
    # HSV to RGB: channel(n) = V - V S max(0, min(k, 4 - k, 1)), k = (n + H / 60 degrees) mod 6, n = 5, 3, 1
    # (https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative)
    channels = []
    for n in (5, 3, 1):
        k = (n + hue) % 6
        taken = saturation * max(0, min(k, 4 - k, 1))
        channels.append(int(value * (1 - taken)))
    return tuple(channels)


def shade(colour: Colour, light: float) -> Colour:
    """The colour with all channels, also alpha, times ``light``: lighter (> 1) or darker (< 1); at most 255."""
    return tuple(min(255, int(channel * light)) for channel in colour)


def polar(radius: float, angle: float) -> Point:
    """The point at ``radius`` from the origin, in the direction ``angle`` (radians, clockwise from the right)."""
    return (radius * math.cos(angle), radius * math.sin(angle))


def arc(
    radius: float, start: float, stop: float, squash: float = 1.0, steps: int = 30
) -> list[Point]:
    """``steps + 1`` points along an elliptic arc around the origin, between two angles in radians.

    Args:
        radius: along x, in units of a pen's frame.
        start: the first angle; from the x axis towards y.
        stop: the last one.
        squash: the radius along y over that along x.
        steps: lines between the points.
    """
    points = []
    for i in range(steps + 1):
        angle = start + (stop - start) * i / steps
        x = radius * math.cos(angle)
        y = radius * squash * math.sin(angle)
        points.append((x, y))
    return points


def box(left: float, top: float, right: float, bottom: float) -> list[Point]:
    """The corners of a rectangle, in order around it."""
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


class Pen:
    """Draws in a frame of its own, in which the dish is the unit disc, on a picture it shares with other pens.

    Args:
        image: the canvas.
        rng: the only source of chance.
        matrix: (a, b, c, d, e, f): the point (x, y) of the frame is the pixel (ax + by + c, dx + ey + f).
    """

    def __init__(self, image: Image.Image, rng: random.Random, matrix: Sequence[float]) -> None:
        """Arguments as of the class; ``image`` is drawn on in place, and ``scale`` is the pixels of a unit of the
        frame.
        """
        self.image = image
        self.rng = rng
        self.matrix = matrix
        self.canvas = ImageDraw.Draw(image, "RGBA")
        a, b, _, d, e, _ = matrix
        self.scale = math.sqrt(abs(a * e - b * d))  # pixels to a unit of the frame

    def at(
        self, x: float, y: float, scale: float = 1.0, turn: float = 0.0, squash: float = 1.0
    ) -> "Pen":
        """A pen whose frame lies at (x, y) of this one, on the same picture.

        Args:
            x: of its origin, in units of this frame.
            y: likewise; downwards.
            scale: size of its unit in units of this frame.
            turn: radians.
            squash: its height over its width.
        """
        a, b, c, d, e, f = self.matrix
        # The new frame's point (u, v) is (p u + q v + x, r u + s v + y) in this frame.
        height = scale * squash
        p = scale * math.cos(turn)
        q = -height * math.sin(turn)
        r = scale * math.sin(turn)
        s = height * math.cos(turn)
        # This frame's matrix times the new frame's.
        matrix = (
            a * p + b * r,
            a * q + b * s,
            a * x + b * y + c,
            d * p + e * r,
            d * q + e * s,
            d * x + e * y + f,
        )
        return Pen(self.image, self.rng, matrix)

    def pick(self, *names: str) -> Colour:
        """A random colour of one of the named kinds, RGB in 0..255."""
        return pick_colour(self.rng, *names)

    def pixels(self, points: Sequence[Point]) -> list[Point]:
        """Points of the frame as pixels of the canvas."""
        a, b, c, d, e, f = self.matrix
        pixels = []
        for x, y in points:
            across = a * x + b * y + c
            down = d * x + e * y + f
            pixels.append((across, down))
        return pixels

    def shape(self, points: Sequence[Point], fill: Colour) -> None:
        """A filled polygon."""
        self.canvas.polygon(self.pixels(points), fill=fill)

    def line(self, points: Sequence[Point], width: float, fill: Colour) -> None:
        """A line through the points; its width is in units of the frame, at least a pixel."""
        width_in_pixels = max(1, round(width * self.scale))
        self.canvas.line(self.pixels(points), fill, width_in_pixels, "curve")

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
        """A filled ellipse with an irregular outline; lengths in units of the frame.

        Args:
            x: of the centre.
            y: of the centre.
            rx: radius along x, before the turn.
            fill: colour.
            ry: radius along y; 0: a circle.
            turn: radians.
            wobble: greatest height of each of the outline's three waves, as a share of the radius; 0: none.
        """
        # The outline's radius: 1 plus three waves, of 2, 3 and 5 periods around the ellipse.
        waves = []
        for periods in (2, 3, 5):
            phase = self.rng.uniform(0, 7)
            height = self.rng.uniform(0, wobble)
            waves.append((periods, phase, height))
        (n1, phase1, height1), (n2, phase2, height2), (n3, phase3, height3) = waves

        ry = ry or rx
        cos = math.cos(turn)
        sin = math.sin(turn)
        circle = _FINE_CIRCLE
        if rx * self.scale < _FINE_FROM:
            circle = _COARSE_CIRCLE
        points = []
        for angle, circle_x, circle_y in circle:
            wave1 = height1 * math.sin(n1 * angle + phase1)
            wave2 = height2 * math.sin(n2 * angle + phase2)
            wave3 = height3 * math.sin(n3 * angle + phase3)
            radius = 1 + (wave1 + wave2 + wave3)
            u = rx * radius * circle_x
            v = ry * radius * circle_y
            turned_x = x + u * cos - v * sin
            turned_y = y + u * sin + v * cos
            points.append((turned_x, turned_y))
        self.shape(points, fill)

    def ball(
        self, x: float, y: float, rx: float, fill: Colour, ry: float = 0, turn: float = 0
    ) -> None:
        """A rounded body: dark at the rim, light towards the upper left of the frame. Arguments as of :meth:`blob`."""
        ry = ry or rx
        layers = (  # size and light, from the rim to the lightest spot
            (1.0, 0.74),
            (0.88, 0.92),
            (0.66, 1.04),
            (0.36, 1.14),
        )
        for size, light in layers:
            shift = (1 - size) * 0.16
            centre_x = x - shift * rx
            centre_y = y - 2 * shift * ry
            colour = shade(fill, light)
            self.blob(centre_x, centre_y, rx * size, colour, ry=ry * size, turn=turn, wobble=0.03)

    def spots(self, count: int, reach: float, inner: float = 0.0) -> list[Point]:
        """``count`` random places between the radii ``inner`` and ``reach`` of the frame, about evenly over the area."""
        places = []
        for _ in range(count):
            radius = self.rng.uniform(inner**2, reach**2) ** 0.5
            angle = self.rng.uniform(0, 7)
            places.append(polar(radius, angle))
        return places

    def bits(
        self,
        count: int,
        reach: float,
        size: float,
        *fills: Colour,
        inner: float = 0.0,
        slim: float = 0.6,
    ) -> None:
        """Crumbs, herbs, seeds, grains of rice: small blobs of any of the colours, between two radii.

        Args:
            count: of the blobs.
            reach: the outer radius, in units of the frame as all lengths.
            size: a blob's usual long radius; 0.6 to 1.3 times it is drawn.
            fills: colours; each blob takes one, lighter or darker.
            inner: the inner radius.
            slim: a blob's short radius to its long one.
        """
        rng = self.rng
        for x, y in self.spots(count, reach=reach, inner=inner):
            radius = size * rng.uniform(0.6, 1.3)
            fill = rng.choice(fills)
            light = rng.uniform(0.8, 1.12)
            turn = rng.uniform(0, 3)
            lit = shade(fill, light)
            self.blob(x, y, radius, lit, ry=radius * slim, turn=turn, wobble=0.1)

    def bowl(self, fill: Colour) -> None:
        """A bowl of radius 1.08 filled to its rim with ``fill``; the rim's colour is drawn from ``rng``."""
        rim = self.pick("cream", "cream", "chocolate", "metal")
        outside = shade(rim, 0.6)
        inside = shade(rim, 0.7)
        lit = shade(fill, 1.07)
        self.blob(0, 0.08, 1.08, outside, wobble=0)
        self.blob(0, 0, 1.06, rim, wobble=0)
        self.blob(0, 0.02, 0.96, inside, wobble=0)
        self.blob(0, 0.04, 0.92, fill, wobble=0.01)
        self.blob(-0.05, 0, 0.75, lit, wobble=0.06)
