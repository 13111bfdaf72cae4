"""Fine-tune a Hugging Face causal language model privately, on the rows of a table.

    python -m ddp_by_hand.examples.finetune               # a small GPT-2 on made-up sentences
    python -m ddp_by_hand.examples.finetune --train lora  # its LoRA adapters alone
    python -m ddp_by_hand.examples.finetune --model path/to/model --data notes.csv --column note

A row is what is protected: (ε, δ) bounds what anyone can tell from the trained model about whether
one row was in the data. It is cut off after `--length` tokens. Someone who wrote ten rows has a
bound of 10ε, with a larger δ.

Nothing is downloaded: `gpt2` and `llama` are built from their configurations, with random weights
and bytes as tokens, and a folder is read as `save_pretrained` has written it.

| in the output folder | |
| --- | --- |
| `model/`, `privacy.json` | covered by ε: these may be published |
| `settings.json` | public: options and sizes |
| `checkpoint-*` | to resume; with the keys of `FOLDER.keys/` anyone can subtract the noise |

The output names what ε does not cover: the loss on held-out rows.
"""

import shlex
import sys
from dataclasses import replace

from ddp_by_hand.examples.finetune_options import DOES, EXAMPLES, PROGRAM, Options, with_config
from ddp_by_hand.lm.runtime import typed_command
from ddp_by_hand.measure.command_line import INTERRUPTED, bad_input
from ddp_by_hand.measure.options import as_arguments, program

NEEDS = ("transformers", "accelerate")


@program(PROGRAM, Options, needs=NEEDS, read=with_config, description=DOES, epilog=EXAMPLES)
def main(options: Options) -> int:
    """Trains, or resumes. Returns 0, or 130 after Ctrl-C."""
    from ddp_by_hand.examples.finetune_run import run  # imports transformers: seconds

    with bad_input():
        finished = run(options)
    if finished:
        return 0
    again = typed_command(PROGRAM, as_arguments(replace(options, resume=True)))
    print(f"stopped after a whole step, which is saved; to continue, bit for bit:\n"
          f"  {shlex.join(again)}")  # fmt: skip
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
