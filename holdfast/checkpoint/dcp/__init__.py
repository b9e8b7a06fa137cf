"""Reads and writes the file format of `torch.distributed.checkpoint`, without torch."""
