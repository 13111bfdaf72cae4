"""The Llama of the experiments."""

import logging

import pytest
import torch
from transformers import AutoConfig, MistralConfig, masking_utils

from ddp_by_hand.experiments.attention import ATTENTION
from ddp_by_hand.experiments.llama_fsdp.network import _draw, _rebuild_buffers, config_of, on_meta
from ddp_by_hand.experiments.price.models import MODELS


def network():
    config = config_of("tiny")
    made = on_meta(config, train_embedding=True).to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        _draw(made, 0.2)
    _rebuild_buffers(made, config, torch.device("cpu"))
    return made


def test_no_forward_looks_for_packed_sequences(monkeypatch):
    """That waits for the device; without it outputs are the same."""
    made = network()
    tokens = torch.randint(1, 500, (2, 33))
    assert made.config._attn_implementation == ATTENTION
    looked = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked.append)
    found = made(input_ids=tokens).logits
    assert not looked
    made.set_attn_implementation("sdpa")
    torch.testing.assert_close(made(input_ids=tokens).logits, found, rtol=0, atol=0)
    assert looked


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_nor_does_that_of_one_gpu(model):
    made = model.build(1, torch.device("meta"))
    assert made.config._attn_implementation == ATTENTION


def test_other_models_keep_their_masks():
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=4, num_labels=3,
    )  # fmt: skip
    assert on_meta(config, train_embedding=True).config._attn_implementation == "sdpa"


def test_a_model_that_is_not_there_is_one_error(monkeypatch, caplog):
    """The library logs each of its attempts."""

    def attempt(name, token):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no such model\nsee the documentation")

    monkeypatch.setattr(AutoConfig, "from_pretrained", attempt)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(ValueError, match=r"could be read \(no such model\)"):
        config_of("nosuch")
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == level
