"""Draws the boxes of detections on an image."""

from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

COLOURS = ("#e8833a", "#2f6fde", "#3f9b5a", "#b44fc4", "#d64545", "#1f9aa8")  # of classes, in turn
SMALLEST = 256  # pixels of the shorter side; smaller images are enlarged, so that names can be read


def draw_boxes(image: Image.Image, detections: Mapping[str, Tensor], classes: Sequence[str]) -> Image.Image:
    """A copy of an image with boxes, names and scores; images with a side below 256 pixels are enlarged."""
    factor = -(-SMALLEST // min(image.size))
    drawn = image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(drawn)
    font = ImageFont.load_default(size=max(12, min(drawn.size) // 40))
    boxes = (detections["boxes"] * factor).tolist()
    for box, label, score in zip(boxes, detections["labels"].tolist(), detections["scores"].tolist(), strict=True):
        colour = COLOURS[label % len(COLOURS)]
        left, top, right, bottom = box
        pen.rectangle((min(left, right), min(top, bottom), max(left, right), max(top, bottom)), outline=colour, width=2)
        text = f"{classes[label]} {100 * score:.0f} %"
        x0, y0, x1, y1 = pen.textbbox((left, top), text, font=font, anchor="lb")
        shift = max(0.0, -y0)  # a name above the image is moved into it
        pen.rectangle((x0, y0 + shift, x1, y1 + shift), fill=colour)
        pen.text((left, top + shift), text, fill="white", font=font, anchor="lb")
    return drawn
