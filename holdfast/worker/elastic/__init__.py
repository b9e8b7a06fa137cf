"""Computes one optimizer step from the micro-batches of all ranks: the parts of `ElasticTrainer`."""
