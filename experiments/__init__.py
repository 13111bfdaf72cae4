"""Measurements that take a GPU and a while; each is a command, `python -m experiments.NAME`."""
