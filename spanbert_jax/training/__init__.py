"""From batches to checkpoints: optimiser, mesh, step, loop."""
