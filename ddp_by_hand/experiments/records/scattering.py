"""The scattering transform of images: features without parameters.

Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013. With ψ_jθ a Morlet wavelet of
scale 2^j and angle θ, and φ a Gaussian of scale 2^J, an image x has the features

    x ∗ φ,    |x ∗ ψ_jθ| ∗ φ,    ||x ∗ ψ_jθ| ∗ ψ_kη| ∗ φ  with k > j,

each at every 2^J-th pixel. Wavelets, padding and the order of channels are those of kymatio 0.3,
which papers use; features differ from its by 0.1 % of the largest at most.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

REPEATS = 2  # a filter on a torus is the sum of so many shifted ones on each side


class Wavelet(NamedTuple):
    """A wavelet's scale exponent j and its Fourier transform [side, side], which is real."""

    scale: int
    spectrum: Tensor


class Scattering:
    """Computes scattering features of square images.

    Args:
        side: pixels of an image's side, a multiple of 2^J.
        scales: J.
        angles: number of angles θ.
        device: where images are.

    Raises:
        ValueError: the side is no multiple of 2^J.
    """

    def __init__(
        self, side: int, scales: int = 2, angles: int = 8, device: torch.device | str = "cpu"
    ) -> None:
        self.block = 2**scales
        if side % self.block:
            raise ValueError(
                f"side is {side}: give images whose side is a multiple of {self.block}, as by "
                "torch.nn.functional.pad"
            )
        self.padded = side + 2 * self.block
        self.channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        # A wavelet of the smallest scale has the width 0.8 pixels.
        self.average = _spectrum(_gaussian(self.padded, 0.8 * 2 ** (scales - 1))).to(device)
        self.wavelets = [
            Wavelet(j, _spectrum(_morlet(self.padded, j, angles, turn)).to(device))
            for j in range(scales)
            for turn in range(angles)
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """Returns features [B, C · channels, side / 2^J, side / 2^J] of images [B, C, side, side].

        The channels of a feature map are those of the first order scale by scale, angle by angle,
        and of the second order likewise below each of the first.
        """
        pads = [self.block] * 4
        spectrum = torch.fft.fft2(F.pad(images, pads, mode="reflect"))
        first, second = [], []
        found = [self._averaged(spectrum, 0)]
        for one in self.wavelets:
            inner = torch.fft.fft2(_modulus(spectrum * one.spectrum, one.scale))
            first.append(self._averaged(inner, one.scale))
            for other in self.wavelets:
                if other.scale > one.scale:
                    product = inner * _folded(other.spectrum, one.scale)
                    outer = _modulus(product, other.scale - one.scale)
                    second.append(self._averaged(torch.fft.fft2(outer), other.scale))
        return torch.stack([*found, *first, *second], 2).flatten(1, 2)

    def _averaged(self, spectrum: Tensor, scale: int) -> Tensor:
        """Returns the average at every 2^J-th pixel, without the padding."""
        factor = self.block >> scale
        product = spectrum * _folded(self.average, scale)
        return torch.fft.ifft2(_subsampled(product, factor)).real[..., 1:-1, 1:-1]


def scattered(images: Tensor, device: torch.device | str, batch: int = 1024) -> Tensor:
    """Returns the features of uint8 images [N, C, side, side], computed and kept on a device."""
    transform = Scattering(images.shape[-1], device=device)
    parts = images.split(batch if torch.device(device).type == "cuda" else 64)
    return torch.cat([transform(part.to(device).float() / 255) for part in parts])


def _modulus(spectrum: Tensor, scale: int) -> Tensor:
    """Returns |y| at every 2^scale-th pixel, of y whose spectrum this is."""
    return torch.fft.ifft2(_subsampled(spectrum, 2**scale)).abs()


def _subsampled(spectrum: Tensor, factor: int) -> Tensor:
    """Returns the spectrum of every `factor`-th pixel: frequencies that meet are averaged."""
    side = spectrum.shape[-1] // factor
    return spectrum.unflatten(-1, (factor, side)).unflatten(-3, (factor, side)).mean((-4, -2))


def _folded(spectrum: Tensor, scale: int) -> Tensor:
    """Returns the spectrum of a filter for images of which every 2^scale-th pixel is left."""
    return _subsampled(spectrum, 2**scale) * 4**scale


def _spectrum(kernel: Tensor) -> Tensor:
    return torch.fft.fft2(kernel).real.float()  # a filter and its mirror image are conjugates


def _morlet(side: int, scale: int, angles: int, turn: int) -> Tensor:
    """Returns a Morlet wavelet [side, side] of mean 0: a wave under a Gaussian, less a Gaussian."""
    theta = (angles - angles // 2 - 1 - turn) * math.pi / angles
    shape = (side, 0.8 * 2**scale, theta, 4 / angles)
    wave = _gaussian(*shape, frequency=0.75 * math.pi / 2**scale)
    envelope = _gaussian(*shape)
    return wave - wave.sum() / envelope.sum() * envelope


def _gaussian(
    side: int, width: float, theta: float = 0.0, slant: float = 1.0, frequency: float = 0.0
) -> Tensor:
    """Returns a Gaussian on a torus [side, side], times a wave along the angle θ.

    Its width is `width` pixels along θ, and width / slant across.
    """
    offsets = torch.arange(-REPEATS, REPEATS + 1, dtype=torch.float64)[:, None] * side
    places = (torch.arange(side, dtype=torch.float64) + offsets).flatten()
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    along = math.cos(theta) * rows + math.sin(theta) * columns
    across = math.cos(theta) * columns - math.sin(theta) * rows
    height = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
    kernel = torch.polar(height, frequency * along)
    copies = 2 * REPEATS + 1
    kernel = kernel.reshape(copies, side, copies, side).sum((0, 2))
    return kernel * (slant / (2 * math.pi * width**2))
