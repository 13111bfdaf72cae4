"""Private steps and runs on ranks, in every layout of data, parameters and tensors."""
