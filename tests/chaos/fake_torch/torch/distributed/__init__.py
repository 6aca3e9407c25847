"""Part of the replacement for torch; only `torch.distributed.run` exists."""
