"""Tests the private step, whatever computes it: networks × ways, one oracle, the public API."""
