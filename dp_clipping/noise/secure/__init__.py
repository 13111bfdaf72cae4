"""Noise for `PrivacyEngine(secure_mode=True)`: cryptographic words, integers, exact sums.

Files:

    rounded_gaussian    integers with a Gaussian distribution, from words of ChaCha20: the reference
    kernel              the same in one Triton kernel, with the sum and the division
    source              `SecureNoise`, which rounds a sum to a grid and adds the integers
    certificate         what it costs: grid, summation, distance of the sampler, ε and δ with them
"""
