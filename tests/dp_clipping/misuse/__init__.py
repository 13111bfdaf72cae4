"""Refusals: a row is a snippet, the type of its error and what the message says."""
