"""Recordings played again: into fresh cores, into a live process on a scratch bus, and past another routing policy."""
