"""The 20 foods: a function each, registered by :func:`food` in the order of their names.

A pen's frame has the dish as its unit disc. What a function draws with, it draws from ``pen.rng`` alone, and in a fixed
order: a number that is drawn earlier, later or not at all changes every picture (then ``VERSION`` is to be raised).
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from .pen import Colour, Pen, Point, arc, box, polar, shade

_SHADOW = (20, 16, 14, 70)
_SIZES = (0.95, 0.62, 0.52, 0.47, 0.44, 0.42)
"""Radius of each of 1, 2, ... 6 pieces on a dish, in units of the dish's."""


class Food(NamedTuple):
    """A class of the set."""

    name: str
    """Of its drawing function."""
    draw: Callable[[Pen], None]
    """Draws it in the frame of the dish."""
    kcal: int
    """Of a usual portion."""


FOODS: list[Food] = []
"""All foods; a food's label is its place."""


def food(kcal: int, most: int = 1, spin: float = 3.2) -> Callable[[Callable[[Pen], None]], None]:
    """Registers a drawing as a class: a decorator. Labels are the order of the functions, which is that of their names.

    Args:
        kcal: of a usual portion.
        most: up to so many pieces (6 at most) fill the dish; each is drawn by the function, alike but for place and turn.
        spin: how far a piece is turned at most, in radians; up to 1 its shadow is flat. A food of one piece has neither.
    """

    def register(draw_one: Callable[[Pen], None]) -> None:
        """Adds a food to :data:`FOODS`, by the name of its function; the decorator returns nothing."""

        def draw_pieces(pen: Pen) -> None:
            """Draws up to ``most`` pieces, alike but for their places and turns, each with a shadow."""
            rng = pen.rng
            count = rng.randint(1, most)
            start = rng.uniform(0, 7)
            style = rng.getrandbits(32)
            size = _SIZES[count - 1]
            distance = 0.0 if count == 1 else 0.98 - size  # of a piece from the middle
            shadow_height = 0.9 if spin > 1 else 0.5  # flat below pieces that all lie upright
            for i in range(count):
                even_angle = start + 2 * math.pi * i / count
                angle = even_angle + rng.uniform(-0.25, 0.25)
                turn = rng.uniform(-spin, spin)
                scale = size * rng.uniform(0.85, 1.1)
                x, y = polar(distance, angle)
                piece = pen.at(x, y, scale=scale, turn=turn)
                piece.blob(0.08, 0.1, 0.95, _SHADOW, ry=shadow_height)
                piece.rng = random.Random(style)  # the same for all pieces of a dish
                draw_one(piece)

        draw = draw_pieces if most > 1 else draw_one
        FOODS.append(Food(draw_one.__name__, draw, kcal))

    return register


@food(kcal=280, most=2)
def bagel(pen: Pen) -> None:
    """A shiny ring of dough, plain or with seeds; on some a filling shows at the rim."""
    rng = pen.rng
    base = pen.pick("baked")
    hole = rng.uniform(0.2, 0.32)
    if rng.random() < 0.4:
        filling = pen.pick("cream", "green", "any")
        pen.blob(0.02, 0.08, 0.98, filling, wobble=0.06)
    rings = (  # radius and light, from the rim inwards
        (0.95, 0.68),
        (0.9, 0.85),
        (0.82, 1.0),
        (0.68, 1.12),
        (0.54, 1.0),
    )
    for radius, light in rings:
        pen.blob(-0.02, -0.03, radius, shade(base, light), wobble=0.03)
    pen.line(arc(0.66, start=3.5, stop=4.4), width=0.12, fill=shade(base, 1.35))
    if rng.random() < 0.6:
        seeds = pen.pick("cream", "seaweed")
        pen.bits(34, 0.8, 0.06, seeds, inner=hole + 0.12)
    pen.blob(0, 0, hole + 0.08, shade(base, 0.7))
    pen.blob(0.02, 0.03, hole, pen.pick("chocolate", "metal"))


@food(kcal=560)
def bibimbap(pen: Pen) -> None:
    """Rice under sectors of vegetables, an egg or sauce in the middle."""
    rng = pen.rng
    rice = pen.pick("cream")
    sectors = rng.randint(4, 7)
    first_angle = rng.uniform(0, 6)
    pen.bowl(rice)
    pen.bits(40, 0.85, 0.05, rice)
    for i in range(sectors):
        end = i + rng.uniform(0.75, 1)
        start = first_angle + 6.283 * i / sectors
        stop = first_angle + 6.283 * end / sectors
        fill = pen.pick("green", "green", "red", "chocolate", "cream", "cheese")
        edge = arc(0.8, start=start, stop=stop)
        pen.shape([(0.0, 0.0), *edge], shade(fill, 0.85))
        places = []
        for _ in range(9):
            radius = rng.uniform(0.35, 0.7)
            angle = rng.uniform(start, stop)
            places.append((radius, angle))
        for radius, angle in places:
            x, y = polar(radius, angle)
            turn = angle + rng.uniform(-0.5, 0.5)
            strip = pen.at(x, y, scale=0.14, turn=turn)
            light = rng.uniform(0.8, 1.2)
            strip.line([(0, 0), (1, 0)], width=0.4, fill=shade(fill, light))
    if rng.random() < 0.75:
        egg_radius = rng.uniform(0.3, 0.4)
        pen.blob(0, 0, egg_radius, pen.pick("cream"), wobble=0.1)
    pen.ball(0, 0, 0.2, pen.pick("yolk", "yolk", "red"))
    sesame = rng.randint(0, 16)
    pen.bits(sesame, 0.5, 0.035, (245, 235, 205))


@food(kcal=540)
def burger(pen: Pen) -> None:
    """Seen from the side: bun, fillings in any order, bun."""
    rng = pen.rng
    bun = pen.pick("baked")
    height = rng.uniform(0.14, 0.2)  # of a filling
    dome_height = rng.uniform(0.5, 0.85)
    has_seeds = rng.random() < 0.6
    lower_bun = box(-0.8, 0.4, 0.8, 0.7)
    bottom = arc(0.72, start=0, stop=math.pi, squash=0.4)
    pen.shape(lower_bun + bottom, shade(bun, 0.8))
    side = box(-0.8, 0.4, 0.8, 0.72)
    pen.shape(side, shade(bun, 0.9))

    # Fillings, from below; y is the upper edge of the newest one.
    y = 0.62
    count = rng.randint(2, 4)
    for kind in rng.sample(("meat", "leaf", "cheese", "slice"), count):
        y -= height
        _draw_filling(pen, kind, y, height)

    dome = pen.at(0, y + 0.06)
    layers = ((1.0, 0.82), (0.9, 1.0), (0.6, 1.12))  # size and light
    for size, light in layers:
        radius = 0.84 * size
        half_disc = arc(radius, start=math.pi, stop=2 * math.pi, squash=dome_height)
        dome.shape(half_disc, shade(bun, light))
    sesame = (248, 236, 205)
    seeds = 14 if has_seeds else 0
    for seed_x, seed_y in dome.spots(seeds, reach=0.6):
        height_on_dome = abs(seed_y) * dome_height
        dome.blob(seed_x, -height_on_dome - 0.06, 0.045, sesame, ry=0.028)


def _draw_filling(pen: Pen, kind: str, y: float, height: float) -> None:
    """Draws a burger's filling: ``meat``, ``leaf``, ``cheese`` or ``slice``, about ``height`` high, upper edge at ``y``."""
    if kind == "leaf":
        edge = []
        for i in range(16):
            x = -0.9 + 0.12 * i
            drop = 0.9 if i % 2 else 1.5
            edge.append((x, y + height * drop))
        fill = pen.pick("green")
        pen.shape([(0.85, y), (-0.85, y), *edge], fill)
        return
    if kind == "cheese":
        corners = [
            (0.5, y + height * 2),
            (0.1, y + height),
            (-0.6, y + height * 1.7),
        ]
        upper = y + 0.02
        fill = pen.pick("cheese")
        pen.shape([(-0.86, upper), (0.86, upper), *corners], fill)
        return
    names = ("chocolate",) if kind == "meat" else ("red", "cream", "chocolate")
    fill = pen.pick(*names)
    pen.blob(0, y + height / 2, 0.84, fill, ry=height * 0.75)
    pen.blob(0, y + height / 3, 0.8, shade(fill, 1.2), ry=height * 0.4)


@food(kcal=410)
def cake_slice(pen: Pen) -> None:
    """A wedge from the side: layers of sponge and cream, icing, something on top."""
    rng = pen.rng
    layers = 2 * rng.randint(1, 3) + 1
    height = rng.uniform(0.6, 0.95)
    depth = rng.uniform(0.35, 0.6)
    sponge = pen.pick("baked", "chocolate", "red")
    cream = pen.pick("cream")
    icing = pen.pick("cream", "chocolate", "pink")
    side = rng.choice((-1, 1))  # the tip points to the left or to the right

    # The upper face's corners; each layer shows on the two sides below them.
    tip = (-0.9 * side, -0.05)
    near = (0.6 * side, 0.1)
    far = (0.85 * side, -depth)
    iced = shade(icing, 0.8)
    for i in range(layers):
        upper = height * i / layers
        lower = height * (i + 1) / layers
        fill = cream if i % 2 else sponge
        pen.shape(_side_of_layer(tip, near, upper, lower), fill)
        pen.shape(_side_of_layer(near, far, upper, lower), iced)
    pen.shape([tip, near, far], icing)
    pen.shape(_side_of_layer(tip, near, 0, 0.08), shade(icing, 0.9))

    for _ in range(rng.randint(0, 3)):
        x = side * rng.uniform(-0.1, 0.6)
        y = rng.uniform(-0.37, -0.22)
        radius = rng.uniform(0.1, 0.2)
        pen.ball(x, y, radius, pen.pick("red", "plum"))
    top = pen.at(0.2 * side, -0.15, scale=1, turn=0, squash=0.5)
    count = rng.randint(0, 12)
    crumb = pen.pick("any")
    top.bits(count, 0.4, 0.04, crumb, pen.pick("chocolate"))


def _side_of_layer(left: Point, right: Point, upper: float, lower: float) -> list[Point]:
    """What shows of a cake's layer below the edge from ``left`` to ``right`` of its upper face.

    Args:
        left: an end of the edge.
        right: the other one.
        upper: how far below the edge the layer begins.
        lower: how far below it ends.
    """
    left_x, left_y = left
    right_x, right_y = right
    return [
        (left_x, left_y + upper),
        (right_x, right_y + upper),
        (right_x, right_y + lower),
        (left_x, left_y + lower),
    ]


@food(kcal=220, most=3)
def cookie(pen: Pen) -> None:
    """A flat disc with chips and cracks."""
    rng = pen.rng
    base = pen.pick("baked")
    discs = (  # place, radius and light
        (0.0, 1.0, 0.72),
        (-0.03, 0.93, 1.0),
        (-0.06, 0.6, 1.1),
    )
    for x, radius, light in discs:
        pen.blob(x, 1.3 * x, radius, shade(base, light), wobble=0.06)
    cracks = rng.randint(2, 5)
    for x, y in pen.spots(cracks, reach=0.6):
        crack = pen.at(x, y, scale=0.4, turn=rng.uniform(0, 6))
        crack.line([(0, 0), (1, 0)], width=0.1, fill=shade(base, 0.7))
    chips = rng.randint(8, 14)
    chip = pen.pick("chocolate", "chocolate", "cream", "red")
    pen.bits(chips, 0.8, 0.16, chip)


@food(kcal=270, most=2, spin=0.5)
def croissant(pen: Pen) -> None:
    """A bent roll in segments, thick in the middle."""
    rng = pen.rng
    base = pen.pick("baked")
    bend = rng.uniform(0.3, 1.25)
    segments = rng.randint(5, 8)
    places = [2 * i / (segments - 1) - 1 for i in range(segments)]  # -1 .. 1, from end to end
    places.sort(key=abs, reverse=True)  # the ends first: the middle lies on top
    for place in places:
        x = 0.76 * math.sin(place * 1.25)
        y = bend * (place * place - 0.4) * 0.62
        size = 0.44 - 0.24 * abs(place) ** 1.5
        light = rng.uniform(0.92, 1.08)
        turn = place * bend * 0.7
        pen.ball(x, y, size * 0.62, shade(base, light), ry=size, turn=turn)
        half = size * 0.7
        fold = [
            (x - 0.04, y - half),
            (x + 0.02, y),
            (x - 0.04, y + half),
        ]
        pen.line(fold, width=0.03, fill=shade(base, 0.72))


@food(kcal=620)
def curry_rice(pen: Pen) -> None:
    """Half rice, half curry with chunks."""
    rng = pen.rng
    rice = pen.pick("cream")
    curry = pen.pick("broth", "chocolate")
    pen.bowl(curry)
    turn = rng.uniform(0, 6)
    half = pen.at(0, 0, scale=1, turn=turn)
    edge = rng.uniform(-0.1, 0.25)  # where the rice ends
    middle = -0.3 - edge / 2
    width = 0.56 - edge / 2
    heap = half.at(middle, 0, scale=width)
    heap.blob(0, 0, 1.0, shade(rice, 0.8), ry=1.5, turn=0, wobble=0.08)
    heap.blob(0, 0, 0.92, rice, ry=1.4, turn=0, wobble=0.08)
    heap.bits(45, 0.9, 0.08, rice)
    carrot = pen.pick("red")
    potato = pen.pick("cheese")
    meat = shade(curry, 0.55)
    peas = pen.pick("green")
    chunks = [carrot, potato, meat, peas]
    for _ in range(rng.randint(5, 10)):
        x = rng.uniform(edge + 0.05, 0.62)
        y = rng.uniform(-0.55, 0.55)
        size = rng.uniform(0.08, 0.15)
        fill = rng.choice(chunks)
        turn = rng.uniform(0, 3)
        half.ball(x, y, size, fill, ry=size * 0.8, turn=turn)
    herbs = rng.randint(0, 8)
    pen.bits(herbs, 0.6, 0.05, pen.pick("green"))


@food(kcal=300, most=2)
def donut(pen: Pen) -> None:
    """A ring under wavy icing, with sprinkles or stripes."""
    rng = pen.rng
    base = pen.pick("baked")
    icing = pen.pick("pink", "pink", "chocolate", "cream", "any")
    sweets = [pen.pick("any") for _ in range(3)]
    hole = rng.uniform(0.22, 0.34)
    style = rng.choice(("sprinkles", "stripes", "plain"))
    layers = [  # radius, colour and how far the outline wavers
        (1.0, shade(base, 0.72), 0.02),
        (0.94, base, 0.02),
        (0.82, shade(icing, 0.88), 0.05),
        (0.76, icing, 0.05),
    ]
    for radius, fill, wobble in layers:
        x = 0.03 * radius - 0.03
        y = 0.04 * radius - 0.04
        pen.blob(x, y, radius, fill, wobble=wobble)
    pen.line(arc(0.6, start=3.4, stop=4.6), width=0.1, fill=shade(icing, 1.25))
    if style == "sprinkles":
        pen.bits(26, 0.74, 0.075, *sweets, inner=hole + 0.1, slim=0.4)
    elif style == "stripes":
        zigzag = []
        for i in range(11):
            x = 0.7 * math.cos(i * 2.5)
            y = -0.66 + 0.13 * i
            zigzag.append((x, y))
        pen.line(zigzag, width=0.06, fill=sweets[0])
    pen.blob(0, 0, hole + 0.06, shade(base, 0.85))
    pen.blob(0.02, 0.02, hole, pen.pick("chocolate", "metal"))


@food(kcal=330, most=3, spin=0.5)
def dumplings(pen: Pen) -> None:
    """A half moon of pale or fried dough with pleats."""
    rng = pen.rng
    dough = pen.pick("cream", "cream", "baked")
    pleats = rng.randint(5, 9)
    lowered = pen.at(0, 0.3)
    for radius, light in ((1.0, 0.75), (0.94, 1.0)):
        upper = arc(radius, start=math.pi, stop=2 * math.pi, squash=0.9)
        lower = arc(radius, start=0, stop=math.pi, squash=0.2)
        lowered.shape(upper + lower, shade(dough, light))
    lowered.blob(0, -0.26, 0.62, shade(dough, 1.1), ry=0.3)
    for i in range(pleats):
        angle = math.pi * (1 + (i + 0.5) / pleats)
        pleat = []
        for radius, shift in ((1.0, 0), (0.82, 0.06), (0.66, 0.02)):
            x, y = polar(radius, angle + shift)
            pleat.append((x, y * 0.88))
        dark = shade(dough, 0.7)
        lowered.line(pleat, width=0.06, fill=dark)
    if rng.random() < 0.5:
        lowered.blob(0, 0.02, 0.72, pen.pick("baked"), ry=0.13)


@food(kcal=190, most=2, spin=0.5)
def fried_egg(pen: Pen) -> None:
    """A ragged white with one or two shiny yolks."""
    rng = pen.rng
    white = pen.pick("cream")
    yolk = pen.pick("yolk")
    is_fried = rng.random() < 0.5
    rim = pen.pick("baked") if is_fried else shade(white, 0.8)
    pen.blob(0, 0, 0.96, rim, wobble=0.13)
    pen.blob(0, 0, 0.86, white, wobble=0.13)
    yolks = rng.choice((1, 1, 1, 2))
    for x, y in pen.spots(yolks, reach=0.35):
        radius = rng.uniform(0.3, 0.4)
        pen.ball(x, y, radius, yolk)
        pen.blob(x - 0.1, y - 0.12, 0.07, (255, 252, 235))  # its shine
    crumbs = rng.randint(0, 16)
    pepper = (40, 36, 34)
    pen.bits(crumbs, 0.7, 0.04, pepper, pen.pick("green"))


@food(kcal=360)
def fruit_tart(pen: Pen) -> None:
    """A crimped shell, custard, and fruit laid in rings."""
    rng = pen.rng
    base = pen.pick("baked")
    crimps = rng.randint(16, 30)
    rim = []
    for i in range(2 * crimps):
        radius = 0.93 + 0.07 * (i % 2)
        angle = math.pi * i / crimps
        rim.append(polar(radius, angle))
    pen.shape(rim, shade(base, 0.75))
    pen.blob(0, 0, 0.9, base)
    pen.blob(0, 0, 0.8, pen.pick("cream", "cheese"))
    fruits = [pen.pick("red", "red", "plum", "green", "broth") for _ in range(2)]
    size = rng.uniform(0.13, 0.2)
    slim = rng.uniform(0.55, 1.0)
    for ring, reach in enumerate((0.66, 0.36, 0.0)):
        gap = rng.uniform(1, 1.3)
        width = size * slim * gap  # that a fruit takes of the ring
        count = max(1, int(math.pi * reach / width))
        fruit = fruits[ring % 2]
        for i in range(count):
            angle = 2 * math.pi * i / count + ring
            x, y = polar(reach, angle)
            pen.ball(x, y, size, fruit, ry=size * slim, turn=angle)


@food(kcal=250)
def ice_cream(pen: Pen) -> None:
    """One to three scoops in a cone or a cup."""
    rng = pen.rng
    base = pen.pick("baked", "baked", "baked", "pink")
    scoops = rng.randint(1, 3)
    width = rng.uniform(0.34, 0.46)  # half of the cone's, at its rim
    tip = rng.choice((0.0, 0.0, 0.7)) * width  # half of its width below; a cup has one
    bottom = 1 - tip / 2
    pen.shape([(-width, 0), (width, 0), (tip, bottom), (-tip, bottom)], base)
    if not tip:
        _draw_waffle(pen, width, shade(base, 0.7))
    rim = width * 1.08
    pen.shape(box(-rim, -0.02, rim, 0.12), shade(base, 0.8))
    places: list[list[Point]] = [
        [(0.0, -0.2)],
        [(0.0, -0.16), (0.03, -0.68)],
        [(-0.28, -0.16), (0.28, -0.16), (0.0, -0.62)],
    ]
    for x, y in places[scoops - 1]:
        flavour = pen.pick("pink", "pink", "cream", "chocolate", "green", "any")
        melted_y = y + width * 0.62
        melted = shade(flavour, 0.9)
        pen.blob(x, melted_y, width * 1.05, melted, ry=width * 0.3, turn=0, wobble=0.2)
        pen.ball(x, y, width, flavour)
        scoop = pen.at(x, y, scale=width)
        bits = rng.choice((0, 8))
        crumb = pen.pick("any")
        scoop.bits(bits, 0.8, 0.1, crumb, pen.pick("chocolate"))


def _draw_waffle(pen: Pen, width: float, fill: Colour) -> None:
    """Draws the crossing lines of an ice cream's cone, half of whose rim is ``width`` wide, from its rim (y = 0) down."""
    for place in (-0.6, -0.2, 0.2, 0.6):
        start_x = place * width
        distance = 1 - abs(place)  # from the rim's end
        for lean in (-0.25, 0.25):
            stop_x = start_x * 0.4 + lean * distance * width
            start = (start_x, 0)
            stop = (stop_x, 0.55)
            pen.line([start, stop], width=0.03, fill=fill)


@food(kcal=380, most=5)
def kimbap(pen: Pen) -> None:
    """A slice of a seaweed roll: dark rim, rice, a colourful middle."""
    rng = pen.rng
    rim = pen.pick("seaweed")
    rice = pen.pick("cream")
    pen.blob(0.04, 0.1, 0.95, shade(rim, 0.7), ry=0.92)
    pen.blob(0, 0, 0.95, rim, ry=0.92)
    pen.blob(0, 0, 0.83, rice, ry=0.8)
    pen.bits(24, 0.76, 0.07, rice)
    fillings = rng.randint(4, 7)
    for x, y in pen.spots(fillings, reach=0.34):
        size = rng.uniform(0.13, 0.22)
        turn = rng.uniform(0, 3)
        fill = pen.pick("red", "green", "baked", "cheese")
        cube = pen.at(x, y, scale=size, turn=turn)
        cube.shape(box(-1, -1, 1, 1), fill)


@food(kcal=520)
def pancakes(pen: Pen) -> None:
    """A stack of discs, with syrup and butter or berries on top."""
    rng = pen.rng
    base = pen.pick("baked")
    count = rng.randint(2, 6)
    step = rng.uniform(0.12, 0.18)  # from one pancake to the next
    flat = rng.uniform(0.4, 0.75)
    syrup = pen.pick("chocolate", "broth", "red")
    # How far below its middle, how large, and in which colour each part of a pancake is.
    layers = [
        (0.8, 1, shade(base, 0.62)),
        (0.3, 1, (222, 206, 168)),
        (0, 1, base),
        (0, 0.88, shade(base, 0.9)),
    ]
    for i in range(count):
        y = step * (count / 2 - i)
        x = rng.uniform(-0.06, 0.06)
        radius = rng.uniform(0.78, 0.9)
        for down, size, fill in layers:
            rx = radius * size
            pen.blob(x, y + step * down, rx, fill, ry=rx * flat)

    top = pen.at(0, step * (1 - count / 2))
    if rng.random() < 0.7:
        top.blob(0, 0, 0.5, syrup, ry=0.5 * flat, turn=0, wobble=0.2)
        left = rng.uniform(-0.7, 0)
        right = rng.uniform(0, 0.7)
        for x in (left, right):
            end = 0.5 * flat + rng.uniform(0.1, 0.4)
            top.line([(x * 0.5, 0), (x, 0.5 * flat), (x, end)], width=0.1, fill=syrup)
    if rng.random() < 0.7:
        x = rng.uniform(-0.15, 0.15)
        turn = rng.uniform(-0.5, 0.5)
        butter = top.at(x, -0.08, scale=0.2, turn=turn)
        butter.shape(box(-1, -0.6, 1, 0.8), (214, 178, 84))
        butter.shape(box(-0.95, -0.6, 0.95, 0.3), (250, 226, 130))
    else:
        berries = top.at(0, 0, scale=1, turn=0, squash=flat)
        count = rng.randint(4, 9)
        berries.bits(count, 0.45, 0.13, pen.pick("red", "plum"), slim=1.2)


@food(kcal=700)
def pizza(pen: Pen) -> None:
    """Crust, sauce, melted cheese and toppings; whole, cut, or with slices gone."""
    rng = pen.rng
    base = pen.pick("baked")
    meat = pen.pick("red")
    size = rng.uniform(0.09, 0.16)
    start = rng.uniform(0, 6)
    gone = rng.choice((0.0, 0.0, 0.8, 1.6, 5.2))  # the angle that was eaten
    layers = [
        (1.0, shade(base, 0.8)),
        (0.96, base),
        (0.84, pen.pick("red")),
        (0.8, pen.pick("cheese")),
    ]
    for radius, fill in layers:
        outline = arc(radius, start=start + gone, stop=start + 2 * math.pi)
        if gone > 0:
            outline.insert(0, (0.0, 0.0))
        pen.shape(outline, fill)
    kinds = rng.sample(("disc", "leaf", "olive", "patch"), 2)
    for _ in range(rng.randint(9, 18)):
        radius = 0.72 * rng.random() ** 0.5
        angle = rng.uniform(start + gone + 0.1, start + 6.2)
        kind = rng.choice(kinds)
        x, y = polar(radius, angle)
        topping = pen.at(x, y, scale=size, turn=angle)
        if kind == "disc":
            topping.ball(0, 0, 1, meat)
        elif kind == "leaf":
            topping.blob(0, 0, 1.2, pen.pick("green"), ry=0.5)
        elif kind == "olive":
            topping.blob(0, 0, 0.6, (45, 40, 45))
            topping.blob(0, 0, 0.25, (170, 140, 90))
        else:
            topping.blob(0, 0, 1.3, pen.pick("cream"), ry=1, turn=0, wobble=0.15)
    for i in range(rng.choice((0, 8))):
        cut = start + gone + i * (6.283 - gone) / 8
        pen.line([(0, 0), polar(1, cut)], width=0.025, fill=shade(base, 0.6))


@food(kcal=550)
def ramen(pen: Pen) -> None:
    """Wavy noodles in broth with egg, seaweed or meat."""
    rng = pen.rng
    noodle = pen.pick("cream", "cheese")
    direction = rng.uniform(0, 6)
    pen.bowl(pen.pick("broth", "broth", "chocolate", "red"))
    noodles = rng.randint(12, 20)
    for x, y in pen.spots(noodles, reach=0.4):
        bend = rng.uniform(0.04, 0.12)
        turn = direction + rng.uniform(-0.6, 0.6)
        here = pen.at(x, y, scale=1, turn=turn)
        wave = []
        for i in range(13):
            height = bend * math.sin(i * 1.1)
            wave.append((-0.42 + 0.07 * i, height))
        here.line(wave, width=0.075, fill=shade(noodle, 0.7))
        here.line(wave, width=0.045, fill=noodle)
    count = rng.randint(0, 3)
    toppings = rng.sample(("egg", "nori", "meat"), count)
    for i, kind in enumerate(toppings):
        angle = direction + 2.1 * i
        x, y = polar(0.55, angle)
        size = rng.uniform(0.23, 0.32)
        topping = pen.at(x, y, scale=size, turn=angle)
        if kind == "egg":
            topping.blob(0, 0, 1, pen.pick("cream"), ry=0.78)
            topping.blob(0, 0, 0.52, pen.pick("yolk"))
        elif kind == "nori":
            topping.shape(box(-0.8, -0.7, 1.2, 0.7), pen.pick("seaweed"))
        else:
            topping.ball(0, 0, 1, pen.pick("skin"), ry=0.65)
    onions = rng.randint(0, 14)
    pen.bits(onions, 0.6, 0.06, pen.pick("green"))


@food(kcal=240)
def salad(pen: Pen) -> None:
    """Torn leaves with slices and wedges in between."""
    rng = pen.rng
    if rng.random() < 0.5:
        pen.bowl(shade(pen.pick("green"), 0.7))
    leaves = rng.randint(16, 26)
    for x, y in pen.spots(leaves, reach=0.7):
        if rng.random() < 0.8:
            green = pen.pick("green")
            light = rng.uniform(0.7, 1.3)
            fill = shade(green, light)
        else:
            fill = pen.pick("plum", "chocolate")
        size = rng.uniform(0.18, 0.34)
        turn = rng.uniform(0, 6)
        leaf = pen.at(x, y, scale=size, turn=turn)
        leaf.blob(0, 0, 1, fill, ry=0.6, turn=0, wobble=0.2)
        leaf.line([(-0.9, 0), (0.9, 0)], width=0.1, fill=shade(fill, 1.35))
    pieces = rng.randint(3, 9)
    for x, y in pen.spots(pieces, reach=0.6):
        size = rng.uniform(0.14, 0.24)
        turn = rng.uniform(0, 6)
        here = pen.at(x, y, scale=size, turn=turn)
        kind = rng.choice(("wedge", "cube", "slice"))
        fill = pen.pick("red", "green")
        if kind == "wedge":
            here.shape(arc(1, start=0, stop=math.pi), fill)
            here.shape(arc(0.6, start=0.3, stop=math.pi - 0.3), shade(fill, 1.3))
        elif kind == "cube":
            here.shape(box(-1, -0.8, 1, 0.8), pen.pick("cream", "baked"))
        else:
            here.blob(0, 0, 1, fill)
            inside = pen.pick("cream") if rng.random() < 0.5 else shade(fill, 1.15)
            here.blob(0, 0, 0.8, inside)


@food(kcal=210)
def soup(pen: Pen) -> None:
    """Smooth liquid with a swirl of cream, croutons, herbs or drops of oil."""
    rng = pen.rng
    fill = pen.pick("red", "broth", "green", "cheese")
    bread = pen.pick("baked")
    pen.bowl(fill)
    if rng.random() < 0.65:
        turn = rng.uniform(0, 6)
        steps = rng.randint(15, 36)
        cream = pen.pick("cream") if rng.random() < 0.6 else shade(fill, 0.6)
        swirl = []
        for i in range(2, steps):
            angle = 0.3 * i + turn
            radius = 0.055 * (0.3 * i)
            swirl.append(polar(radius, angle))
        pen.line(swirl, width=0.07, fill=cream)
    some = rng.randint(3, 8)
    croutons = rng.choice((0, some))
    for x, y in pen.spots(croutons, reach=0.55):
        turn = rng.uniform(0, 3)
        cube = pen.at(x, y, scale=0.11, turn=turn)
        cube.shape(box(-1, -1, 1, 1.3), shade(bread, 0.75))
        cube.shape(box(-1, -1, 1, 0.7), bread)
    some = rng.randint(5, 16)
    herbs = rng.choice((0, some))
    pen.bits(herbs, 0.7, 0.06, pen.pick("green"))
    some = rng.randint(5, 12)
    drops = rng.choice((0, some))
    light = shade(fill, 1.3)
    dark = shade(fill, 0.75)
    pen.bits(drops, 0.75, 0.08, light, dark)


@food(kcal=400)
def sushi(pen: Pen) -> None:
    """Nigiri: pads of rice under fish, side by side."""
    rng = pen.rng
    count = rng.randint(2, 4)
    tilt = rng.uniform(-0.4, 0.4)
    has_belt = rng.random() < 0.3
    usual_fish = pen.pick("red")
    other_fish = pen.pick("cream", "cheese", "red")
    rice = pen.pick("cream")
    width = 0.68 / count  # half of a pad's
    for i in range(count):
        x = (i - (count - 1) / 2) * 1.72 / count
        y = rng.uniform(-0.06, 0.06)
        turn = tilt + rng.uniform(-0.15, 0.15)
        here = pen.at(x, y, scale=1, turn=turn)
        fish = other_fish if rng.random() < 0.4 else usual_fish
        here.blob(0.03, 0.1, width * 1.08, shade(rice, 0.6), ry=0.66)
        here.blob(0, 0.06, width, rice, ry=0.62)
        here.blob(0, -0.04, width * 1.05, shade(fish, 0.8), ry=0.55)
        here.blob(-0.02, -0.07, width * 0.95, fish, ry=0.5)
        for stripe in range(rng.randint(0, 5)):
            stripe_y = -0.45 + 0.2 * stripe
            points = [
                (-width * 0.8, stripe_y),
                (0, stripe_y + 0.1),
                (width * 0.8, stripe_y - 0.02),
            ]
            here.line(points, width=0.035, fill=shade(fish, 1.3))
        if has_belt:
            here.shape(box(-width, -0.1, width, 0.08), (34, 42, 40))


@food(kcal=450, most=2, spin=0.3)
def taco(pen: Pen) -> None:
    """A folded shell with a filling along the open edge."""
    rng = pen.rng
    shell = pen.pick("baked")
    lowered = pen.at(0, 0.3)
    names = rng.sample(("green", "red", "chocolate", "cream", "cheese"), 3)
    fills = [pen.pick(name) for name in names]
    rear = arc(1.0, start=math.pi, stop=2 * math.pi, squash=0.95)
    lowered.shape(rear, shade(shell, 0.7))
    for i in range(19):
        angle = math.pi * (1 + i / 18)
        radius = rng.uniform(0.86, 1.02)
        size = rng.uniform(0.1, 0.19)
        fill = rng.choice(fills)
        x, y = polar(radius, angle)
        lowered.blob(x, y * 0.92, size, fill, ry=0.1, turn=angle, wobble=0.15)
    front = arc(0.92, start=math.pi, stop=2 * math.pi, squash=0.85)
    lit = arc(0.7, start=math.pi, stop=2 * math.pi, squash=0.7)
    lowered.shape(front, shell)
    lowered.shape(lit, shade(shell, 1.1))
    for _ in range(7):
        x = rng.uniform(-0.6, 0.6)
        y = rng.uniform(-0.5, -0.05)
        lowered.blob(x, y, 0.05, shade(shell, 0.75))


CLASSES = tuple(entry.name for entry in FOODS)
"""The names of the foods, by label."""
