"""Private SFT and DPO with the real trainers of TRL, beside samples and pairs one by one."""

import json
import logging

import pytest
import torch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from dp_clipping.integrations.preference_losses import LOSSES, loss_of_pairs  # noqa: E402
from dp_clipping.integrations.trl import PrivacyArguments, PrivateDPOTrainer, PrivateSFTTrainer  # noqa: E402
from tests.support.language_models import language_model  # noqa: E402

WORDS = [f"w{i}" for i in range(30)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <eos>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


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
           "max_grad_norm": 0.1, **options.pop("privacy", {})}  # fmt: skip
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
            mask, optimizer = inputs["attention_mask"], self.trainer.optimizer
            ticket = getattr(optimizer, "optimizer", optimizer).step_state.usage.ticket
            self.rows += [{k: x[i : i + 1] for k, x in inputs.items()}
                          for i in range(ticket.real_of(len(mask))) if mask[i].any()]  # fmt: skip
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
        """The clipped sum of a unit's gradients; what fills it up is one of its rows again."""
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
    "sft of dft": (sft, {"loss_type": "dft", "privacy": {"max_grad_norm": 0.01}, **adapter()}),
    "dpo": (dpo, {"gradient_checkpointing": False}),
    "dpo with adapters": (dpo, adapter()),
    "dpo of two losses": (dpo, {"loss_type": ["hinge", "ipo"]}),
    "dpo with precomputed reference": (dpo, {"precompute_ref_log_probs": True, **adapter()}),
    "dpo in batches of one size": (
        dpo, {"pad_to_multiple_of": 16, "privacy": {"pad_batches": True}, **adapter()}
    ),
    "dpo of users": (dpo, {"privacy": {
        "examples_per_unit": 2, "unit_ids": [i // 2 if i < 8 else i for i in range(16)],
    }, **adapter()}),
}  # fmt: skip
FAST = {"dpo with adapters", "dpo of users"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow]) for c in CASES]
)
def test_gradients_are_those_of_single_samples_and_pairs(case, tmp_path):
    make, options = CASES[case]
    often = {"sample_rate": 0.5, "steps": 2, **options.get("privacy", {})}
    trainer = make(tmp_path, max_steps=2, **options | {"privacy": often})
    compared = Compared(trainer, plain(trainer))
    trainer.train()
    assert len(compared.sizes) == 2
    assert max(compared.sizes) > 2, "more than one microbatch"
    assert max(compared.norms) > compared.C, "one was clipped"


def test_pairs_run_together_where_trl_scores_labelled_tokens_only(tmp_path, monkeypatch):
    """TRL lays labelled tokens behind each other on a GPU, which picks rows by value at the end."""
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    often = {"sample_rate": 0.5, "steps": 1}
    trainer = dpo(tmp_path, max_steps=1, privacy=often, **adapter())
    compared = Compared(trainer, plain(trainer))
    trainer.train()
    assert max(compared.sizes) > 2
    assert {handle.kind for handle in trainer.optimizer.model.capture.handles} == {"linear"}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """TRL's own trainer, and pairs with what the policy and the reference say of them."""
    args = trl.DPOConfig(
        str(tmp_path_factory.mktemp("scored")), use_cpu=True, bf16=False, report_to=[],
        disable_tqdm=True, beta=0.7, label_smoothing=0.2,
    )  # fmt: skip
    own = trl.DPOTrainer(
        model=language_model("llama"), ref_model=language_model("llama"), args=args,
        train_dataset=preferences(4), processing_class=tokenizer(),
    )  # fmt: skip
    with torch.no_grad():
        for p in own.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    pairs = [own.data_collator([one]) for one in own.train_dataset]
    return own, pairs


@pytest.mark.parametrize("name", LOSSES)
@torch.no_grad()
def test_a_loss_of_pairs_is_that_of_trl_for_each(name, scored):
    own, pairs = scored
    own.loss_types = own.args.loss_type = [name]
    expected = [float(own.compute_loss(own.model, pair)) for pair in pairs]
    found = []
    for pair in pairs:
        mask = pair["completion_mask"]
        labels = pair["input_ids"].masked_fill(mask == 0, -100)
        inputs = {k: pair[k] for k in ("input_ids", "attention_mask")}
        both = [
            model(**inputs, labels=labels, fused_lm_head=True).log_probs.sum(1).view(1, 2)
            for model in (own.model, own.ref_model)
        ]
        found.append((*both, mask.sum(1).view(1, 2)))
    log_probs, reference, tokens = (torch.cat(x) for x in zip(*found, strict=True))
    losses, _ = loss_of_pairs(log_probs, tokens, reference, own.args)
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)
    assert len({f"{loss:.4f}" for loss in expected}) == len(pairs)


def test_losses_that_are_not_of_a_pair_are_refused(tmp_path):
    for name in ("aot", "aot_unpaired"):
        with pytest.raises(ValueError, match=rf"DPOConfig\(loss_type=\['{name}'\]\): .*sigmoid"):
            dpo(tmp_path, loss_type=["sigmoid", name])


def trained_words(trainer):
    """The words of each sample that have a label."""
    collated = trainer.get_train_dataloader().collate_fn(list(trainer.train_dataset))
    words = trainer.processing_class.convert_ids_to_tokens
    return [words(row[row != -100].tolist()) for row in collated["labels"]]


def test_only_completions_are_trained_on_and_truncated(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "w1 w2", "completion": " w3 w4 w5"}] * 4)
    assert trained_words(sft(tmp_path, data))[0] == ["w3", "w4", "w5", "<eos>"]
    short = sft(tmp_path, data, max_length=3, completion_only_loss=False)
    assert trained_words(short)[0] == ["w1", "w2", "w3"]


def test_only_the_assistant_is_trained_on(tmp_path):
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    data = datasets.Dataset.from_list([{"messages": messages}] * 4)
    trainer = sft(tmp_path, data, assistant_only_loss=True)
    assert trained_words(trainer)[0] == ["w3", "<eos>"]
    compared = Compared(trainer, plain(trainer))
    trainer.train()
    assert len(compared.sizes) == 3


def test_units_of_examples_that_are_left_out_or_shuffled_are_refused(tmp_path):
    users = {"examples_per_unit": 2, "unit_ids": [i // 2 for i in range(16)]}
    with pytest.raises(ValueError, match="examples of train_dataset were left out"):
        sft(tmp_path, max_length=3, privacy=users)
    with pytest.raises(ValueError, match="examples of train_dataset were left out"):
        dpo(tmp_path, max_length=3, privacy=users)
    with pytest.raises(ValueError, match=r"SFTConfig\(shuffle_dataset=True\): units are told"):
        sft(tmp_path, shuffle_dataset=True, privacy=users)


@pytest.mark.parametrize("make", [pytest.param(sft, marks=pytest.mark.slow), dpo])
def test_epsilon_is_logged_and_what_it_does_not_cover_is_not(make, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    data = (completions if make is sft else preferences)(4)
    trainer = make(tmp_path, privacy={"noise_multiplier": 1.0}, **options,
                   **adapter({"eval_dataset": data}))  # fmt: skip
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "learning_rate" in entry]
    spent = [entry["epsilon"] for entry in steps]
    assert len(spent) == 3
    assert spent == sorted(spent)
    assert spent[-1] == trainer.privacy_statement().epsilon
    kept = {"grad_norm", "learning_rate", "epsilon", "epoch", "step"}
    assert all(set(entry) == kept for entry in steps)
    assert "eval_loss" in state["log_history"][2]
    assert not trainer._metrics["train"]


@pytest.mark.parametrize("make", [pytest.param(sft, marks=pytest.mark.slow), dpo])
def test_an_evaluation_is_that_of_trl(make, tmp_path):
    data = (completions if make is sft else preferences)(4)
    trainer = make(tmp_path, max_steps=1, trainer={"eval_dataset": data})
    trainer.train()
    other = plain(trainer)
    other.model.load_state_dict(trainer.model.state_dict())
    found, expected = trainer.evaluate(), other.evaluate(data)
    names = {name for name in expected if "time" not in name and "per_second" not in name}
    assert len(names) > 3
    for name in names - {"epoch"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


REFUSED = [
    (sft, {"packing": True}, r"SFTConfig\(packing=True\): each sample .*max_length truncates"),
    (sft, {"padding_free": True}, r"SFTConfig\(padding_free=True\): each sample"),
    (sft, {"activation_offloading": True}, r"activation_offloading=True\): .*gradient_checkpoint"),
    (sft, {"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1\): .*compute_loss_func"),
    (sft, {"fp16": True, "bf16": None}, r"SFTConfig\(fp16=True\): .*bf16=True"),
    (dpo, {"router_aux_loss_coef": 0.1}, r"DPOConfig\(router_aux_loss_coef=0.1\): .*=0.0"),
    (dpo, {"padding_free": True}, r"DPOConfig\(padding_free=True\): each sample"),
    (dpo, {"use_weighting": True}, r"DPOConfig\(use_weighting=True\): leave it out"),
    (dpo, {"ld_alpha": 0.5}, r"DPOConfig\(ld_alpha=0.5\): leave it out"),
    (dpo, {"f_divergence_type": "js_divergence"}, r"f_divergence_type='js_divergence'\): leave"),
    (dpo, {"sync_ref_model": True}, r"DPOConfig\(sync_ref_model=True\): .*ref_model=\.\."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_a_sample_alone_does_not_determine_is_refused(make, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)


def test_what_a_newcomer_gives(tmp_path, caplog):
    with pytest.raises(
        TypeError, match=r"PrivateSFTTrainer\(args=SFTConfig\(output_dir='..'\), ..\)"
    ):
        sft(tmp_path, trainer={"args": transformers.TrainingArguments(str(tmp_path), use_cpu=True)})
    with pytest.raises(TypeError, match="train_dataset has no length"):
        sft(tmp_path, completions(4).to_iterable_dataset())
    with pytest.raises(NotImplementedError, match="train_dataset has images"):
        sft(
            tmp_path, datasets.Dataset.from_list([{"images": [], "prompt": "w1", "completion": ""}])
        )
    with caplog.at_level(logging.WARNING):
        dpo(tmp_path, max_grad_norm=1.0)
    assert "DPOConfig.max_grad_norm=1 is off: PrivacyArguments.max_grad_norm" in caplog.text


def test_virtual_tokens_and_losses_without_a_value_are_refused(tmp_path):
    adapters = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for make in (sft, dpo):
        with pytest.raises(ValueError, match=r"PromptTuningConfig .*peft_config=LoraConfig"):
            make(tmp_path, trainer={"peft_config": adapters})
    for options, says in (
        ({"beta": 0.0}, r"DPOConfig\(beta=0.0\): give a number above 0"),
        ({"loss_type": ["robust"], "label_smoothing": 0.5}, r"label_smoothing=0.5\): .*below 0.5"),
        ({"label_smoothing_factor": 0.1}, r"DPOConfig\(label_smoothing_factor=0.1\): leave it out"),
    ):
        with pytest.raises(ValueError, match=says):
            dpo(tmp_path, **options)
