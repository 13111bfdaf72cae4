"""Steps recorded on neighbouring data: `replay.check` on each kind of layer, loss and mechanism."""
