"""The group of a prompt as one unit, as docs/post_training.md shows it, beside one by one."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[3] / "docs/post_training.md"
C = 0.05


def test_a_group_is_clipped_as_one():
    text = PAGE.read_text().split("## A GRPO group is one unit")[1]
    program = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    for shown, instead in ("noise_multiplier=1.0", "0.0"), ("max_grad_norm=1.0", f"{C}"):
        assert shown in program
        program = program.replace(shown, f"{shown.partition('=')[0]}={instead}")
    names, norms = {}, []

    def compare(optimizer, *_):
        if type(optimizer) is not torch.optim.Adam:
            return
        own = copy.deepcopy(names["policy"]).double()
        total = {name: torch.zeros_like(p) for name, p in own.named_parameters()}
        G, new = names["G"], names["NEW"]
        for group in range(len(names["tokens"]) // G):
            rows = slice(group * G, group * G + G)
            tokens, advantages = names["tokens"][rows], names["advantages"][rows].double()
            assert (tokens[:, :3] == tokens[0, :3]).all()
            found = own(tokens).logits.log_softmax(-1)[:, 2:-1]
            log_probs = found.gather(2, tokens[:, -new:, None])[..., 0]
            loss = -(log_probs.mean(1) * advantages).mean()
            gradients = torch.autograd.grad(loss, list(own.parameters()))
            norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
            for one, g in zip(total.values(), gradients, strict=True):
                one += g * min(1.0, C / max(norms[-1], 1e-12))
        for name, p in names["policy"].named_parameters():
            torch.testing.assert_close(p.grad.double(), total[name] / 16, rtol=1e-4, atol=1e-6)

    hook = register_optimizer_step_pre_hook(compare)
    try:
        exec(program, names)
    finally:
        hook.remove()
    assert len(norms) > 16
    assert max(norms) > C
