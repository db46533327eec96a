"""The gated feed-forward product of a mixture-of-experts layer over rows sorted by expert."""
