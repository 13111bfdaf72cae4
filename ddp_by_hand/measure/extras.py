"""Packages that only some programs need: which extra of this project installs each."""

from importlib.util import find_spec

EXTRA_OF = {
    "jinja2": "benchmark",
    "matplotlib": "benchmark",
    "accelerate": "transformers",
    "peft": "transformers",
    "transformers": "transformers",
    "trl": "trl",
}


class MissingExtra(ImportError):
    """Raised where a package is not installed; its one line says how to install it."""


def require(*packages: str) -> None:
    """Checks that these packages are installed.

    Raises:
        MissingExtra: one is not.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(
                f"{package} is not installed: pip install 'ddp-by-hand[{EXTRA_OF[package]}]'"
            )
