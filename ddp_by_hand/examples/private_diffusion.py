"""Train a diffusion model privately on pictures of digits, and draw pictures with it.

    python -m ddp_by_hand.examples.private_diffusion                # a UNet
    python -m ddp_by_hand.examples.private_diffusion --network dit  # a transformer

The network predicts the noise in a picture at a time (Ho et al., Denoising Diffusion Probabilistic
Models, 2020). A step of ordinary training looks at each picture at one time with one noise. Here it
looks at `--views` of them, and clips the mean of their gradients, which the noise of privacy
outweighs less (Dockhorn et al., Differentially Private Diffusion Models, 2023). Pictures are drawn
with a running mean of the parameters. Both cost no ε; one picture is the unit of privacy.

The training pictures are made here, of the fonts that matplotlib ships. Writes `pictures.png`, of
the running mean, and `model.pt`, its parameters.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.font_digits import font_digits
from ddp_by_hand.experiments.networks.diffusion import DiT, UNet
from ddp_by_hand.lm.runtime import find_hardware, seed_everything
from ddp_by_hand.measure.command_line import bad_input, check_folder
from ddp_by_hand.measure.options import is_seed, option, positive, program
from ddp_by_hand.measure.picture import new_figure, save_picture
from dp_clipping import BatchMemoryManager, PrivacyEngine

DRAWN = 40  # pictures
NOISE_STEPS = 50  # of drawing a picture
DECAY = 0.95  # of the running mean, a step


@dataclass(frozen=True)
class Options:
    network: str = option("unet", "what predicts the noise", choices=("unet", "dit"))
    epsilon: float = option(8.0, "the budget", check=positive)
    delta: float = option(1e-5, "the other half of it", check=positive)
    epochs: int = option(8, "epochs", check=positive)
    batch_size: int = option(512, "pictures of a step, on average", check=positive)
    views: int = option(2, "times and noises of a picture in a step", check=positive)
    max_physical_batch_size: int = option(
        512, "views that are in memory at a time, a multiple of --views", check=positive
    )
    images: int = option(16384, "to train on", check=positive)
    size: int = option(12, "pixels of a picture's side, a multiple of 4", check=positive)
    width: int = option(16, "channels, a multiple of 8", check=positive)
    learning_rate: float = option(2e-3, "of Adam", check=positive)
    seed: int = option(
        0, "seed of pictures and initial parameters, never of any noise", check=is_seed
    )
    device: str = option("auto", "", choices=("auto", "cpu", "cuda"))
    output_dir: Path = option(Path("results_private_diffusion"), "where the files are written")


@program("private_diffusion", Options, needs=["matplotlib"])
def main(options: Options) -> int:
    with bad_input():
        for name, of in (("size", 4), ("width", 8), ("max_physical_batch_size", options.views)):
            if getattr(options, name) % of:
                shown = name.replace("_", "-")
                raise ValueError(f"--{shown} is {getattr(options, name)}: give a multiple of {of}")
        device = torch.device(find_hardware(options.device, 1).device_type)
        check_folder("--output-dir", options.output_dir, create=True)
        network, said = train(options, device)
    pictures = drawn(network, (DRAWN, 1, options.size, options.size))
    torch.save(network.state_dict(), options.output_dir / "model.pt")
    show(pictures, options, said)
    print(f"{options.output_dir / 'pictures.png'}, {options.output_dir / 'model.pt'}")
    return 0


def train(options: Options, device: torch.device) -> tuple[nn.Module, str]:
    """Returns a running mean of the trained network, and what it has spent."""
    seed_everything(options.seed)
    pictures, _ = font_digits(options.images, options.size, options.seed)
    data = TensorDataset(pictures.mean(1, keepdim=True).to(device))
    kinds = {"unet": UNet(options.width, 1), "dit": DiT(2 * options.width, 1, options.size)}
    network = kinds[options.network].to(device)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=options.learning_rate),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(data, batch_size=options.batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=1.0,
        views=options.views,
    )
    engine.on_step(lambda metrics: average.update_parameters(network))
    draws = torch.Generator(device)
    draws.seed()  # of the operating system: whoever knew times and noises would know more
    for epoch in range(1, options.epochs + 1):
        total = torch.zeros(2, device=device)
        with BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=options.max_physical_batch_size,
            optimizer=optimizer,
        ) as microbatches:
            for (x,) in microbatches:
                times = torch.rand(len(x), device=device, generator=draws)
                noise = torch.randn(x.shape, device=device, generator=draws)
                signal, spread = schedule(times)
                loss = criterion(model(signal * x + spread * noise, times), noise)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += torch.tensor([float(loss) * len(x), len(x)], device=device)
        spent = engine.get_epsilon(options.delta)
        print(
            f"epoch {epoch} of {options.epochs}: ε {spent:.2f} of {options.epsilon:g} at δ "
            f"{options.delta:g}; loss {float(total[0] / total[1]):.3f}, not covered by ε"
        )
    return average.module, f"ε = {spent:.2f} at δ = {options.delta:g}"


def schedule(times: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how much of a picture and of noise there is at times [B], each [B, 1, 1, 1]."""
    angles = (math.pi / 2 * times)[:, None, None, None]
    return angles.cos(), angles.sin()


@torch.no_grad()
def drawn(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Returns pictures of a network that predicts noise, by the steps of DDIM (Song et al., 2021).

    A step takes the predicted noise out, and puts less of the same back in.
    """
    device = next(network.parameters()).device
    x, times = torch.randn(shape, device=device), torch.linspace(0.995, 0, NOISE_STEPS + 1)
    for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        noise = network(x, torch.full((len(x),), now, device=device))
        (signal, spread), (more, less) = (
            schedule(torch.tensor([t], device=device)) for t in (now, then)
        )
        clean = ((x - spread * noise) / signal).clamp(-2.5, 2.5)
        x = more * clean + less * noise
    return x


def show(pictures: Tensor, options: Options, said: str) -> None:
    """Draws the pictures in four rows."""
    figure = new_figure(
        3.9,
        f"Pictures of a {'UNet' if options.network == 'unet' else 'transformer'}, {said}",
        [f"{options.images:,} training pictures, {options.epochs} epochs, {options.views} views"],
        width=7.5,
    )
    framed = F.pad(pictures.squeeze(1).cpu(), (1, 1, 1, 1), value=math.nan)
    rows = framed.unflatten(0, (4, -1))  # [4, n, H, W]
    grid = rows.transpose(1, 2).flatten(0, 1).flatten(1)
    axes = figure.add_axes((0.012, 0.02, 0.976, 0.8))
    axes.imshow(grid.numpy(), cmap="gray", vmin=-1.6, vmax=1.6)
    axes.set_axis_off()
    save_picture(figure, options.output_dir / "pictures.png", f"Drawn at {said}.")


if __name__ == "__main__":
    sys.exit(main())
