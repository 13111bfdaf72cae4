"""Pictures of digits in matplotlib's fonts: a data set that needs no download."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_by_hand.measure.extras import require

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

FONTS = (
    "DejaVuSans*[!y]",
    "DejaVuSerif*[!y]",
    "STIXGeneral*",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)
GLYPH = 40  # pixels of a glyph's picture, before it is turned and scaled


def font_digits(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns pictures [count, 3, size, size] float32 of about unit variance, and digits [count].

    Each is one glyph, turned by up to 25°, sheared, scaled and moved, in a light colour on a dark
    one, with noise. The same seed gives the same pictures on one version of matplotlib.
    """
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=draw)

    glyphs = _glyphs()
    digits = torch.randint(10, (count,), generator=draw)
    fonts = torch.randint(len(glyphs), (count,), generator=draw)
    angle, shear, zoom = uniform(-0.44, 0.44), uniform(-0.3, 0.3), uniform(0.65, 1.1)
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    moves = uniform(-0.25, 0.25, 2)
    affine = torch.stack([cos, shear * cos - sin, moves[:, 0], sin, shear * sin + cos, moves[:, 1]])
    grid = F.affine_grid(affine.t().view(count, 2, 3), [count, 1, size, size], align_corners=False)
    ink = F.grid_sample(glyphs[fonts, digits].unsqueeze(1), grid, align_corners=False)
    paper, colour = uniform(-1, -0.2, 3, 1, 1), uniform(0.2, 1, 3, 1, 1)
    noise = 0.15 * torch.randn(count, 3, size, size, generator=draw)
    return torch.lerp(paper, colour, ink).add_(noise).mul_(1.5), digits


def _glyphs() -> Tensor:
    """Returns the digits of each font, centred: [fonts, 10, GLYPH, GLYPH] from 0 to 1."""
    require("matplotlib")
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = []
    for path in sorted(path for name in FONTS for path in folder.glob(f"{name}.ttf")):
        font = FT2Font(str(path))
        font.set_size(GLYPH * 0.72, 72)
        found.append(torch.stack([_glyph(font, digit) for digit in "0123456789"]))
    return torch.stack(found)


def _glyph(font: "FT2Font", digit: str) -> Tensor:
    font.set_text(digit)
    font.draw_glyphs_to_bitmap(antialiased=True)
    image = torch.from_numpy(np.array(font.get_image(), dtype=np.float32) / 255)[:GLYPH, :GLYPH]
    rows, columns = (GLYPH - size for size in image.shape)
    return F.pad(image, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
