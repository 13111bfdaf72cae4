"""Tests of private training, in the rooms of `dp_clipping`."""
