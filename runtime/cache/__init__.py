"""Pages of KV memory and the prefixes that share them."""
