"""Checks options of variants."""

from math import inf


def mebibytes(bucket_size_mb: float | None) -> int | None:
    """Returns the bytes of the option `bucket_size_mb`, which is in MiB as in PyTorch's DDP.

    None, which means one bucket, stays None.

    Raises:
        ValueError: if it is not a positive finite number.
    """
    if bucket_size_mb is None:
        return None
    if not 0 < bucket_size_mb < inf:
        raise ValueError(
            f"bucket_size_mb: {bucket_size_mb} is not a positive number of MiB, nor None for one "
            "bucket"
        )
    return int(bucket_size_mb * (1 << 20))
