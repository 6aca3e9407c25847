"""What ranks import, once for all: a pool's ranks are forked from a process that has imported this.

Nothing of it starts a thread. Its objects stay out of the garbage collector: each rank would search
a million of them again and again, and copy their memory.
"""

from workers.runtime.program import fast_import

with fast_import():
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict_loader
    import torch.distributed.checkpoint.state_dict_saver
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.attention.flex_attention  # noqa: F401

    import workers.training.optim.scaled_adamw
    import workers.training.parallel.expert
    import workers.training.parallel.pipeline.pipedream_loop
    import workers.training.parallel.tensor
    import workers.training.setup.attempt
    import workers.training.trace.communication_bytes  # noqa: F401
