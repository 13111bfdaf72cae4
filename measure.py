"""The old name of `ddp_by_hand.measure`."""

from old_names import keep

keep(__name__)
