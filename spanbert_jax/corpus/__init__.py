"""From text to a corpus directory, offline."""
