"""Training a drafter: prompts, generated data, anchors, losses, the trainer, evaluation, export."""
