"""Views of images: moved and mirrored copies."""

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 3  # pixels at most that a view is moved by


def views(images: Tensor) -> Tensor:
    """Returns each image [B, C, side, side] moved by up to `SHIFT` pixels, and mirrored or not."""
    count, channels, side, _ = images.shape
    down, right = torch.randint(2 * SHIFT + 1, (2, count, 1)).to(images.device)
    mirrored = torch.randint(2, (count, 1)).to(images.device) == 1
    place = torch.arange(side, device=images.device)
    rows = (down + place)[:, None, :, None]
    columns = (right + torch.where(mirrored, side - 1 - place, place))[:, None, None, :]
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return F.pad(images, [SHIFT] * 4, mode="reflect")[image, channel, rows, columns]
