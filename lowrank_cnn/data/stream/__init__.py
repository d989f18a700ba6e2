"""Stream large data sets: worker processes decode batches ahead of training."""
