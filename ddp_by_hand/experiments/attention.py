"""Attention for Hugging Face's Llama that does not inspect the batch.

For its own `sdpa` transformers makes a mask, and to find out whether one is needed (packed
sequences) it reads position ids from the device: the host waits, in every forward. Batches of the
experiments are neither packed nor padded, and under a name for which the library makes no masks the
very same function is causal without one.
"""

ATTENTION = "causal_sdpa"


def register_attention() -> str:
    """Registers the attention and returns its name, for `attn_implementation` of a Llama."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    return ATTENTION
