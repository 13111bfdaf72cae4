"""Fine-tuning a BERT for classification, as Opacus's tutorials do it in ghost mode.

    python -m examples.opacus_finetune --train last     the last block, the pooler and the head
    python -m examples.opacus_finetune --train lora     LoRA adapters of queries and values
    python -m examples.opacus_finetune --train all      everything; not with --engine opacus

The model is a small one with random weights, from its configuration: with
`BertForSequenceClassification.from_pretrained(...)` in its place this is the tutorial. Needs
`transformers`, and `peft` for LoRA. Sentences are of two languages that share few words. Opacus 1.6
cannot train position embeddings, whose input has no batch.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.engines import engine_classes, parser, run

VOCABULARY, LENGTH = 60, 12


def make_network(train: str) -> nn.Module:
    """A BERT of which `train` says what is not frozen."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2, pad_token_id=0,
        initializer_range=0.1,  # nothing is pretrained: frozen blocks must let the words through
    )  # fmt: skip
    network = BertForSequenceClassification(config)
    if train == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=4, target_modules=["query", "value"], modules_to_save=["classifier"]
        )
        return get_peft_model(network, adapters)
    if train == "last":
        network.requires_grad_(False)
        for part in (network.bert.encoder.layer[-1], network.bert.pooler, network.classifier):
            part.requires_grad_(True)
    return network


def make_sentences(count: int) -> list[dict[str, Tensor]]:
    """Tokens, which of them are not padding, and the language: most words are of its half."""
    half = VOCABULARY // 2
    sentences = []
    for number in range(count):
        language = number % 2
        is_own = torch.rand(LENGTH) < 0.9
        tokens = torch.randint(1, half, (LENGTH,)) + half * (is_own == language).long()
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, ()))
        mask = (torch.arange(LENGTH) < length).long()
        sentences.append(
            {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.tensor(language)}
        )
    return sentences


def train(options: argparse.Namespace) -> dict[str, float]:
    """First and last epoch's mean loss, which ε does not cover, and ε."""
    PrivacyEngine, BatchMemoryManager = engine_classes(options.engine)
    torch.manual_seed(options.seed)
    network = make_network(options.train).train()
    trainable = [p for p in network.parameters() if p.requires_grad]
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.AdamW(trainable, lr=options.learning_rate),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(make_sentences(512), batch_size=options.batch_size),
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
        grad_sample_mode="ghost",
    )
    means = []
    for epoch in range(options.epochs):
        losses = []
        with BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=options.max_physical_batch_size,
            optimizer=optimizer,
        ) as microbatches:
            for batch in microbatches:
                labels = batch.pop("labels")
                optimizer.zero_grad()
                loss = criterion(model(**batch).logits, labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        print(
            f"epoch {epoch + 1}: epsilon {engine.get_epsilon(options.delta):.2f} at delta "
            f"{options.delta:g}; loss {means[-1]:.3f} (not covered by epsilon)"
        )
    return {
        "first": means[0], "last": means[-1], "epsilon": engine.get_epsilon(options.delta),
        "noise_multiplier": float(optimizer.noise_multiplier),
    }  # fmt: skip


def options() -> argparse.ArgumentParser:
    made = parser("opacus_finetune", "Fine-tune a small BERT privately.", epochs=5)
    made.add_argument(
        "--train", choices=("last", "lora", "all"), default="last",
        help="what is not frozen: the last block, LoRA adapters or everything (last)",
    )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(run(options(), train))
