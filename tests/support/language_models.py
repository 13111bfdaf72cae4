"""Tiny Hugging Face models that compute their loss, with batches padded to their longest sample."""

import copy

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 40
LANGUAGE_MODELS = ("gpt2", "llama", "bert", "bert_masked", "t5", "regression")


def language_model(kind: str, **options) -> nn.Module:
    """A seeded model without dropout, whose parameters are not the zeros and ones they start as."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    bert = dict(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16,
        vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
            **options,
        )  # fmt: skip
        network = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=16, vocab_size=VOCABULARY, pad_token_id=0,
        )  # fmt: skip
        network = transformers.LlamaForCausalLM(config)
    elif kind == "bert_masked":
        network = transformers.BertForMaskedLM(transformers.BertConfig(**bert))
    elif kind == "t5":
        config = transformers.T5Config(
            num_layers=2, d_model=16, num_heads=2, d_ff=16, d_kv=8, vocab_size=VOCABULARY,
            decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
        )  # fmt: skip
        network = transformers.T5ForConditionalGeneration(config)
    else:
        labels = 1 if kind == "regression" else 3
        config = transformers.BertConfig(**bert, num_labels=labels)
        network = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return network.train()


def samples_of(kind: str, count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Samples of three to eight tokens, some of which have no label."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = 3 + (5 * i) % 6
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
        if kind == "bert":
            labels = torch.randint(3, (), generator=generator)
        elif kind == "regression":
            labels = torch.rand((), generator=generator)
        else:
            labels = torch.randint(2, VOCABULARY, (length,), generator=generator)
            labels[: i % 3] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample, padded at the right, with a mask."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": torch.stack(labels)
        if not labels[0].dim()
        else pad(labels, batch_first=True, padding_value=-100),
    }


def batch_of(kind: str, count: int) -> dict[str, Tensor]:
    return collated(samples_of(kind, count))


def reference_gradients(
    network: nn.Module, batch: dict[str, Tensor], C: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms [B] and Σ min(1, C/n) g of a batch, in float64 and one sample at a time."""
    network = copy.deepcopy(network).double()
    names, parameters = zip(
        *((n, p) for n, p in network.named_parameters() if p.requires_grad), strict=True
    )
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(batch["input_ids"])):
        loss = network(**{
            name: x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1]
            for name, x in batch.items()
        }).loss  # fmt: skip
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(torch.stack([g.square().sum() for g in found]).sum().sqrt())
        for one, g in zip(total, found, strict=True):
            one += min(1.0, C / float(norms[-1])) * g
    return torch.stack(norms), dict(zip(names, total, strict=True))
