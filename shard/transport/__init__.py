"""Data movement between the ranks of one machine, beside what torch.distributed offers."""
