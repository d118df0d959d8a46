"""`kvbus chaos`: real engines under steady load, faults by seed, every token compared."""
