"""The file format of `torch.distributed.checkpoint`, read and written without torch."""
