"""What a private step is, whatever computes it: networks × ways, one oracle, the public API."""
