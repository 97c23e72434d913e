"""Gossamer inside the training loops of others: Hugging Face's Trainer, Accelerate, Lightning.

    gossamer.frameworks.trainer      GossamerCallback(trainer), a callback of a Trainer
    gossamer.frameworks.accelerate   prepare(accelerator, model, optimizer, ...), as accelerator.prepare
    gossamer.frameworks.lightning    GossamerStrategy(), a strategy of a Lightning Trainer

Each leaves loaders, logging, evaluation and checkpoints to the framework, keeps its DistributedDataParallel out, and
hands the gradients to `gossamer.wrap`. The result equals the framework's own DDP, or it is refused. Nothing here is
imported with `gossamer`.
"""
