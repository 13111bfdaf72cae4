"""Keys: what is derived, what is written, what is refused."""

import torch

from dp_clipping.noise.keys import KEY_BYTES, Keys, fixed_keys, fresh_keys

ONE, OTHER = Keys(bytes(32)), Keys(bytes([1] * 32), fixed=True)


def test_derived_keys_differ_from_each_other_and_from_the_secret():
    derived = [ONE.noise, ONE.sampling, bytes.fromhex(ONE.fingerprint), ONE.master]
    assert len(set(derived)) == 4
    assert {len(key) for key in derived} == {KEY_BYTES}
    assert ONE.noise != OTHER.noise
    assert ONE.fingerprint != OTHER.fingerprint


def test_a_mac_depends_on_key_and_digest():
    assert ONE.mac("a") == ONE.mac("a")
    assert len({ONE.mac("a"), ONE.mac("b"), OTHER.mac("a")}) == 3


def test_a_key_is_not_printed():
    assert repr(ONE) == "Keys(fixed=False)"


def test_fresh_keys_are_new_and_fixed_ones_are_of_the_seed():
    device = torch.device("cpu")
    assert fresh_keys(None, device) != fresh_keys(None, device)
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2, -1)]
    first, again, other, negative = [fixed_keys(g) for g in seeds]
    assert first == again
    assert len({first.master, other.master, negative.master}) == 3
    assert first.fixed
    assert not fresh_keys(None, device).fixed
