"""Each kind of layer by itself: a record says what it is, and generic tests run on all records."""
