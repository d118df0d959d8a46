"""Conversations keep their KV: offers, look-ups and claims."""
