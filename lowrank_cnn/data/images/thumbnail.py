"""Small pictures of images, for records and reports."""

from __future__ import annotations

import base64
import io

from torch import Tensor

from lowrank_cnn.system.errors import MissingExtra, require

SIDE = 96
_QUALITY = 80


def thumbnail(pixels: Tensor | None, side: int = SIDE) -> str | None:
    """An image as a JPEG of at most `side` pixels in a data URI.

    None without pixels, without Pillow, and of images that are neither grey nor RGB.

    >>> import torch
    >>> thumbnail(torch.zeros(3, 8, 8, dtype=torch.uint8))[:23]
    'data:image/jpeg;base64,'
    """
    if pixels is None or pixels.shape[0] not in (1, 3):
        return None
    try:
        pillow = require("PIL.Image", extra="data", purpose="small pictures")
    except MissingExtra:
        return None
    rows = pixels.permute(1, 2, 0).squeeze(2) if pixels.shape[0] == 1 else pixels.permute(1, 2, 0)
    image, written = pillow.fromarray(rows.contiguous().cpu().numpy()), io.BytesIO()
    image.thumbnail((side, side))
    image.save(written, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
