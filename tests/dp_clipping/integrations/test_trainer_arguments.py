"""What private training cannot follow is refused by name, with what to use instead."""

import functools
import inspect
import logging

import pytest
import torch
from transformers import TrainingArguments

from ddp import wrap
from dp_clipping import PrivacyEngine
from dp_clipping.integrations.trainer_arguments import ENGINE, OPTIONS, PrivacyArguments
from tests.dp_clipping.integrations.conftest import arguments, trainer_of

CHECKPOINTING = "activation_checkpointing_kwargs"
if not hasattr(TrainingArguments, CHECKPOINTING):  # its name at first
    CHECKPOINTING = "gradient_checkpointing_kwargs"
REFUSED = [
    ({"auto_find_batch_size": True}, "gradient_accumulation_steps=.. for larger batches"),
    ({"label_smoothing_factor": 0.1}, r"PrivateTrainer\(compute_loss_func=f"),
    ({"neftune_noise_alpha": 5.0}, "leave it out"),
    ({"use_liger_kernel": True}, "leave it out"),
    ({"train_sampling_strategy": "group_by_length"}, "batches are Poisson samples"),
    ({"train_sampling_strategy": "sequential"}, "batches are Poisson samples"),
    ({"optim": "lomo"}, r"PrivateTrainer\(optimizers=\(optimizer, None\)"),
    ({"optim": "schedule_free_adamw"}, r"PrivateTrainer\(optimizers=\(optimizer, None\)"),
    ({"optim": "galore_adamw_layerwise"}, r"PrivateTrainer\(optimizers=\(optimizer, None\)"),
    ({"torch_compile": True}, r"model.compile\(\) before PrivateTrainer"),
    ({"include_num_input_tokens_seen": True}, r"PrivacyArguments\(log_unprotected=True\)"),
    ({"accelerator_config": {"split_batches": True}}, "leave them out"),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        "give gradient_accumulation_steps",
    ),
    ({CHECKPOINTING: {"use_reentrant": True}}, "'use_reentrant': False"),
]
SET_LATER = [  # the arguments themselves ask for a GPU, another package or ranks
    ("fp16", True, "use bf16=True"),
    ("fsdp", "full_shard", "fully_shard"),
    ("deepspeed", {"zero_optimization": {}}, "fully_shard"),
    ("_n_gpu", 2, "torchrun --nproc_per_node=2"),
    ("parallelism_config", object(), "torchrun"),
]


@pytest.mark.parametrize(("options", "instead"), REFUSED, ids=lambda x: str(x)[:40])
def test_an_argument_is_refused_by_name(options, instead, tmp_path):
    name = next(iter(options))
    with pytest.raises(ValueError, match=rf"TrainingArguments\({name}=.*{instead}"):
        trainer_of("gpt2", tmp_path, **options)


@pytest.mark.parametrize(("name", "value", "instead"), SET_LATER)
def test_an_argument_of_other_machines_is_refused(name, value, instead, tmp_path):
    args = arguments(tmp_path)
    args._setup_devices  # noqa: B018  counts the GPUs
    setattr(args, name, value)
    with pytest.raises(ValueError, match=rf"TrainingArguments\(.*{instead}"):
        trainer_of("gpt2", tmp_path, trainer={"args": args})


def test_ranks_without_an_exchange_are_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match=r'functools\.partial\(ddp\.wrap, "ddp_bucketed"\)'):
        trainer_of("gpt2", tmp_path, trainer={"args": args})


def test_a_wrapper_that_makes_its_optimizer_is_refused(one_rank, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    options = {"args": args, "data_parallel": functools.partial(wrap, "zero1")}
    trainer = trainer_of("gpt2", tmp_path, trainer=options)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match=r'gives a Zero1DDP, .*\(ddp\.wrap, "ddp_bucketed"\)'):
        trainer.train()


def test_an_optimizer_itself_may_be_any(tmp_path):
    from tests.support.language_models import language_model

    network = language_model("gpt2")
    optimizer = torch.optim.NAdam(network.parameters(), lr=1e-3)
    trainer = trainer_of(
        "gpt2", tmp_path, network=network, max_steps=1, trainer={"optimizers": (optimizer, None)}
    )
    trainer.train()
    assert trainer.optimizer.original_optimizer is optimizer


def test_clipping_of_the_sum_is_off_and_said_to_be(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of("gpt2", tmp_path, max_grad_norm=1.0)
    assert "max_grad_norm=1 is off: PrivacyArguments.max_grad_norm clips each" in caplog.text
    assert trainer.args.max_grad_norm == 0


SIGMA = {"noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"PrivacyArguments\(target_epsilon=8\.0, target_delta=1e-5\)"),
        (SIGMA | {"target_epsilon": 1.0}, "give one of"),
        ({"target_epsilon": -1.0}, "target_epsilon is -1"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        (SIGMA | {"target_delta": 2.0}, "target_delta is 2"),
        (SIGMA | {"pad_batches": 3}, "pad_batches"),
        (SIGMA | {"options": {"steps": 3}}, "options has steps"),
        (SIGMA | {"options": {"secure_mode": True}}, "gives itself or does not take"),
        (SIGMA | {"sampling": "truncated_poisson"}, "max_batch_size is missing"),
        (SIGMA | {"sampling": "balls_in_bins", "sample_rate": 0.1}, "sample_rate.* give steps="),
        (SIGMA | {"sampling": "cyclic", "options": {"noise_mechanism": "laplace"}},
         "noise_mechanism='laplace'"),
        (SIGMA | {"options": {"sampling": "cyclic"}}, "options has sampling, .* of PrivacyArgum"),
        (SIGMA | {"options": {"examples_per_unit": 3}}, "has examples_per_unit, .* of PrivacyArg"),
        (SIGMA | {"unit_ids": [0, 0, 1]}, "give examples_per_unit, the most"),
        (SIGMA | {"secure_mode": 1}, "secure_mode is 1: give True or False"),
        (SIGMA | {"checks": "never"}, "checks 'never' is .* choose one of first, sampled, off"),
        (SIGMA | {"key_folder": 1}, 'key_folder is 1: give the name of a folder, as key_folder="'),
    ],
)  # fmt: skip
def test_privacy_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        PrivacyArguments(**{"target_delta": 1e-5, **options})


def test_options_are_arguments_of_make_private():
    assert set(OPTIONS) <= set(inspect.signature(PrivacyEngine.make_private).parameters)


def test_arguments_of_the_engine(tmp_path):
    """Passes on all but `hide_unprotected`, in whose place is `log_unprotected`."""
    known = set(inspect.signature(PrivacyEngine).parameters)
    assert set(ENGINE) == known - {"hide_unprotected"}
    trainer = trainer_of("gpt2", tmp_path, privacy={"checks": "off"})
    trainer.train()
    assert not trainer.optimizer.model.passes.reader.looks_at(1000)


def test_names_of_privacy_arguments():
    with pytest.raises(TypeError, match=r"'nois_multiplier' \(did you mean noise_mult"):
        PrivacyArguments(nois_multiplier=1.0, target_delta=1e-5)
    with pytest.raises(TypeError, match=r"missing .*'target_delta': PrivacyArguments"):
        PrivacyArguments(target_epsilon=8.0)
