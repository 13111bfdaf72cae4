"""Saves and restores private runs.

Files:

    save_load             `save_checkpoint` and `load_checkpoint`
    run                   what one `make_private` returned, and what its ranks agreed on
    compatibility         whether a checkpoint fits a run
    restore               puts a run where the checkpoint was
    file_format           one file, written whole, read without executing code
    distributed_format    a folder that any number of ranks reads
    random_states         those of torch, NumPy and Python
    weights               those that another file has: compared by a digest
    tensors               each tensor by its name, as its ranks need it
"""
