"""Each option of the commands says what it is without it."""

import argparse

import pytest

from ddp_by_hand.experiments import correlated_noise, examples_per_step
from ddp_by_hand.experiments.llama_fsdp import options as llama_fsdp
from ddp_by_hand.experiments.networks import __main__ as networks
from ddp_by_hand.experiments.plan_privacy import options as plan_privacy
from ddp_by_hand.experiments.profile_bottlenecks import options as profile_bottlenecks
from ddp_by_hand.experiments.records import __main__ as records
from ddp_by_hand.experiments.verify_correctness import run as verify_correctness
from ddp_by_hand.measure.options import parser_of


@pytest.mark.parametrize(
    "module",
    [
        correlated_noise, examples_per_step, llama_fsdp, networks, plan_privacy,
        profile_bottlenecks, records, verify_correctness,
    ],
)  # fmt: skip
def test_every_option_says_its_default(module):
    options = [
        action
        for action in parser_of(module.Options)._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    assert len(options) >= 8
    silent = [o.option_strings[0] for o in options if "(default: " not in o.help]
    assert silent == []
