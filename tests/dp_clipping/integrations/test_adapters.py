"""Adapters that get noise and nothing else are refused; those that do not move are named."""

import copy
import warnings

import pytest
import torch

from tests.dp_clipping.conftest import assert_close, clipped_sums, private
from tests.dp_clipping.integrations.conftest import trainer_of
from tests.support import zoo
from tests.support.language_models import language_model

peft = pytest.importorskip("peft")


def config(**options):
    return peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, **options)


def adapted():
    torch.manual_seed(0)
    return peft.get_peft_model(language_model("gpt2"), config())


def another_active():
    """Both are trainable, and the second one is not used."""
    model = adapted()
    model.add_adapter("second", config())
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


def disabled():
    model = adapted()
    model.base_model.disable_adapter_layers()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


def outside():
    model = adapted()
    model.base_model.model.extra = torch.nn.Linear(4, 4)
    return model


def frozen_block():
    model = adapted()
    for name, p in model.named_parameters():
        if "h.0." in name:
            p.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (another_active, r"lora_A\.second.*model\.set_adapter"),
        (disabled, r"lora_A\.default.*enable_adapter_layers"),
        (outside, r"for base_model\.model\.extra\.weight.*p\.requires_grad_\(False\)"),
    ],
)
def test_what_the_loss_does_not_reach_is_refused(make, says, tmp_path):
    trainer = trainer_of("gpt2", tmp_path, network=make())
    with pytest.raises(ValueError, match=says):
        trainer.train()
    assert trainer.engine.accountant.history == []


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (frozen_block, {}, r"h\.0\.attn\.c_attn are frozen"),
        (adapted, {"learning_rate": 0.0}, r"have not moved in 3 steps.*learning_rate="),
    ],
)
def test_what_does_not_move_is_named(make, options, says, tmp_path):
    with pytest.warns(UserWarning, match=says):
        trainer_of("gpt2", tmp_path, network=make(), **options).train()


def test_adapters_that_train_are_left_alone(tmp_path):
    """Also with one of their two matrices frozen."""
    model = adapted()
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.requires_grad_(False)
    trainer = trainer_of("gpt2", tmp_path, network=model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(frozen|moved)")
        trainer.train()
    assert trainer.privacy_statement().steps == 3


OTHERS = {
    "LoHa": {"r": 2},
    "LoKr": {"r": 2},
    "OFT": {"oft_block_size": 4, "bias": "none"},
    "FourierFT": {"n_frequency": 10},
}


class Adapted(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        config = getattr(peft, f"{kind}Config")(target_modules=["q_proj"], **OTHERS[kind])
        self.model = peft.get_peft_model(language_model("llama"), config)

    def forward(self, ids):
        return self.model(input_ids=ids).logits


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_that_vmap_cannot_run(kind):
    network = Adapted(kind)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    ids, y = torch.randint(2, 40, (3, 5)), torch.randn(3, 5, 40)
    model = private(copy.deepcopy(network), max_grad_norm=1e6)
    sums = clipped_sums(model, (ids, y))
    total = dict.fromkeys(sums, 0)
    for n in range(3):  # in float32: FourierFT cannot do with another
        network.zero_grad()
        zoo.product(network(ids[n : n + 1]), y[n : n + 1]).sum().backward()
        own = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
        norm = sum(g.square().sum() for g in own.values()).sqrt()
        torch.testing.assert_close(model.per_sample_gradient_norms[n], norm, rtol=1e-4, atol=0)
        total = {name: total[name] + g for name, g in own.items()}
    assert_close(sums, total, 1e-4)
