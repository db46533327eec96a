"""Decode attention of multi-head latent attention, in absorbed form: all heads share one latent a token."""
