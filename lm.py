"""The old name of `ddp_by_hand.lm`."""

from old_names import keep

keep(__name__)
