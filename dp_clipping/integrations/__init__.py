"""Private training in the training loops of other libraries.

    transformers       `PrivateTrainer`, a Hugging Face `Trainer` whose training is private
    trainer_arguments  its `PrivacyArguments`, and which arguments and adapters are refused
    trl                `PrivateSFTTrainer` and `PrivateDPOTrainer`, trainers of TRL
    preference_losses  losses of preference pairs, each of its own pair
    logical_batches    the microbatches of a Poisson batch as one batch of a training loop

Nothing here is imported by the rest of the package, which needs none of these libraries.
"""
