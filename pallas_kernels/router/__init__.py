"""From router logits to experts: scores, the choice of the best, their weights, and how often each was chosen."""
