"""A mode without its kernels says so once."""

import logging

from dp_clipping.modes import say_plain


def test_a_mode_without_kernels_says_so_once(caplog):
    say_plain.cache_clear()
    with caplog.at_level(logging.INFO, "dp_clipping.modes"):
        for mode in ("flash", "flash", "flash_bookkeeping"):
            say_plain(mode)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(record.levelno == logging.INFO for record in caplog.records)  # no warning
    assert said[0].startswith("flash runs as ghost, in plain PyTorch")
