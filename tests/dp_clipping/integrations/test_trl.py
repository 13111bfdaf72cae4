"""Private SFT and DPO with the real trainers of TRL, beside samples and pairs one by one."""

import copy

import pytest
import torch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from dp_clipping.integrations.preference_losses import LOSSES  # noqa: E402
from dp_clipping.integrations.trl import (  # noqa: E402
    PrivacyArguments,
    PrivateDPOTrainer,
    PrivateSFTTrainer,
)
from tests.support.language_models import language_model  # noqa: E402

WORDS = [f"w{i}" for i in range(30)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <eos>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """TRL counts its uses over the network otherwise."""
    monkeypatch.setenv("CI", "1")


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", *WORDS]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def text(i: int, words: int) -> str:
    return " ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(words))


def completions(count: int):
    rows = [{"prompt": text(i, 2 + i % 3), "completion": " " + text(i + 5, 1 + i % 4)}
            for i in range(count)]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def preferences(count: int):
    rows = [{"prompt": text(i, 2 + i % 3), "chosen": " " + text(i + 5, 1 + i % 4),
             "rejected": " " + text(i + 11, 1 + (i + 2) % 3)} for i in range(count)]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def made_of(cls, config, folder, data, **options):
    own = {"noise_multiplier": 0.0, "target_delta": 1e-5, "accountant": "rdp",
           "max_grad_norm": 0.5, **options.pop("privacy", {})}  # fmt: skip
    given = options.pop("trainer", {})
    args = config(
        str(folder), **{
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3,
            "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True,
            "save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.0, "bf16": False,
            **options,
        }
    )  # fmt: skip
    own["options"] = {"grad_sample_mode": "bookkeeping", **own.get("options", {})}
    return cls(**{
        "model": language_model("llama"), "args": args, "train_dataset": data,
        "processing_class": tokenizer(), "privacy": PrivacyArguments(**own), **given,
    })  # fmt: skip


def sft(folder, data=None, **options):
    data = completions(16) if data is None else data
    return made_of(PrivateSFTTrainer, trl.SFTConfig, folder, data, **options)


def dpo(folder, data=None, **options):
    data = preferences(16) if data is None else data
    return made_of(PrivateDPOTrainer, trl.DPOConfig, folder, data, **options)


class Compared(transformers.TrainerCallback):
    """Compares each step's gradient with that of samples, or pairs, clipped one by one.

    The loss of one is TRL's own, of a batch that has no other and no padding.
    """

    def __init__(self, trainer, plain):
        self.trainer, self.plain, self.sizes, self.rows = trainer, plain, [], []
        self.C, self.norms = trainer.privacy.max_grad_norm, []
        trainer.add_callback(self)
        self.own, trainer.compute_loss = trainer.compute_loss, self.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        if torch.is_grad_enabled():
            self.rows += [{k: x[i : i + 1] for k, x in inputs.items()}
                          for i in range(len(inputs["input_ids"]))]  # fmt: skip
        return self.own(model, inputs, *args, **kwargs)

    def on_step_begin(self, *_, model, **__):
        self.rows.clear()
        self.plain.model.load_state_dict(model.state_dict())

    def on_optimizer_step(self, args, *_, model, **__):
        self.sizes.append(len(self.rows))
        moved = [p for p in self.plain.model.parameters() if p.requires_grad]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        units = [self.gradients(rows, moved) for rows in self.units()]
        own = dict(model.named_parameters())
        divisor = self.trainer.get_total_train_batch_size(args) / self.each
        for n, name in enumerate(names):
            total = sum((unit[n] for unit in units), torch.zeros_like(moved[n]))
            torch.testing.assert_close(
                own[name].grad, total / divisor, rtol=2e-4, atol=1e-6, msg=name
            )

    @property
    def each(self):
        return self.trainer.privacy.examples_per_unit

    def units(self):
        return [self.rows[i : i + self.each] for i in range(0, len(self.rows), self.each)]

    def gradients(self, rows, parameters):
        """The clipped sum of the gradients of a unit's rows; what fills it up is one of them again."""
        total = [torch.zeros_like(p) for p in parameters]
        for row in {str(row["input_ids"]): row for row in rows}.values():
            loss = self.plain.compute_loss(self.plain.model, alone(row))
            for one, g in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                one += g
        norm = torch.stack([g.norm() for g in total]).norm()
        self.norms.append(float(norm))
        return [g * min(1.0, self.C / float(norm)) for g in total]


def alone(row):
    """Inputs of TRL's loss: without padding, and a pair's completions one after the other."""
    length = int(row["attention_mask"].sum(-1).max())
    row = {name: x[..., :length] for name, x in row.items() if name != "reference"}
    return {name: x[0] for name, x in row.items()} if row["input_ids"].dim() == 3 else row


def plain(trainer):
    """TRL's own trainer with the same model, data and arguments."""
    is_sft, adapted = isinstance(trainer, trl.SFTTrainer), hasattr(trainer.model, "peft_config")
    cls = trl.SFTTrainer if is_sft else trl.DPOTrainer
    config = trl.SFTConfig if is_sft else trl.DPOConfig
    args = config(
        trainer.args.output_dir, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        loss_type=trainer.args.loss_type,
    )  # fmt: skip
    data = (completions if is_sft else preferences)(2)
    given = {} if is_sft or adapted else {"ref_model": language_model("llama")}
    return cls(
        model=language_model("llama"), args=args, train_dataset=data, processing_class=tokenizer(),
        peft_config=lora() if adapted else None, **given,
    )  # fmt: skip


def adapter(trainer_options=None):
    return {"trainer": {"peft_config": lora(), **(trainer_options or {})}}


CASES = {
    "sft": (sft, {}),
    "sft with adapters": (sft, adapter()),
    "sft of dft": (sft, {"loss_type": "dft", **adapter()}),
    "dpo": (dpo, {"gradient_checkpointing": False, "privacy": {"max_grad_norm": 0.3}}),
    "dpo with adapters": (dpo, adapter()),
    "dpo of two losses": (dpo, {"loss_type": ["hinge", "ipo"]}),
    "dpo with precomputed reference": (dpo, {"precompute_ref_log_probs": True, **adapter()}),
    "dpo of users": (dpo, {"privacy": {
        "examples_per_unit": 2, "unit_ids": [i // 2 if i < 8 else i for i in range(16)],
        "sample_rate": 0.4, "steps": 2, "max_grad_norm": 0.3,
    }, **adapter()}),
}  # fmt: skip
SLOW = {"sft of dft", "dpo of two losses", "dpo with precomputed reference"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES]
)
def test_gradients_are_those_of_single_samples_and_pairs(case, tmp_path):
    make, options = CASES[case]
    trainer = make(tmp_path, max_steps=2, **options)
    compared = Compared(trainer, plain(trainer))
    trainer.train()
    assert len(compared.sizes) == 2
    assert max(compared.sizes) > 2, "more than one microbatch"
    assert max(compared.norms) > compared.C, "one was clipped"
    print(case, compared.norms, compared.sizes)
