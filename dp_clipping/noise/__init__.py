"""The Gaussian noise of DP-SGD.

Files:

    gaussian              counter-based streams in which every value has an address
    kernel                the same in one Triton kernel
    registers             its device functions: words, normal numbers, updates
    fused_update          which parameters the kernel updates, and how
    mechanisms            noise of other distributions, that users register with their account
    add_noise             adds it to clipped sums, as `noise_mechanism` chooses
    correlated            noise of which later steps take back a part
    secure                cryptographic noise of integers, for `secure_mode=True`
    keys                  the secret key of noise and sampling
    adaptive_threshold    a clipping threshold that follows a quantile of the norms
"""
