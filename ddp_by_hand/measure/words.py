"""Formats numbers in sentences."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns `1 cell`, `2 cells`, `1,024 tokens`; `plural` where it takes more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
