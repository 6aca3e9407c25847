"""One model on several ranks: tensor-parallel shards, pipeline stages and replicas."""
