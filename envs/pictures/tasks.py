"""The pictures: a square of one colour at a random place, on a background of some grey."""

import base64
import io
from random import Random

from PIL import Image

SIDE, SQUARE = 56, 42
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}


def load(split: str, seed: int, num_tasks: int = 600) -> list[dict[str, str]]:
    """Return tasks with a picture as a data URL, and the name of the square's colour."""
    random = Random(f"{seed}/{split}")
    return [_task(f"{split}-{index}", random) for index in range(num_tasks)]


def _task(name: str, random: Random) -> dict[str, str]:
    colour = random.choice(list(COLOURS))
    return {"id": name, "picture": url_of(draw(colour, random)), "colour": colour}


def draw(colour: str, random: Random) -> bytes:
    """Return a PNG."""
    picture = Image.new("RGB", (SIDE, SIDE), (random.randint(90, 170),) * 3)
    left, top = (random.randint(0, SIDE - SQUARE) for _ in range(2))
    picture.paste(COLOURS[colour], (left, top, left + SQUARE, top + SQUARE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def url_of(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
