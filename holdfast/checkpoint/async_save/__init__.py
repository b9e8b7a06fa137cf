"""`torch.distributed.checkpoint.async_save` with a shorter stall."""
