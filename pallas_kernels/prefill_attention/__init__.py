"""Prefill attention: the chunks of several rows, causal, over keys and values in pages."""
