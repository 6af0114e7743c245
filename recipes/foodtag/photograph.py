"""A whole picture: the table, the shadow, the dish with its food, what lies in front, and the camera."""

import math
import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from .dishes import FOODS
from .pen import Pen, box, pick_colour, polar, shade

VERSION = "v1"
"""Part of the data folder's name; to be raised whenever a change alters the pictures."""
SIZE = 80
"""Side of a picture in pixels: room for random crops, small enough to draw thousands in seconds."""

_CANVAS = 2 * SIZE  # drawn at twice the size, then halved
_SPREAD = 0.2  # how far pose, light, focus and clutter vary, 0 .. 1; low, so that a small ViT learns in two minutes
_PORTIONS = (0.55, 1.05)  # smallest and largest side of a portion, as a multiple of the usual one's
_SHADOW = (20, 16, 14)

# Coordinates of all pixels: of the canvas in pixels, of the finished picture from -1 to 1.
_ROWS, _COLUMNS = np.mgrid[:_CANVAS, :_CANVAS].astype(np.float32)
_HEIGHTS, _WIDTHS = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j].astype(np.float32)


def portion_of(label: int, seed: int) -> float:
    """The side of a portion as a multiple of the usual one's, 0.55 to 1.05, in a set that varies it."""
    return random.Random(f"{VERSION}/portion/{label}/{seed}").uniform(*_PORTIONS)


def calories_of(label: int, seed: int) -> float:
    """The calories of the portion of :func:`portion_of`, in kcal: those of a usual portion times its area (side squared)."""
    return FOODS[label].kcal * portion_of(label, seed) ** 2


def draw(label: int, seed: int, portion: float = 1.0) -> Image.Image:
    """One photograph of a food, ``SIZE`` x ``SIZE`` pixels in RGB.

    Args:
        label: index into :data:`~foodtag.dishes.CLASSES`.
        seed: the same (label, seed, portion) gives the same pixels, whoever else draws random numbers.
        portion: side of the food, as a multiple of the usual one; the dish below it stays.
    """
    rng = random.Random(f"{VERSION}/{label}/{seed}")
    noise = np.random.RandomState(rng.getrandbits(32))
    image = _table(rng, noise)

    # Where the dish lies, and how large it is, in pixels of the canvas.
    size_share = 0.42 + 0.12 * _SPREAD * rng.uniform(-1, 0.5)
    x_share = 0.5 + 0.14 * _SPREAD * rng.uniform(-1, 1)
    y_share = 0.5 + 0.14 * _SPREAD * rng.uniform(-1, 1)
    size = _CANVAS * size_share
    matrix = (size, 0, _CANVAS * x_share, 0, size, _CANVAS * y_share)
    frame = Pen(image, rng, matrix)

    if rng.random() < 0.3 * _SPREAD:
        _neighbours_plate(frame)
    _shadow(frame)

    # The camera's point of view turns and flattens the dish.
    turn = rng.uniform(-0.3, 0.3)
    lean = rng.uniform(-0.45, 0.45)
    squash = rng.uniform(0, 0.32)
    height = 1 - _SPREAD * squash
    turned = frame.at(0, 0, scale=1, turn=_SPREAD * turn, squash=height)
    view = turned.at(0, 0, scale=1, turn=_SPREAD * lean)
    _dish(view)
    if portion != 1.0:
        view = view.at(0, 0, scale=portion)
    FOODS[label].draw(view)

    if rng.random() < _SPREAD:
        _clutter(frame)
    return _camera(image, rng, noise)


def _clouds(noise: np.random.RandomState, cells: int, rows: int = 0) -> np.ndarray:
    """Smooth noise of about ±1 over the canvas, float32 ``(_CANVAS, _CANVAS)``.

    Args:
        noise: draws a normal number for each cell.
        cells: across the canvas.
        rows: of cells; 0: as many. Fewer than ``cells`` stretch the clouds into vertical bands.
    """
    coarse = noise.standard_normal((rows or cells, cells)).astype(np.float32)
    smooth = Image.fromarray(coarse).resize((_CANVAS, _CANVAS), Image.Resampling.BICUBIC)
    return np.asarray(smooth)


def _table(rng: random.Random, noise: np.random.RandomState) -> Image.Image:
    """The canvas with a table on it: wood, cloth, marble, tiles, speckled stone or plain; RGB, twice a picture's sides.

    Args:
        rng: draws kind, colour and pattern.
        noise: draws the grain.
    """
    colour = pick_colour(rng, "metal", "metal", "skin", "chocolate", "any")
    angle = rng.uniform(0, math.pi)
    pitch = rng.uniform(12, 40)  # pixels from stripe to stripe
    cos = math.cos(angle)
    sin = math.sin(angle)
    u = _COLUMNS * cos + _ROWS * sin  # along the pattern
    v = _ROWS * cos - _COLUMNS * sin  # across it
    kind = rng.choice(("wood", "cloth", "stripes", "marble", "tiles", "stone", "plain"))
    if kind == "wood":
        bend = 3 * _clouds(noise, cells=5)
        grain = 0.1 * np.sin(v / 2.2 + bend)
        grain = grain + 0.08 * _clouds(noise, cells=24, rows=4)
        joints = v % (pitch + 14) < 2  # between the boards
        grain -= 0.35 * joints
        pattern = grain
    elif kind == "cloth":
        warp = np.sign(np.sin(u * 6.28 / pitch))
        weft = np.sign(np.sin(v * 6.28 / pitch))
        pattern = 0.16 * (warp + weft)
    elif kind == "stripes":
        contrast = rng.uniform(0.1, 0.35)
        stripes = np.sign(np.sin(u * 6.28 / pitch))
        pattern = contrast * stripes
    elif kind == "marble":
        large = _clouds(noise, cells=6)
        small = _clouds(noise, cells=14)
        veins = np.abs(large + 0.4 * small)
        pattern = -0.4 * np.exp(-6 * veins)
    elif kind == "tiles":
        joints = (u % pitch < 2.5) | (v % pitch < 2.5)
        sign = rng.choice((-1, 1))
        lines = 0.3 * joints * sign
        pattern = lines + 0.05 * _clouds(noise, cells=10)
    else:
        contrast = 0.13 if kind == "stone" else 0.03
        speckles = contrast * _clouds(noise, cells=70)
        pattern = speckles + 0.08 * _clouds(noise, cells=6)
    light = 1 + _SPREAD * pattern[..., None]
    pixels = np.array(colour, np.float32) * light
    pixels = np.clip(pixels, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def _neighbours_plate(frame: Pen) -> None:
    """Another plate, whose rim is darker than its middle, in any direction from the dish; a few per cent of the picture.

    Its middle is outside: ``frame`` has the dish as its unit disc, and the picture ends some 1.2 from there at a side,
    1.7 in a corner. In a corner more of it is seen than at a side, where it may lie outside as a whole.
    """
    angle = frame.rng.uniform(0, 6.28)
    fill = frame.pick("any", "cream")
    for radius in (0.7, 0.55):
        x, y = polar(1.9, angle)
        frame.blob(x, y, radius, shade(fill, 1.3 - radius / 2))


def _shadow(frame: Pen) -> None:
    """Draws the soft shadow of the dish on the table; ``frame`` has the dish as its unit disc."""
    rng = frame.rng
    dx = rng.uniform(-0.2, 0.2)
    dy = rng.uniform(0.0, 0.25)
    upper_left = (dx - 1.1, dy - 1.0)
    lower_right = (dx + 1.1, dy + 1.0)
    darkness = rng.randint(40, 150)
    mask = Image.new("L", frame.image.size, 0)
    ellipse = ImageDraw.Draw(mask)
    ellipse.ellipse(frame.pixels([upper_left, lower_right]), fill=darkness)
    soft = mask.filter(ImageFilter.BoxBlur(8))
    frame.image.paste(_SHADOW, (0, 0), soft)


def _dish(pen: Pen) -> None:
    """Draws what the food lies on, a little larger than the pen's unit disc: a plate, a board, a tray or nothing."""
    fill = pen.pick("cream", "cream", "cream", "chocolate", "metal", "any")
    size = pen.rng.uniform(1.12, 1.45)
    kind = pen.rng.choice(("none", "plate", "plate", "plate", "board", "tray"))
    if kind == "none":
        return
    if kind == "plate":
        for radius, light in ((1.0, 0.78), (0.97, 1.0), (0.76, 0.86), (0.74, 0.97)):
            pen.blob(0, 0, size * radius, shade(fill, light), wobble=0)
        return
    turn = pen.rng.uniform(-0.5, 0.5)
    squash = pen.rng.uniform(0.7, 1)
    here = pen.at(0, 0, scale=size, turn=turn, squash=squash)
    if kind == "board":
        layers = [(1.0, 0.8), (0.95, 1.0)]
    else:
        layers = [(1.0, 1.0), (0.9, 0.8), (0.86, 0.9)]
    for half, light in layers:
        here.shape(box(-half, -half, half, half), shade(fill, light))


def _clutter(pen: Pen) -> None:
    """Draws something in front, over a part of the food: a fork, chopsticks, leaves, drops of sauce, fingers, a napkin; or
    (two times of eight) nothing.
    """
    rng = pen.rng
    kind = rng.choice(("fork", "sticks", "leaf", "sauce", "hand", "napkin", "none", "none"))
    turn = rng.uniform(0, 6.28)
    distance = rng.uniform(0.25, 0.75)
    turned = pen.at(0, 0, scale=1, turn=turn)
    here = turned.at(distance, 0)
    if kind == "fork":
        metal = pen.pick("metal")
        here.line([(0.3, -0.1), (2.5, 0.15)], width=0.1, fill=metal)
        for prong in (-1, 0, 1):
            tip = (-0.15, 0.09 * prong - 0.12)
            root = (0.32, 0.07 * prong - 0.1)
            here.line([tip, root], width=0.045, fill=metal)
    elif kind == "sticks":
        for y in (-0.1, 0.1):
            fill = pen.pick("chocolate", "red", "baked")
            here.line([(-0.4, y), (2.5, 2.2 * y)], width=0.07, fill=fill)
    elif kind == "leaf":
        count = rng.randint(1, 4)
        here.bits(count, 0.6, 0.24, pen.pick("green"), slim=0.45)
    elif kind == "sauce":
        count = rng.randint(1, 4)
        fill = pen.pick("broth", "cheese", "chocolate", "green", "red")
        here.bits(count, 0.6, 0.16, fill, slim=0.9)
    elif kind == "hand":
        skin = pen.pick("skin")
        fingers = rng.randint(1, 3)
        for finger in range(fingers):
            x = 0.2 + 0.05 * finger
            y = 0.25 * finger
            end = (2.5, 0.1 + 0.3 * finger)
            here.line([(x, y), end], width=0.24, fill=shade(skin, 0.85))
            here.ball(x, y, 0.13, skin)
    elif kind == "napkin":
        corners = [(0.35, -1.5), (2.5, -1.2), (2.5, 1.6), (0.2, 1.1)]
        here.shape(corners, pen.pick("any"))


def _camera(image: Image.Image, rng: random.Random, noise: np.random.RandomState) -> Image.Image:
    """The finished picture, RGB ``SIZE`` x ``SIZE``, after light and camera: focus, colours, vignette, shadow, noise.

    Args:
        image: RGB, twice as large as the result.
        rng: draws the strengths, and the light's direction and shadow, in a fixed order.
        noise: draws the clouds of the light, then the noise of the sensor.
    """
    # Focus, size, saturation.
    blur = 1.8 * _SPREAD * rng.random()
    radius = rng.choice((0.0, 0.0, blur))
    image = image.filter(ImageFilter.GaussianBlur(radius))
    image = image.reduce(2)
    saturation = 1 + 0.5 * _SPREAD * rng.uniform(-1, 0.5)
    image = ImageEnhance.Color(image).enhance(saturation)

    # Light from one side, and what is drawn with it.
    angle = rng.uniform(0, 6.28)
    warmth = 0.22 * _SPREAD * rng.uniform(-1, 1)
    grain = 0.05 * _SPREAD * rng.random()
    light = _light(angle, rng, noise)

    # Exposure, colour temperature, contrast, noise of the sensor.
    exposure = 1.05 + 0.3 * _SPREAD * rng.uniform(-1, 1)
    tint = rng.uniform(-0.06, 0.06)
    red_green_blue = (1 + warmth, 1 + tint, 1 - warmth)
    colour = np.array(red_green_blue, np.float32)
    gain = exposure * colour
    light_HW1 = light[..., None]
    pixels = np.asarray(image, dtype=np.float32) / 255
    pixels = pixels * light_HW1 * gain
    gamma = 0.95 + 0.25 * _SPREAD * rng.uniform(-1, 1)
    pixels = np.clip(pixels, 0, 1)
    # in float64: numpy's power of float32 differs by the CPU (AVX-512), that of float64 rounds to the same float32
    power = pixels.astype(np.float64) ** np.float64(np.float32(gamma))
    pixels = power.astype(np.float32)
    sensor_noise = noise.standard_normal(pixels.shape).astype(np.float32)
    pixels += grain * sensor_noise
    pixels = np.clip(pixels, 0, 1) * 255
    return Image.fromarray(pixels.astype(np.uint8))


def _light(angle: float, rng: random.Random, noise: np.random.RandomState) -> np.ndarray:
    """How bright each pixel is lit, ``(SIZE, SIZE)`` of about 1: from one side (``angle`` in radians), with a vignette,
    clouds, and perhaps the edge of a shadow.
    """
    side = _WIDTHS * math.cos(angle) + _HEIGHTS * math.sin(angle)
    squared_distance = _WIDTHS * _WIDTHS + _HEIGHTS * _HEIGHTS  # from the centre
    slope = rng.uniform(0, 0.35)
    vignette = rng.uniform(0, 0.35)
    from_side = slope * side - vignette * squared_distance
    light = 1 + _SPREAD * from_side
    cloudiness = _SPREAD * rng.uniform(0, 0.12)
    clouds = _clouds(noise, cells=6)[::2, ::2]
    light += cloudiness * clouds
    if rng.random() < 0.3 * _SPREAD:
        edge = rng.uniform(-0.6, 0.6)
        darkness = rng.uniform(0.45, 0.8)
        light *= np.where(side > edge, darkness, 1)
    return light
